/*
 * Remove trees that a sandbox has written, in a process of its own: hostile names, hostile
 * depth, and as many entries as there are. Never follows a link.
 */
#define _GNU_SOURCE
#include "remove.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "kernel.h"
#include "spawner.h"

#define DEPTH_MAX 32u
#define ENTRIES_BYTES (8u << 10)

struct entry {
	uint64_t inode;
	int64_t offset;
	uint16_t length;
	uint8_t type;
	char name[];
};

struct removal {
	int top;
	uint64_t removed;
	uint64_t serial;
};

static int empty(struct removal *removal, int dir, unsigned depth);

/* Remove one name. 1: gone or moved on, 0: was not there, else -errno. */
static int remove_one(struct removal *removal, int dir, const char *name, unsigned depth)
{
	auto_close int below = -1;
	char moved[48];

	if (unlinkat(dir, name, 0) == 0) {
		removal->removed++;
		return 1;
	}
	if (errno == ENOENT)
		return 0;
	if (errno != EISDIR && errno != EPERM)
		return -errno;
	if (unlinkat(dir, name, AT_REMOVEDIR) == 0) {
		removal->removed++;
		return 1;
	}
	if (errno != ENOTEMPTY && errno != EEXIST)
		return -errno;
	if (depth == DEPTH_MAX) {
		/* Too deep for our descriptors: continue with it from the top. */
		snprintf(moved, sizeof(moved), ".removed-%d-%llu", getpid(),
			 (unsigned long long)removal->serial++);
		TRY(check(renameat(dir, name, removal->top, moved)));
		return 1;
	}
	TRY(below = check(openat(dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)));
	if (depth == 0)
		removal->top = below;
	TRY(empty(removal, below, depth + 1));
	TRY(check(unlinkat(dir, name, AT_REMOVEDIR)));
	removal->removed++;
	return 1;
}

/* One pass over a directory. Returns how many entries went, or -errno. */
static int pass(struct removal *removal, int dir, unsigned depth)
{
	uint8_t buf[ENTRIES_BYTES] __attribute__((aligned(8)));
	int count = 0;

	TRY(check(lseek(dir, 0, SEEK_SET)));
	for (;;) {
		long got = syscall(SYS_getdents64, dir, buf, sizeof(buf));

		if (got < 0)
			return -errno;
		if (got == 0)
			return count;
		for (long at = 0; at < got;) {
			const struct entry *entry = (const void *)(buf + at);
			int result;

			at += entry->length;
			if (strcmp(entry->name, ".") == 0 || strcmp(entry->name, "..") == 0)
				continue;
			result = remove_one(removal, dir, entry->name, depth);
			if (result < 0)
				return result;
			count += result;
		}
	}
}

/* Some file systems skip entries while others are removed: until a pass finds none. */
static int empty(struct removal *removal, int dir, unsigned depth)
{
	int count;

	do
		count = pass(removal, dir, depth);
	while (count > 0);
	return count;
}

/* --- the process ---------------------------------------------------------------------- */

struct order {
	uint64_t request;
	char name[256];
};

struct outcome {
	uint64_t request;
	uint64_t removed;
	int error;
};

/* Counts what was removed; a name that is not there is no error. */
static struct outcome remove_tree_now(int dir, const struct order *order)
{
	struct removal removal = {.top = -1};
	int error = remove_one(&removal, dir, order->name, 0);

	return (struct outcome){
		.request = order->request, .removed = removal.removed, .error = error < 0 ? error : 0};
}

_Noreturn void remover_main(void)
{
	prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
	prctl(PR_SET_NAME, "remover", 0, 0, 0);
	for (;;) {
		struct order order = {0};
		struct outcome outcome = {0};
		int dir = -1;

		outcome.error = message_receive(CHANNEL, &order, sizeof(order), &dir);
		if (outcome.error == -ECONNRESET)
			_exit(0); /* the worker has ended */
		order.name[sizeof(order.name) - 1] = '\0';
		if (!outcome.error)
			outcome = remove_tree_now(dir, &order);
		close_quietly(&dir);
		if (send(CHANNEL, &outcome, sizeof(outcome), MSG_NOSIGNAL) < 0)
			_exit(0);
	}
}

