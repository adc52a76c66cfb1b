/*
 * Drain one stream: hash all of it, keep it in memory while it is short, else in a spool file
 * of bounded size (a head, and a ring for what follows; docs/protocol.md).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>

#include "spawner.h"

/* Of a terminal nobody tells how much it holds: this is more. */
#define TERMINAL_MAX (128u << 10)
#define LOOK_BYTES 4096u
/* Memory that once was ours counts as a command's peak: from so much on that is set right. */
#define HELD_MUCH (32u << 10)

static uint8_t chunk[STREAM_READ_MAX];

static int write_at(int fd, const uint8_t *data, size_t len, uint64_t offset)
{
	while (len) {
		ssize_t done = pwrite(fd, data, len, (off_t)offset);

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

/* Hold nothing of it in memory any more. */
static void drop(struct stream *stream)
{
	if (stream->held_cap >= HELD_MUCH)
		worker.swollen = true;
	free(stream->held);
	stream->held = NULL;
	stream->held_len = stream->held_cap = 0;
}

int stream_spool(struct stream *stream)
{
	if (stream->spool >= 0)
		return 0;
	stream->spool = openat(worker.spool, ".", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
	if (stream->spool < 0)
		return -errno;
	spool_write(stream, stream->held, stream->held_len, 0);
	drop(stream);
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

static void end(struct stream *stream)
{
	stream->eof = true;
	turns_leave(stream);
	/* The node has the terminal too; a pipe's end is ours alone, and closing ends its watch. */
	if (stream->fd >= 0 && stream->exec->pty)
		loop_remove(stream->fd);
	close_quietly(&stream->fd);
}

void stream_keep(struct stream *stream)
{
	struct pollfd look = {.fd = stream->fd, .events = POLLIN};

	if (stream->eof)
		return;
	if (poll(&look, 1, 0) == 1 && !(look.revents & POLLIN))
		end(stream);
	else
		(void)stream_spool(stream); /* or what comes is lost when its last writer has gone */
}

void stream_state_total(const struct stream *stream)
{
	if (stream->spool >= 0 && !stream->spool_errno && stream->total > stream->exec->spool_bytes)
		(void)!ftruncate(stream->spool, (off_t)stream->total);
}

size_t stream_read(struct stream *stream, size_t most)
{
	ssize_t got = read(stream->fd, chunk, most < STREAM_READ_MAX ? most : STREAM_READ_MAX);

	if (got > 0)
		take(stream, chunk, (size_t)got);
	else if (got == 0 || errno != EAGAIN)
		end(stream); /* a terminal says EIO when its last holder has gone */
	return got > 0 ? (size_t)got : 0;
}

void stream_await(struct stream *stream)
{
	if (loop_again(stream->fd, &stream->source, EPOLLIN | EPOLLONESHOT) < 0)
		end(stream);
}

void stream_drain(struct stream *stream)
{
	bool pipe = !stream->exec->pty;
	size_t left = TERMINAL_MAX;
	int there = 0;

	if (stream->eof || (pipe && ioctl(stream->fd, FIONREAD, &there) < 0))
		return;
	/* An empty pipe may have ended. */
	if (pipe)
		left = there > 0 ? (size_t)there : LOOK_BYTES;
	while (left && !stream->eof) {
		size_t got = stream_read(stream, left);

		if (!got)
			return;
		left -= got;
	}
}

static void stream_ready(struct source *source, uint32_t)
{
	struct stream *stream = container_of(source, struct stream, source);

	if (stream->fd >= 0)
		turns_join(stream);
}

void stream_watch(struct stream *stream)
{
	if (loop_add(stream->fd, &stream->source, EPOLLIN | EPOLLONESHOT) < 0)
		end(stream);
}

void stream_open(struct stream *stream, struct exec *exec, int fd)
{
	stream->exec = exec;
	stream->fd = fd;
	stream->eof = fd < 0;
	stream->source.ready = stream_ready;
	sha256_init(&stream->sha);
	if (fd >= 0 && exec->pty)
		stream_watch(stream);
	else if (fd >= 0)
		turns_begin(stream);
}

void stream_close(struct stream *stream)
{
	end(stream);
	close_quietly(&stream->spool);
	drop(stream);
}

void stream_forget(struct stream *stream)
{
	close_quietly(&stream->spool);
	drop(stream);
	stream->spool_errno = ENOENT;
}
