/* SHA-256 (FIPS 180-4), with the CPU's instructions where it has them. */
#pragma once

#include <stddef.h>
#include <stdint.h>

struct sha256 {
	uint32_t state[8];
	uint64_t total;
	uint8_t block[64];
};

void sha256_init(struct sha256 *s);
void sha256_update(struct sha256 *s, const void *data, size_t len);

/* Digest of what was fed so far; the state may be fed further. */
void sha256_digest(const struct sha256 *s, uint8_t digest[32]);
