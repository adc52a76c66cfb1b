/*
 * A worker that outlives its daemon. Its node has given it a listening socket: when the connection
 * ends, everything goes on, and the next daemon connects there. Meanwhile leases end sandboxes here;
 * and if nobody comes for too long, all ends.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include "spawner.h"

/* So often it is seen whether the node's directory is still there. */
#define LOOK_NS (10 * NS_PER_S)

static struct {
	int listener;
	struct source source;
	uint64_t grace_ns, until;
	struct timer grace;
	bool listening;
	/* Room for its connection and its pidfd: commands that go on alone may take the last there is. */
	int reserve[2];
	bool alone; /* no daemon is there, and what that takes has been seen to */
} attach = {.listener = -1, .reserve = {-1, -1}};

static void listen_on(void)
{
	attach.listening = loop_add(attach.listener, &attach.source, EPOLLIN) == 0;
	for (size_t i = 0; i < ARRAY_LEN(attach.reserve); i++)
		if (attach.reserve[i] < 0)
			attach.reserve[i] = dup_cloexec(worker.null);
}

static void listener_ready(struct source *, uint32_t)
{
	struct ucred peer;
	socklen_t len = sizeof(peer);
	int fd;

	for (size_t i = 0; i < ARRAY_LEN(attach.reserve); i++)
		close_quietly(&attach.reserve[i]);
	fd = accept4(attach.listener, NULL, NULL, SOCK_CLOEXEC);
	/* Unless it was let in, attach_tend goes on with the next. */
	attach.listening = false;
	if (fd < 0)
		return;
	if (connection_alive() || getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &len) < 0 ||
	    peer.uid != geteuid()) {
		close(fd);
		return;
	}
	loop_remove(attach.listener);
	connection_open(fd);
}

/* Nobody has come in time; or nobody can, since the node's directory was removed. */
static void grace_over(struct timer *timer)
{
	uint64_t now = now_ns();
	struct stat st;

	if (now >= attach.until || (fstat(worker.spool, &st) == 0 && st.st_nlink == 0))
		worker.ending = true;
	else
		timer_set(timer, attach.until - now < LOOK_NS ? attach.until : now + LOOK_NS);
}

int attach_listen(int fd, uint64_t grace_ns)
{
	int error = timers_reserve();

	attach.listener = fd;
	attach.grace_ns = grace_ns;
	attach.source.ready = listener_ready;
	attach.grace.fire = grace_over;
	return error;
}

bool attach_possible(void)
{
	return attach.listener >= 0 && !worker.ending;
}

void attach_done(void)
{
	attach.alone = false;
	timer_cancel(&attach.grace);
	sandboxes_each(sandbox_lease_off);
}

void attach_tend(void)
{
	if (connection_alive() || !attach_possible())
		return;
	/* Also after one that came and said nothing. */
	if (!attach.listening)
		listen_on();
	if (attach.alone)
		return;
	attach.alone = true;
	attach.until = now_ns() + attach.grace_ns;
	grace_over(&attach.grace);
	execs_unwatch();
	sandboxes_each(sandbox_lease_on);
}
