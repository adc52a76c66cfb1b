/* What handlers of requests take from a frame. A bad request is refused, nothing of it acted upon. */
#pragma once

#include "spawner.h"

#define TEXT_MAX 65536u

/*
 * Values are terminated in place, over the first byte of what follows them, once all fields
 * have been found. Behind a frame lies the next one's first byte, which is always 0.
 */
struct texts {
	size_t count;
	uint8_t *end[LAYERS_MAX + 16];
};

struct request {
	struct frame *frame;
	int *fds;
	const char *refusal; /* why it is not acted upon */
	int error;
	struct texts texts;
};

void refuse(struct request *r, int error, const char *why);
/* Answer a refused request; true if it was. */
bool refused(const struct request *r);
void unknown_tag(struct request *r);
/* A text that ends with a NUL once `terminate` was called. */
const char *take_text(struct request *r, const struct field *field, size_t max);
void terminate(struct request *r);
void take_numbers(struct request *r, const struct field *field, uint64_t *values, size_t count);
/* A descriptor of the frame's, which stays the frame's. */
int take_fd(struct request *r, const struct field *field, size_t offset);
/* Keep one of the frame's descriptors. */
int keep_fd(struct request *r, int fd);

#define EACH_FIELD(r, field)                                                                       \
	for (struct reader reader_ = {(r)->frame->body, (r)->frame->body + (r)->frame->len};       \
	     field_next(&reader_, &(field)) > 0;)

/* --- keep.c --- */
/* Take what is to be kept with a sandbox or command; false: the field is none of these. */
bool take_keep_field(struct request *r, const struct field *field, struct keep_spec *spec);
/* Handle one of the requests about what is kept; false: it is none. */
bool keep_request(struct request *r);

/* --- greet.c --- */
void greet_hello(struct request *r);
/* Another daemon takes over. It is told our version, and knows whether it speaks that. */
void greet_attach(struct request *r);
