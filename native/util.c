#define _GNU_SOURCE
#include "util.h"

#include <errno.h>
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

_Noreturn void fatal(const char *what)
{
	dprintf(2, "coldframe-native: cannot %s: %s\n", what, strerror(errno));
	abort();
}

union one_descriptor {
	struct cmsghdr header;
	char room[CMSG_SPACE(sizeof(int))];
};

int message_send(int channel, const void *data, size_t len, int fd)
{
	union one_descriptor control = {.header = {.cmsg_level = SOL_SOCKET,
						   .cmsg_type = SCM_RIGHTS,
						   .cmsg_len = CMSG_LEN(sizeof(int))}};
	struct iovec part = {.iov_base = (void *)(uintptr_t)data, .iov_len = len};
	struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};

	if (fd >= 0) {
		memcpy(CMSG_DATA(&control.header), &fd, sizeof(fd));
		message.msg_control = &control;
		message.msg_controllen = sizeof(control);
	}
	return sendmsg(channel, &message, MSG_NOSIGNAL | MSG_DONTWAIT) < 0 ? -errno : 0;
}

int message_receive(int channel, void *data, size_t len, int *fd)
{
	union one_descriptor control;
	struct iovec part = {.iov_base = data, .iov_len = len};
	struct msghdr message = {
		.msg_iov = &part,
		.msg_iovlen = 1,
		.msg_control = &control,
		.msg_controllen = sizeof(control),
	};
	struct cmsghdr *header;
	ssize_t got;

	do
		got = recvmsg(channel, &message, MSG_CMSG_CLOEXEC);
	while (got < 0 && errno == EINTR);
	if (got < 0)
		return -errno;
	if (got != (ssize_t)len)
		return got ? -EPROTO : -ECONNRESET;
	if (!fd)
		return 0;
	header = CMSG_FIRSTHDR(&message);
	if (!header || header->cmsg_type != SCM_RIGHTS || header->cmsg_len != CMSG_LEN(sizeof(int)))
		return -EBADF;
	memcpy(fd, CMSG_DATA(header), sizeof(int));
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

int write_number_at(int dir, const char *path, uint64_t value)
{
	char text[24];

	snprintf(text, sizeof(text), "%llu", (unsigned long long)value);
	return write_file_at(dir, path, text);
}

ssize_t read_file_at(int dir, const char *path, char *buf, size_t size)
{
	auto_close int fd = openat(dir, path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
	size_t have = 0;

	if (fd < 0)
		return -errno;
	while (have + 1 < size) {
		ssize_t got = read(fd, buf + have, size - 1 - have);

		if (got < 0)
			return -errno;
		if (got == 0)
			break;
		have += (size_t)got;
	}
	buf[have] = '\0';
	return (ssize_t)have;
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

		if (got < 0 && errno == EINTR)
			continue;
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
