/*
 * coldframe-native: the spawner of a node, and under other names what it starts of itself.
 *
 *   coldframe-native spawner --fd N   a worker that serves the connected socket N
 *   coldframe-native --steps        the steps of a create, for tests that let them fail
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/securebits.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/inotify.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "init.h"
#include "kernel.h"
#include "remove.h"
#include "seccomp.h"
#include "spawner.h"

#define EVENTS_PER_TURN 256
#define REAP_MS 10

struct worker worker = {
	.epoll = -1,
	.inotify = -1,
	.layers = -1,
	.proc = -1,
	.spool = -1,
	.program = -1,
	.home_mounts = -1,
	.home_network = -1,
	.home_pids = -1,
	.cgroups = {.unified = -1, .v1 = {-1, -1, -1}},
};

static void inotify_ready(struct source *, uint32_t)
{
	char buf[4096] __attribute__((aligned(__alignof__(struct inotify_event))));
	ssize_t got;

	while ((got = read(worker.inotify, buf, sizeof(buf))) > 0)
		for (ssize_t at = 0; at < got;) {
			const struct inotify_event *event = (const void *)(buf + at);

			exec_cgroup_event(event->wd);
			at += (ssize_t)(sizeof(*event) + event->len);
		}
}

void inotify_prepare(void)
{
	worker.inotify = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
	worker.inotify_source.ready = inotify_ready;
	if (worker.inotify >= 0)
		loop_add(worker.inotify, &worker.inotify_source, EPOLLIN);
}

void inotify_forget(int watch)
{
	inotify_rm_watch(worker.inotify, watch);
}

/* Nothing inherited stays but the connection; the low numbers are kept for helpers. */
static int arrange_descriptors(int connection)
{
	int above = dup_cloexec(connection);

	TRY(above);
	sys_close_range(0, 1, 0);
	TRY(sys_close_range(3, (unsigned)above - 1, 0));
	TRY(sys_close_range((unsigned)above + 1, ~0u, 0));
	worker.null = open("/dev/null", O_RDWR | O_CLOEXEC);
	if (worker.null != 0)
		return -EBADF;
	TRY(check(dup2(worker.null, 1)));
	if (fcntl(2, F_GETFD) < 0)
		TRY(check(dup2(worker.null, 2)));
	for (int slot = SLOT_OUT; slot < SLOT_END; slot++)
		TRY(slot_put(worker.null, (enum slot)slot));
	return above;
}

static int settle(void)
{
	struct rlimit limit;
	sigset_t all;

	TRY(check(prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)));
	/* To act under a sandbox's ids without losing capabilities each time. */
	TRY(check(prctl(PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP, 0, 0, 0)));
	clearenv();
	setsid();
	umask(0);
	for (int signum = 1; signum < NSIG; signum++)
		signal(signum, SIG_DFL);
	/* For good, here and in pid 1: no handler ever runs, so that no call we make fails with EINTR. */
	sigfillset(&all);
	sigprocmask(SIG_SETMASK, &all, NULL);
	if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
		limit.rlim_cur = limit.rlim_max;
		setrlimit(RLIMIT_NOFILE, &limit);
		worker.files = limit.rlim_max;
	}
	return check(chdir("/"));
}

/* Returns the connection, or -errno. */
static int start(int connection)
{
	TRY(settle());
	TRY(connection = arrange_descriptors(connection));
	TRY(worker.home_mounts = check(open("/proc/self/ns/mnt", O_RDONLY | O_CLOEXEC)));
	TRY(worker.home_network = check(open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC)));
	TRY(worker.home_pids = check(open("/proc/self/ns/pid", O_RDONLY | O_CLOEXEC)));
	TRY(worker.epoll = check(epoll_create1(EPOLL_CLOEXEC)));
	return connection;
}

/*
 * Requests, reports and ends are dealt with at once; a stream is only put in line, for its share of
 * what is read in each turn. So nobody's output keeps others from being served.
 */
static void turn(void)
{
	struct epoll_event events[EVENTS_PER_TURN];
	bool ending = worker.ending;
	int due_ms = timers_run();
	int wait_ms = launches_reap() && (due_ms < 0 || due_ms > REAP_MS) ? REAP_MS : due_ms;
	/* A timer may have said that all ends now: no event need follow. */
	bool wait = !turns_due() && worker.ending == ending;
	int count = epoll_wait(worker.epoll, events, EVENTS_PER_TURN, wait ? wait_ms : 0);

	for (int i = 0; i < count; i++) {
		struct source *source = events[i].data.ptr;

		source->ready(source, events[i].events);
	}
	turns_run();
	free_blocks();
}

static int serve(int connection)
{
	connection = start(connection);
	if (connection < 0) {
		fprintf(stderr, "coldframe-native: cannot start: %s\n", strerror(-connection));
		return 1;
	}
	seccomp_prepare();
	connection_open(connection);
	do {
		turn();
		attach_tend();
	} while (connection_alive() || attach_possible());
	worker.ending = true;
	sandboxes_end();
	while (worker.sandboxes)
		turn();
	return 0;
}

static int number_of(const char *text)
{
	uint64_t value = 0;
	const char *end = parse_number(text, &value);

	return end && *end == '\0' && value < 1u << 20 ? (int)value : -1;
}

#ifdef __SANITIZE_ADDRESS__
/* We run without environment; and undumpable, so that the leak checker cannot look at us. */
const char *__asan_default_options(void);
const char *__asan_default_options(void)
{
	return "detect_leaks=0:detect_stack_use_after_return=0";
}
#endif

int main(int argc, char **argv)
{
	if (argc == 1 && strcmp(argv[0], INIT_NAME) == 0)
		init_main();
	if (argc == 1 && strcmp(argv[0], REMOVER_NAME) == 0)
		remover_main();
	if (argc == 2 && strcmp(argv[1], "--steps") == 0) {
		for (size_t i = 0; step_name(i); i++)
			printf("%s\n", step_name(i));
		return 0;
	}
	if (argc == 4 && strcmp(argv[1], "spawner") == 0 && strcmp(argv[2], "--fd") == 0 &&
	    number_of(argv[3]) >= 0)
		return serve(number_of(argv[3]));
	fprintf(stderr, "usage: %s spawner --fd N | --steps\n", argv[0]);
	return 2;
}
