#define _GNU_SOURCE
#include "sha256.h"

#include <stdbool.h>
#include <string.h>

#include "util.h"

static const uint32_t round_constants[64] __attribute__((aligned(16))) = {
	0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
	0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
	0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
	0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
	0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
	0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
	0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
	0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static inline uint32_t rotate(uint32_t x, int by)
{
	return x >> by | x << (32 - by);
}

static void blocks_plain(uint32_t state[8], const uint8_t *data, size_t count)
{
	for (; count; count--, data += 64) {
		uint32_t w[64];
		uint32_t v[8];

		for (int i = 0; i < 16; i++)
			w[i] = get_u32(data + 4 * i);
		for (int i = 16; i < 64; i++) {
			uint32_t a = w[i - 15];
			uint32_t b = w[i - 2];

			w[i] = w[i - 16] + w[i - 7] + (rotate(a, 7) ^ rotate(a, 18) ^ a >> 3) +
			       (rotate(b, 17) ^ rotate(b, 19) ^ b >> 10);
		}
		memcpy(v, state, sizeof(v));
		for (int i = 0; i < 64; i++) {
			uint32_t s1 = rotate(v[4], 6) ^ rotate(v[4], 11) ^ rotate(v[4], 25);
			uint32_t choice = (v[4] & v[5]) ^ (~v[4] & v[6]);
			uint32_t t1 = v[7] + s1 + choice + round_constants[i] + w[i];
			uint32_t s0 = rotate(v[0], 2) ^ rotate(v[0], 13) ^ rotate(v[0], 22);
			uint32_t majority = (v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]);

			memmove(v + 1, v, 7 * sizeof(v[0]));
			v[4] += t1;
			v[0] = t1 + s0 + majority;
		}
		for (int i = 0; i < 8; i++)
			state[i] += v[i];
	}
}

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

static bool has_sha_instructions(void)
{
	unsigned a, b, c, d;

	if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_SSE4_1) || !(c & bit_SSSE3))
		return false;
	return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_SHA);
}

/* The instructions want the state as the vectors ABEF and CDGH, highest word first. */
__attribute__((target("sha,sse4.1,ssse3"))) static void
blocks_sha_ni(uint32_t state[8], const uint8_t *data, size_t count)
{
	const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
	const __m128i *constants = (const __m128i *)(const void *)round_constants;
	__m128i low = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)(const void *)state), 0xb1);
	__m128i high =
		_mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)(const void *)(state + 4)), 0x1b);
	__m128i abef = _mm_alignr_epi8(low, high, 8);
	__m128i cdgh = _mm_blend_epi16(high, low, 0xf0);

	for (; count; count--, data += 64) {
		const __m128i *in = (const __m128i *)(const void *)data;
		const __m128i old_abef = abef;
		const __m128i old_cdgh = cdgh;
		__m128i w[4] = {
			_mm_shuffle_epi8(_mm_loadu_si128(in), swap),
			_mm_shuffle_epi8(_mm_loadu_si128(in + 1), swap),
			_mm_shuffle_epi8(_mm_loadu_si128(in + 2), swap),
			_mm_shuffle_epi8(_mm_loadu_si128(in + 3), swap),
		};

#pragma GCC unroll 16
		for (int i = 0; i < 16; i++) {
			__m128i words = _mm_add_epi32(w[i & 3], _mm_load_si128(constants + i));

			cdgh = _mm_sha256rnds2_epu32(cdgh, abef, words);
			abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(words, 0x0e));
			if (i < 12) {
				__m128i next = _mm_sha256msg1_epu32(w[i & 3], w[(i + 1) & 3]);

				next = _mm_add_epi32(
					next, _mm_alignr_epi8(w[(i + 3) & 3], w[(i + 2) & 3], 4));
				w[i & 3] = _mm_sha256msg2_epu32(next, w[(i + 3) & 3]);
			}
		}
		abef = _mm_add_epi32(abef, old_abef);
		cdgh = _mm_add_epi32(cdgh, old_cdgh);
	}
	low = _mm_shuffle_epi32(abef, 0x1b);
	high = _mm_shuffle_epi32(cdgh, 0xb1);
	_mm_storeu_si128((__m128i *)(void *)state, _mm_blend_epi16(low, high, 0xf0));
	_mm_storeu_si128((__m128i *)(void *)(state + 4), _mm_alignr_epi8(high, low, 8));
}
#endif

static void blocks(uint32_t state[8], const uint8_t *data, size_t count)
{
#if defined(__x86_64__)
	static int sha_ni = -1;

	if (sha_ni < 0)
		sha_ni = has_sha_instructions();
	if (sha_ni) {
		blocks_sha_ni(state, data, count);
		return;
	}
#endif
	blocks_plain(state, data, count);
}

void sha256_init(struct sha256 *s)
{
	static const uint32_t start[8] = {
		0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
		0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
	};

	memcpy(s->state, start, sizeof(start));
	s->total = 0;
}

void sha256_update(struct sha256 *s, const void *data, size_t len)
{
	const uint8_t *at = data;
	size_t held = s->total % 64;

	s->total += len;
	if (held) {
		size_t take = 64 - held < len ? 64 - held : len;

		memcpy(s->block + held, at, take);
		at += take;
		len -= take;
		if (held + take < 64)
			return;
		blocks(s->state, s->block, 1);
	}
	if (len >= 64)
		blocks(s->state, at, len / 64);
	if (len % 64)
		memcpy(s->block, at + len / 64 * 64, len % 64);
}

void sha256_digest(const struct sha256 *s, uint8_t digest[32])
{
	uint8_t last[128] = {0};
	uint32_t state[8];
	size_t held = s->total % 64;
	size_t size = held < 56 ? 64 : 128;

	memcpy(last, s->block, held);
	last[held] = 0x80;
	put_u64(last + size - 8, s->total * 8);
	memcpy(state, s->state, sizeof(state));
	blocks(state, last, size / 64);
	for (int i = 0; i < 8; i++)
		put_u32(digest + 4 * i, state[i]);
}
