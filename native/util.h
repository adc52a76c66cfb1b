/* Small helpers: each returns -errno on failure and never exits. */
#pragma once

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <unistd.h>

#include "protocol.h"

#define ARRAY_LEN(a) (sizeof(a) / sizeof((a)[0]))
#define NS_PER_S 1000000000ull
#define NS_PER_MS 1000000ull

#define container_of(ptr, type, member) ((type *)(void *)((char *)(ptr) - offsetof(type, member)))

static inline void close_quietly(int *fd)
{
	if (*fd >= 0)
		close(*fd);
	*fd = -1;
}

/* In a ring; not in any while both are NULL. A ring's head is one itself, linked to itself. */
struct link {
	struct link *prev, *next;
};

#define RING(head) {&(head), &(head)}

static inline bool ring_is_empty(const struct link *ring)
{
	return ring->next == ring;
}

void link_last(struct link *ring, struct link *link);
void unlink_one(struct link *link);

#define auto_close __attribute__((cleanup(close_quietly)))

/* Out of the hands of auto_close. */
static inline int take_fd_from(int *fd)
{
	int taken = *fd;

	*fd = -1;
	return taken;
}

/* What libc says in errno, as everything here says it. */
static inline int check(long result)
{
	return result < 0 ? -errno : (int)result;
}

/* Hand a failure on. What is open belongs to auto_close. */
#define TRY(expression)                                                                            \
	do {                                                                                       \
		int result_ = (expression);                                                        \
		if (result_ < 0)                                                                   \
			return result_;                                                            \
	} while (0)

uint64_t clock_ns(int clock);
uint64_t now_ns(void); /* CLOCK_MONOTONIC */

/* FNV-1a. */
static inline uint32_t hash_of(const char *text)
{
	uint32_t hash = 2166136261u;

	for (; *text; text++)
		hash = (hash ^ (uint8_t)*text) * 16777619u;
	return hash;
}

/* Say on standard error what failed, with errno, and abort: nothing could go on safely. */
_Noreturn void fatal(const char *what);

/* Send some of it, all descriptors with that; never waits. Returns how much, or -errno. */
ssize_t send_with(int socket, const void *data, size_t len, const int *fds, unsigned count);

/* Descriptors that came with something that was received. */
struct batch {
	bool lost; /* there was no room for them in this process: none is here */
	unsigned count;
	int fds[MAX_DESCRIPTORS];
};
void close_batch(struct batch *batch);

/* Receive some of it, with all descriptors that came with that. Returns how much, or -errno. */
ssize_t receive_with(int socket, void *data, size_t len, int flags, struct batch *batch);

/* Send one message, with a descriptor unless that is -1; never waits. Returns 0 or -errno. */
int message_send(int channel, const void *data, size_t len, int fd);

/*
 * Receive one message of `len` bytes, with a descriptor where `fd` is given. Returns 0 or -errno:
 * -ECONNRESET nobody is left to send one, -EPROTO another length, -EBADF no descriptor.
 */
int message_receive(int channel, void *data, size_t len, int *fd);

/* Write a whole (small) string to an existing file below `dir`. Returns 0 or -errno. */
int write_file_at(int dir, const char *path, const char *text);

/* Read a small file of the kernel's below `dir`, which gives all of it at once. Returns its length or -errno. */
ssize_t read_file_at(int dir, const char *path, char *buf, size_t size);

/* Call `each` for the number on every line of a file, however long that is; returns how many. */
unsigned each_number(int fd, void (*each)(uint64_t value, void *context), void *context);

/* The number behind `key` and a blank at the start of a line, or 0. */
uint64_t number_after(const char *text, const char *key);

/* Parse decimal digits; returns the first character behind them, or NULL if there are none. */
const char *parse_number(const char *text, uint64_t *value);

static inline uint16_t get_u16(const uint8_t *p)
{
	return (uint16_t)((uint16_t)(p[0] << 8) | p[1]);
}

static inline uint32_t get_u32(const uint8_t *p)
{
	return (uint32_t)get_u16(p) << 16 | get_u16(p + 2);
}

static inline uint64_t get_u64(const uint8_t *p)
{
	return (uint64_t)get_u32(p) << 32 | get_u32(p + 4);
}

static inline void put_u16(uint8_t *p, uint16_t v)
{
	p[0] = (uint8_t)(v >> 8);
	p[1] = (uint8_t)v;
}

static inline void put_u32(uint8_t *p, uint32_t v)
{
	put_u16(p, (uint16_t)(v >> 16));
	put_u16(p + 2, (uint16_t)v);
}

static inline void put_u64(uint8_t *p, uint64_t v)
{
	put_u32(p, (uint32_t)(v >> 32));
	put_u32(p + 4, (uint32_t)v);
}
