/* Frames and their fields: pure functions over bytes (docs/protocol.md). */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "protocol.h"

#define FRAME_HEADER 16u
#define FRAME_MIN 12u
#define FIELD_HEADER 6u

struct frame {
	uint16_t type;
	uint16_t descriptors;
	uint64_t request;
	uint8_t *body;
	size_t len;
};

struct field {
	uint16_t tag;
	uint32_t len;
	uint8_t *data;
};

/* Walks the fields of one body. */
struct reader {
	uint8_t *at;
	uint8_t *end;
};

/* Builds one frame in a buffer of the caller's. `overflow` sticks. */
struct builder {
	uint8_t *buf;
	size_t cap;
	size_t len;
	bool overflow;
	unsigned descriptors;
	int fds[MAX_DESCRIPTORS];
};

/*
 * Look at the start of `buf`. Returns the bytes that the first frame takes, 0 when it is not
 * complete yet, -EMSGSIZE for a length no frame can have, -EPROTO for too many descriptors.
 */
ssize_t frame_parse(uint8_t *buf, size_t have, struct frame *frame);

/* Returns 1 and a field, 0 at the end, -EPROTO when the field is cut. */
int field_next(struct reader *reader, struct field *field);

/* Text without NUL and of at most `max` bytes? */
bool field_is_text(const struct field *field, size_t max);

void build_begin(struct builder *b, uint8_t *buf, size_t cap, uint16_t type, uint64_t request);
void build_bytes(struct builder *b, uint16_t tag, const void *data, size_t len);
void build_text(struct builder *b, uint16_t tag, const char *text);
void build_u64(struct builder *b, uint16_t tag, uint64_t value);
void build_u64s(struct builder *b, uint16_t tag, const uint64_t *values, size_t count);

/* Room for `len` bytes of a field to be filled in by the caller, or NULL. */
uint8_t *build_space(struct builder *b, uint16_t tag, size_t len);

/* A descriptor travels with the frame; it stays the caller's. */
void build_fd(struct builder *b, uint16_t tag, int fd);

/* Fill in the header. Returns the frame's length, or -EMSGSIZE. */
ssize_t build_end(struct builder *b);
