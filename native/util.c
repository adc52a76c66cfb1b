#define _GNU_SOURCE
#include "util.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

uint64_t clock_ns(int clock)
{
	struct timespec now = {0};

	clock_gettime(clock, &now);
	return (uint64_t)now.tv_sec * NS_PER_S + (uint64_t)now.tv_nsec;
}

uint64_t now_ns(void)
{
	return clock_ns(CLOCK_MONOTONIC);
}

void link_last(struct link *ring, struct link *link)
{
	link->prev = ring->prev;
	link->next = ring;
	ring->prev->next = link;
	ring->prev = link;
}

void unlink_one(struct link *link)
{
	if (!link->next)
		return;
	link->prev->next = link->next;
	link->next->prev = link->prev;
	link->prev = link->next = NULL;
}

_Noreturn void fatal(const char *what)
{
	dprintf(2, "coldframe-native: cannot %s: %s\n", what, strerror(errno));
	abort();
}

/* Room for as many as a frame may have. */
union descriptors {
	struct cmsghdr header;
	char room[CMSG_SPACE(MAX_DESCRIPTORS * sizeof(int))];
};

ssize_t send_with(int socket, const void *data, size_t len, const int *fds, unsigned count)
{
	union descriptors control;
	struct iovec part = {.iov_base = (void *)(uintptr_t)data, .iov_len = len};
	struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
	ssize_t sent;

	if (count) {
		memset(&control, 0, sizeof(control));
		message.msg_control = &control;
		message.msg_controllen = (socklen_t)CMSG_SPACE(count * sizeof(int));
		control.header.cmsg_level = SOL_SOCKET;
		control.header.cmsg_type = SCM_RIGHTS;
		control.header.cmsg_len = (socklen_t)CMSG_LEN(count * sizeof(int));
		memcpy(CMSG_DATA(&control.header), fds, count * sizeof(int));
	}
	sent = sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
	return sent < 0 ? -errno : sent;
}

void close_batch(struct batch *batch)
{
	while (batch->count)
		close_quietly(&batch->fds[--batch->count]);
}

ssize_t receive_with(int socket, void *data, size_t len, int flags, struct batch *batch)
{
	union descriptors control;
	struct iovec part = {.iov_base = data, .iov_len = len};
	struct msghdr message = {
		.msg_iov = &part,
		.msg_iovlen = 1,
		.msg_control = &control,
		.msg_controllen = sizeof(control),
	};
	ssize_t got = recvmsg(socket, &message, MSG_CMSG_CLOEXEC | flags);
	struct cmsghdr *header = got < 0 ? NULL : CMSG_FIRSTHDR(&message);

	*batch = (struct batch){.lost = got >= 0 && message.msg_flags & MSG_CTRUNC};
	/* Those of one read come together, and nothing else of this kind was asked for. */
	if (header) {
		batch->count = (unsigned)((header->cmsg_len - CMSG_LEN(0)) / sizeof(int));
		memcpy(batch->fds, CMSG_DATA(header), batch->count * sizeof(int));
	}
	if (batch->lost)
		close_batch(batch);
	return got < 0 ? -errno : got;
}

int message_send(int channel, const void *data, size_t len, int fd)
{
	ssize_t sent = send_with(channel, data, len, &fd, fd >= 0);

	return sent < 0 ? (int)sent : 0;
}

int message_receive(int channel, void *data, size_t len, int *fd)
{
	struct batch batch;
	ssize_t got = receive_with(channel, data, len, 0, &batch);

	if (got < 0)
		return (int)got;
	if (got != (ssize_t)len)
		return got ? -EPROTO : -ECONNRESET;
	if (!fd)
		return 0;
	if (!batch.count)
		return -EBADF;
	*fd = batch.fds[0];
	return 0;
}

int write_file_at(int dir, const char *path, const char *text)
{
	size_t len = strlen(text);
	auto_close int fd = openat(dir, path, O_WRONLY | O_CLOEXEC | O_NOFOLLOW);
	ssize_t done;

	if (fd < 0)
		return -errno;
	done = write(fd, text, len);
	if (done < 0)
		return -errno;
	return (size_t)done == len ? 0 : -EIO;
}

ssize_t read_file_at(int dir, const char *path, char *buf, size_t size)
{
	auto_close int fd = openat(dir, path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
	ssize_t got = fd < 0 ? -1 : read(fd, buf, size - 1);

	if (got < 0)
		return -errno;
	buf[got] = '\0';
	return got;
}

const char *parse_number(const char *text, uint64_t *value)
{
	const char *at = text;
	uint64_t sum = 0;

	while (*at >= '0' && *at <= '9' && sum < UINT64_MAX / 10 - 9)
		sum = sum * 10 + (uint64_t)(*at++ - '0');
	*value = sum;
	return at == text ? NULL : at;
}

unsigned each_number(int fd, void (*each)(uint64_t value, void *context), void *context)
{
	char text[4096];
	unsigned count = 0;
	size_t have = 0;

	for (;;) {
		ssize_t got = read(fd, text + have, sizeof(text) - 1 - have);
		char *at = text, *end;

		if (got <= 0)
			return count;
		have += (size_t)got;
		text[have] = '\0';
		/* The last line may be cut, and then its number is another one. */
		for (; (end = strchr(at, '\n')); at = end + 1) {
			uint64_t value;

			if (!parse_number(at, &value))
				continue;
			count++;
			each(value, context);
		}
		have -= (size_t)(at - text);
		memmove(text, at, have);
	}
}

uint64_t number_after(const char *text, const char *key)
{
	size_t len = strlen(key);
	uint64_t value = 0;

	for (const char *line = text; line; line = strchr(line, '\n')) {
		if (*line == '\n')
			line++;
		if (strncmp(line, key, len) == 0 && line[len] == ' ') {
			parse_number(line + len + 1, &value);
			return value;
		}
	}
	return 0;
}