/* --- in the worker -------------------------------------------------------------------- */

#define UNDER_WAY_MAX 16u

/* What was asked for, oldest first; the remover has been told of the first `under_way`. */
struct pending {
	struct pending *next;
	int dir;
	struct order order;
};

static int channel = -1;
static pid_t remover;
static struct source channel_source;
static struct pending *first, **last = &first, **untold = &first;
static unsigned under_way;
static uint8_t stack[16 << 10] __attribute__((aligned(16)));

NEVER_RETURNS static int run_remover(void *context)
{
	int *error = context;

	*error = execute_self(REMOVER_NAME);
	return 1;
}

/* Answer the oldest. */
static void answer_first(int error, uint64_t removed)
{
	struct pending *pending = first;

	if (error)
		answer_error(pending->order.request, -error, "remove", "");
	else
		answer_number(pending->order.request, removed);
	first = pending->next;
	if (last == &pending->next)
		last = &first;
	if (untold == &pending->next)
		untold = &first;
	if (under_way)
		under_way--;
	close_quietly(&pending->dir);
	free(pending);
}

static void lose_remover(void)
{
	loop_close(&channel);
	if (remover > 0) {
		kill(remover, SIGKILL);
		waitpid(remover, NULL, __WALL);
	}
	remover = 0;
	while (first)
		answer_first(-EIO, 0);
}

static int hand_over(struct pending *pending)
{
	int error = message_send(channel, &pending->order, sizeof(pending->order), pending->dir);

	if (!error)
		close_quietly(&pending->dir);
	return error;
}

static void hand_over_some(void)
{
	while (*untold && under_way < UNDER_WAY_MAX) {
		int error = hand_over(*untold);

		if (error && error != -EAGAIN) {
			lose_remover();
			return;
		}
		if (error)
			return;
		under_way++;
		untold = &(*untold)->next;
	}
}

static void channel_ready(struct source *, uint32_t)
{
	while (channel >= 0) {
		struct outcome outcome;
		ssize_t got = recv(channel, &outcome, sizeof(outcome), MSG_DONTWAIT);

		if (got < 0 && errno == EAGAIN)
			break;
		if (got != (ssize_t)sizeof(outcome) || !under_way ||
		    first->order.request != outcome.request) {
			lose_remover();
			return;
		}
		answer_first(outcome.error, outcome.removed);
	}
	hand_over_some();
}

static int start_remover(void)
{
	struct clone_args args = {
		.flags = CLONE_VM | CLONE_VFORK | CLONE_FILES,
		.stack = (uint64_t)(uintptr_t)stack,
		.stack_size = sizeof(stack),
	};
	int pair[2], error = 0;
	long pid;

	TRY(check(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair)));
	error = slot_put(pair[1], SLOT_CHANNEL);
	error = error ? error : slot_put(worker.program, SLOT_PROGRAM);
	pid = error ? error : clone_onto_stack(&args, run_remover, &error);
	slot_clear(SLOT_CHANNEL);
	slot_clear(SLOT_PROGRAM);
	close(pair[1]);
	channel = pair[0];
	remover = pid > 0 ? (pid_t)pid : 0;
	channel_source.ready = channel_ready;
	error = pid < 0 ? (int)pid : error ? error : loop_add(channel, &channel_source, EPOLLIN);
	if (error)
		lose_remover();
	return error;
}

int remove_tree(int dir, const char *name, uint64_t request)
{
	int error = channel < 0 ? start_remover() : 0;
	struct pending *pending = error ? NULL : calloc(1, sizeof(*pending));

	if (!pending) {
		close(dir);
		return error ? error : -ENOMEM;
	}
	*pending = (struct pending){.dir = dir, .order.request = request};
	snprintf(pending->order.name, sizeof(pending->order.name), "%s", name);
	*last = pending;
	last = &pending->next;
	hand_over_some();
	return 0;
}
