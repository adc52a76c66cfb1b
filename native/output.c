/*
 * Drain one stream: hash all of it, keep it in memory while it is short, else in a spool file
 * of bounded size (a head, and a ring for what follows; docs/protocol.md).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <time.h>

#include "spawner.h"

#define CHUNK (64u << 10)
/* So much is read in one turn of the loop before it looks for requests again. */
#define TURN_BYTES (64u << 10)
#define TURN_READS 16u
/* Of a terminal nobody tells how much it holds: this is more. */
#define TERMINAL_MAX (128u << 10)
#define LOOK_BYTES 4096u
/*
 * Once the result is delivered, what its leftovers write is nobody's work any more: all of a sandbox
 * together are read at this rate, and wait for it as for any slow reader.
 */
#define LEFTOVER_RATE (2u << 20) /* bytes per second */
#define LEFTOVER_BURST (2u << 20)

static uint8_t chunk[CHUNK];

static int write_at(int fd, const uint8_t *data, size_t len, uint64_t offset)
{
	while (len) {
		ssize_t done = pwrite(fd, data, len, (off_t)offset);

		if (done < 0 && errno == EINTR)
			continue;
		if (done <= 0)
			return done < 0 ? -errno : -EIO;
		data += done;
		offset += (uint64_t)done;
		len -= (size_t)done;
	}
	return 0;
}

/* Put stream bytes [at, at + len) where they belong; what a turn of the ring hides is skipped. */
static void spool_write(struct stream *stream, const uint8_t *data, size_t len, uint64_t at)
{
	uint64_t head = stream->exec->spool_bytes / 2;
	uint64_t ring = stream->exec->spool_bytes - head;

	while (len && !stream->spool_errno) {
		uint64_t offset = at, room = head - at;
		size_t take;

		if (at >= head) {
			if (len > ring) {
				uint64_t skip = len - ring;

				data += skip;
				at += skip;
				len -= (size_t)skip;
			}
			offset = head + (at - head) % ring;
			room = head + ring - offset;
		}
		take = len < room ? len : (size_t)room;
		stream->spool_errno = -write_at(stream->spool, data, take, offset);
		data += take;
		at += take;
		len -= take;
	}
}

