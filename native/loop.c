/* epoll, a heap of timers, and the low descriptors that helpers keep. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <sys/epoll.h>

#include "spawner.h"

static struct timer **heap; /* from 1 */
static size_t heap_len, heap_cap;

int loop_add(int fd, struct source *source, uint32_t events)
{
	struct epoll_event event = {.events = events, .data.ptr = source};

	if (epoll_ctl(worker.epoll, EPOLL_CTL_ADD, fd, &event) == 0)
		return 0;
	return errno == EEXIST ? loop_again(fd, source, events) : -errno;
}

int loop_again(int fd, struct source *source, uint32_t events)
{
	struct epoll_event event = {.events = events, .data.ptr = source};

	return check(epoll_ctl(worker.epoll, EPOLL_CTL_MOD, fd, &event));
}

void loop_remove(int fd)
{
	epoll_ctl(worker.epoll, EPOLL_CTL_DEL, fd, NULL);
}

void loop_close(int *fd)
{
	if (*fd >= 0)
		loop_remove(*fd);
	close_quietly(fd);
}

static void place(size_t index, struct timer *timer)
{
	heap[index] = timer;
	timer->index = index;
}

static void sift(size_t index, struct timer *timer)
{
	while (index > 1 && heap[index / 2]->at > timer->at) {
		place(index, heap[index / 2]);
		index /= 2;
	}
	for (;;) {
		size_t child = 2 * index;

		if (child > heap_len)
			break;
		if (child < heap_len && heap[child + 1]->at < heap[child]->at)
			child++;
		if (heap[child]->at >= timer->at)
			break;
		place(index, heap[child]);
		index = child;
	}
	place(index, timer);
}

int timers_reserve(void)
{
	/* A sandbox has one of its own, one of its lease, and one of its leftovers'. */
	size_t need = 3 * worker.sandboxes + worker.execs + 8;
	struct timer **more;

	if (need < heap_cap)
		return 0;
	more = realloc(heap, 2 * (need + 128) * sizeof(*heap));
	if (!more)
		return -ENOMEM;
	heap = more;
	heap_cap = 2 * (need + 128);
	return 0;
}

void timer_set(struct timer *timer, uint64_t at)
{
	timer_cancel(timer);
	timer->at = at;
	heap_len++;
	sift(heap_len, timer);
}

void timer_in(struct timer *timer, uint64_t ns)
{
	timer_set(timer, now_ns() + ns);
}

void timer_cancel(struct timer *timer)
{
	size_t index = timer->index;
	struct timer *last;

	if (!index)
		return;
	timer->index = 0;
	last = heap[heap_len--];
	if (last != timer)
		sift(index, last);
}

int timers_run(void)
{
	for (;;) {
		uint64_t now, wait_ms;
		struct timer *first;

		if (!heap_len)
			return -1;
		first = heap[1];
		now = now_ns();
		if (first->at > now) {
			wait_ms = (first->at - now + NS_PER_MS - 1) / NS_PER_MS;
			return wait_ms > INT_MAX ? INT_MAX : (int)wait_ms;
		}
		timer_cancel(first);
		first->fire(first);
	}
}

static void **blocks;

void free_later(void *block)
{
	*(void ***)block = blocks;
	blocks = block;
}

void free_blocks(void)
{
	while (blocks) {
		void **block = blocks;

		blocks = *block;
		free(block);
	}
}

void slot_clear(enum slot slot)
{
	dup3(worker.null, (int)slot, O_CLOEXEC);
}

int slot_put(int fd, enum slot slot)
{
	return dup3(fd, (int)slot, O_CLOEXEC) < 0 ? -errno : 0;
}

int dup_cloexec(int fd)
{
	return check(fcntl(fd, F_DUPFD_CLOEXEC, SLOT_END));
}
