/* What handlers of requests take from a frame. A bad request is refused, nothing of it acted upon. */
#pragma once

#include "spawner.h"

#define TEXT_MAX 65536u

/*
 * A handler returns 0, or -errno to have the request answered so, with what is said here. What it
 * takes lies in the frame.
 */
struct request {
	struct frame *frame;
	int *fds;
	const char *stage, *message;
};

/* The request itself is bad. */
int refuse(struct request *r, int error, const char *why);

enum want_kind { WANT_TEXT, WANT_TEXTS, WANT_NUMBERS, WANT_FD };

/* A field that a request may have, and where its value goes. */
struct want {
	uint16_t tag;
	enum want_kind kind;
	void *to;
	size_t max; /* bytes of a text; how many texts, or numbers */
	size_t *count; /* of texts */
};
#define TEXT(tag, to, max) {tag, WANT_TEXT, to, max, NULL}
#define TEXTS(tag, to, count) {tag, WANT_TEXTS, to, ARRAY_LEN(to), count}
#define NUMBERS(tag, to, count) {tag, WANT_NUMBERS, to, count, NULL}
#define DESCRIPTOR(tag, to) {tag, WANT_FD, to, 0, NULL}

/* For fields of other kinds. Returns 1, 0 for one that it does not know, or -errno. */
typedef int taker(struct request *r, const struct field *field, void *context);

/* Take every field. Texts end with a NUL; descriptors stay the frame's. */
int take(struct request *r, const struct want *wants, taker *other, void *context);
#define TAKE_OTHERS(r, other, context, ...)                                                        \
	take(r, (const struct want[]){__VA_ARGS__, {0}}, other, context)
#define TAKE(r, ...) TAKE_OTHERS(r, NULL, NULL, __VA_ARGS__)

int take_numbers(struct request *r, const struct field *field, uint64_t *values, size_t count);
int take_fd(struct request *r, const struct field *field, int *fd);
/* Keep one of the frame's descriptors. -1: it was kept before. */
int keep_fd(struct request *r, int fd);

/* --- keep.c --- */
/* What is to be kept with a sandbox or command; the context is a keep_spec. */
taker take_keep_field;
int handle_keep(struct request *r);
int handle_drop(struct request *r);
int handle_kept_list(struct request *r);
int handle_await(struct request *r);

/* --- greet.c --- */
int handle_hello(struct request *r);
/* Another daemon takes over. It is told our version, and knows whether it speaks that. */
int handle_attach(struct request *r);