int stream_spool(struct stream *stream)
{
	if (stream->spool >= 0)
		return 0;
	stream->spool = openat(worker.spool, ".", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
	if (stream->spool < 0)
		return -errno;
	spool_write(stream, stream->held, stream->held_len, 0);
	free(stream->held);
	stream->held = NULL;
	stream->held_len = stream->held_cap = 0;
	return 0;
}

/* Grow the memory that holds a short stream; false when it has to go to the spool. */
static bool hold(struct stream *stream, const uint8_t *data, size_t len)
{
	uint64_t need = stream->held_len + (uint64_t)len;

	if (need > stream->exec->inline_bytes)
		return false;
	if (need > stream->held_cap) {
		uint64_t cap = need < 256 ? 256 : 2 * need;
		uint8_t *more = realloc(stream->held, cap);

		if (!more)
			return false;
		stream->held = more;
		stream->held_cap = (uint32_t)cap;
	}
	memcpy(stream->held + stream->held_len, data, len);
	stream->held_len = (uint32_t)need;
	return true;
}

static void take(struct stream *stream, const uint8_t *data, size_t len)
{
	uint64_t at = stream->total;

	/* The digest was delivered with the result. */
	if (!stream->exec->ended)
		sha256_update(&stream->sha, data, len);
	stream->total += len;
	if (stream->spool < 0 && !stream->spool_errno && hold(stream, data, len))
		return;
	if (stream->spool < 0 && !stream->spool_errno)
		stream->spool_errno = -stream_spool(stream);
	if (!stream->spool_errno)
		spool_write(stream, data, len, at);
}

/* --- taking turns ---------------------------------------------------------------------- */

static struct link lanes = {&lanes, &lanes};

static void link_last(struct link *ring, struct link *link)
{
	link->prev = ring->prev;
	link->next = ring;
	ring->prev->next = link;
	ring->prev = link;
}

static void unlink_one(struct link *link)
{
	if (!link->next)
		return;
	link->prev->next = link->next;
	link->next->prev = link->prev;
	link->prev = link->next = NULL;
}

static void leave(struct stream *stream)
{
	struct lane *lane = stream->lane;

	if (!lane)
		return;
	unlink_one(&stream->link);
	stream->lane = NULL;
	if (lane->streams.next == &lane->streams) {
		unlink_one(&lane->link);
		timer_cancel(&lane->timer);
	}
}

static void queue(struct stream *stream)
{
	struct sandbox *sandbox = stream->exec->sandbox;
	struct lane *lane = stream->exec->ended ? &sandbox->leftover : &sandbox->running;

	leave(stream);
	if (!lane->streams.next)
		lane->streams = (struct link){&lane->streams, &lane->streams};
	link_last(&lane->streams, &stream->link);
	stream->lane = lane;
	if (!lane->link.next && !lane->timer.index)
		link_last(&lanes, &lane->link);
}

static void wait_over(struct timer *timer)
{
	struct lane *lane = container_of(timer, struct lane, timer);

	link_last(&lanes, &lane->link);
}

/* How much may be read of leftovers now; if it is not worth a read, their lane has to wait. */
static size_t allowance(struct lane *lane)
{
	uint64_t now = clock_ns(CLOCK_MONOTONIC);
	uint64_t passed = now - lane->counted_ns;

	if (!lane->counted_ns || passed > NS_PER_S)
		lane->tokens = LEFTOVER_BURST;
	else
		lane->tokens += passed * LEFTOVER_RATE / NS_PER_S;
	lane->counted_ns = now;
	if (lane->tokens > LEFTOVER_BURST)
		lane->tokens = LEFTOVER_BURST;
	if (lane->tokens >= CHUNK)
		return CHUNK;
	unlink_one(&lane->link);
	lane->timer.fire = wait_over;
	timer_set(&lane->timer, now + (CHUNK - lane->tokens + LOOK_BYTES) * NS_PER_S / LEFTOVER_RATE);
	return 0;
}

static void end(struct stream *stream)
{
	stream->eof = true;
	leave(stream);
	if (stream->fd >= 0) {
		loop_remove(stream->fd);
		close_quietly(&stream->fd);
	}
}

/* Read once. Returns how much that was; 0 at the end, or if nothing is there. */
static size_t read_some(struct stream *stream, size_t most)
{
	ssize_t got;

	do
		got = read(stream->fd, chunk, most < CHUNK ? most : CHUNK);
	while (got < 0 && errno == EINTR);
	if (got > 0)
		take(stream, chunk, (size_t)got);
	else if (got == 0 || errno != EAGAIN)
		end(stream); /* a terminal says EIO when its last holder has gone */
	return got > 0 ? (size_t)got : 0;
}

/* One read of the stream whose turn it is. Returns how much that was. */
static size_t serve(struct lane *lane)
{
	struct stream *stream = container_of(lane->streams.next, struct stream, link);
	struct sandbox *sandbox = stream->exec->sandbox;
	size_t most = CHUNK, got;

	/* Its exec may have ended since it was put in line. */
	if (stream->exec->ended && lane == &sandbox->running) {
		queue(stream);
		return 0;
	}
	if (lane == &sandbox->leftover)
		most = allowance(lane);
	if (!most)
		return 0;
	got = read_some(stream, most);
	if (lane == &sandbox->leftover)
		lane->tokens -= got;
	if (!got && !stream->eof) {
		leave(stream);
		if (loop_again(stream->fd, &stream->source, EPOLLIN | EPOLLONESHOT) < 0)
			end(stream);
	} else if (got) {
		queue(stream);
	}
	exec_progress(stream->exec);
	return got;
}

bool streams_turn(void)
{
	size_t bytes = 0;

	for (unsigned i = 0; i < TURN_READS && bytes < TURN_BYTES && lanes.next != &lanes; i++) {
		struct lane *lane = container_of(lanes.next, struct lane, link);

		unlink_one(&lane->link);
		link_last(&lanes, &lane->link);
		bytes += serve(lane);
	}
	return lanes.next != &lanes;
}

/* --- one stream ------------------------------------------------------------------------- */

void stream_drain(struct stream *stream)
{
	bool pipe = stream->fd >= 0 && fcntl(stream->fd, F_GETPIPE_SZ) > 0;
	size_t left = TERMINAL_MAX;
	int there = 0;

	if (stream->eof || (pipe && ioctl(stream->fd, FIONREAD, &there) < 0))
		return;
	/* An empty pipe may have ended. */
	if (pipe)
		left = there > 0 ? (size_t)there : LOOK_BYTES;
	while (left && !stream->eof) {
		size_t got = read_some(stream, left);

		if (!got)
			return;
		left -= got;
	}
}

static void stream_ready(struct source *source, uint32_t events)
{
	struct stream *stream = container_of(source, struct stream, source);

	(void)events;
	if (stream->fd >= 0)
		queue(stream);
}

int stream_open(struct stream *stream, struct exec *exec, int fd)
{
	stream->exec = exec;
	stream->fd = fd;
	stream->eof = fd < 0;
	stream->source.ready = stream_ready;
	sha256_init(&stream->sha);
	return fd < 0 ? 0 : loop_add(fd, &stream->source, EPOLLIN | EPOLLONESHOT);
}

void stream_close(struct stream *stream)
{
	end(stream);
	close_quietly(&stream->spool);
	free(stream->held);
	stream->held = NULL;
}
