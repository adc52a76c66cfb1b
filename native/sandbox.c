/* From CREATE to DESTROY: namespaces, pid 1, and what is left to clear up. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/capability.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>

#include "init.h"
#include "kernel.h"
#include "spawner.h"

#define BUCKETS 1024u
#define REMOVE_TRIES 600u
#define REAP_TRIES 500u
/* A sandbox can make pid 1 report orphans for as long as it likes: others get their turn between. */
#define REPORTS_PER_TURN 64u

const char *const worker_steps[] = {
	"cgroup", "channel", "clone",	 "map",	 "limits",	    "layers",
	"upper",  "overlay", "writable", "mount points", "devices", "go",
};
const size_t worker_step_count = ARRAY_LEN(worker_steps);

static struct sandbox *table[BUCKETS];
static struct sandbox *dead;
static uint8_t clone_stack[32 << 10] __attribute__((aligned(16)));

static struct sandbox **chain_of(const char *id)
{
	uint32_t hash = 2166136261u;

	for (; *id; id++)
		hash = (hash ^ (uint8_t)*id) * 16777619u;
	return &table[hash % BUCKETS];
}

struct sandbox *sandbox_find(const char *id)
{
	struct sandbox *sandbox = *chain_of(id);

	while (sandbox && strcmp(sandbox->id, id) != 0)
		sandbox = sandbox->next;
	return sandbox;
}

static void forget(struct sandbox *sandbox)
{
	struct sandbox **link = chain_of(sandbox->id);

	if (!sandbox->listed)
		return;
	while (*link != sandbox)
		link = &(*link)->next;
	*link = sandbox->next;
	sandbox->listed = false;
	worker.sandboxes--;
	/* An event of this turn may still point to it. */
	sandbox->dead = dead;
	dead = sandbox;
}

void sandboxes_free_dead(void)
{
	while (dead) {
		struct sandbox *next = dead->dead;

		free(dead);
		dead = next;
	}
}

/* --- the end of one ------------------------------------------------------------------ */

static void answer_kill(struct sandbox *sandbox)
{
	if (sandbox->kill_request)
		answer_number(sandbox->kill_request, sandbox->killed);
	sandbox->kill_request = 0;
	timer_cancel(&sandbox->timer);
}

static void finish(struct sandbox *sandbox, int error)
{
	if (sandbox->create_request) {
		answer_error(sandbox->create_request, sandbox->fault, sandbox->fault_stage, "");
		sandbox->create_request = 0;
		forget(sandbox);
		return;
	}
	sandbox->state = SANDBOX_GONE;
	if (!sandbox->destroy_request)
		return;
	if (error)
		answer_error(sandbox->destroy_request, -error, "remove cgroup", "");
	else
		answer_ok(sandbox->destroy_request);
	forget(sandbox);
}

static void clean(struct sandbox *sandbox)
{
	int error = cgroup_remove(sandbox);

	if (error && sandbox->tries++ < REMOVE_TRIES) {
		/* Dead processes hold a version 1 cgroup for a moment after they were reaped. */
		uint64_t wait = sandbox->tries < 20 ? sandbox->tries * NS_PER_MS : 50 * NS_PER_MS;

		timer_set(&sandbox->timer, clock_ns(CLOCK_MONOTONIC) + wait);
		return;
	}
	finish(sandbox, error);
}

static void report_gone(struct sandbox *sandbox, uint64_t ooms)
{
	bool signalled = WIFSIGNALED(sandbox->exit_status);
	uint64_t code = (uint64_t)(signalled ? WTERMSIG(sandbox->exit_status)
					     : WEXITSTATUS(sandbox->exit_status));
	uint64_t cause = signalled ? GONE_CAUSE_SIGNAL : GONE_CAUSE_EXIT;
	struct builder *b = answer_begin(TYPE_SANDBOX_GONE, 0);

	if (signalled && code == SIGKILL && ooms > sandbox->ooms_seen)
		cause = GONE_CAUSE_OOM;
	build_text(b, TAG_SANDBOX, sandbox->id);
	build_u64s(b, TAG_GONE_NUMBERS, (uint64_t[]){cause, code}, 2);
	answer_send(b);
}

/* Pid 1 has been reaped, and with it went every process of its namespace. */
static void after_death(struct sandbox *sandbox)
{
	uint64_t ooms = cgroup_ooms(sandbox);

	while (sandbox->execs)
		exec_sandbox_gone(sandbox->execs);
	answer_kill(sandbox);
	if (!sandbox->create_request && !sandbox->destroy_request)
		report_gone(sandbox, ooms);
	/* Others may hold the same open files (the node has our pidfd): closing ends no watch. */
	loop_remove(sandbox->channel);
	loop_remove(sandbox->pidfd);
	close_quietly(&sandbox->channel);
	close_quietly(&sandbox->pidfd);
	close_quietly(&sandbox->root);
	sandbox->state = SANDBOX_CLEANING;
	sandbox->tries = 0;
	clean(sandbox);
}

static void timer_fired(struct timer *timer)
{
	struct sandbox *sandbox = container_of(timer, struct sandbox, timer);

	if (sandbox->state == SANDBOX_CLEANING)
		clean(sandbox);
	else
		sandbox_kill_progress(sandbox);
}

static void read_channel(struct sandbox *sandbox, unsigned most);

static void pidfd_ready(struct source *source, uint32_t events)
{
	struct sandbox *sandbox = container_of(source, struct sandbox, pidfd_source);
	siginfo_t info = {0};

	(void)events;
	if (sandbox->pidfd < 0 || sandbox->state == SANDBOX_CLEANING)
		return;
	if (waitid(P_PIDFD, (id_t)sandbox->pidfd, &info, WEXITED | WNOHANG | __WALL) < 0 ||
	    info.si_pid == 0)
		return;
	sandbox->exit_status = info.si_code == CLD_EXITED ? (info.si_status & 0xff) << 8
							  : info.si_status & 0x7f;
	/* What it reported before it died counts. */
	if (!sandbox->channel_ended)
		read_channel(sandbox, UINT_MAX);
	after_death(sandbox);
}

static void await_death(struct sandbox *sandbox)
{
	if (sandbox->state == SANDBOX_DYING)
		return;
	sandbox->state = SANDBOX_DYING;
	cgroup_hasten(sandbox);
	sandbox->pidfd_source.ready = pidfd_ready;
	loop_add(sandbox->pidfd, &sandbox->pidfd_source, EPOLLIN);
}

static void kill_init(struct sandbox *sandbox)
{
	if (sandbox->pid <= 0) {
		after_death(sandbox);
		return;
	}
	syscall(SYS_pidfd_send_signal, sandbox->pidfd, SIGKILL, NULL, 0);
	await_death(sandbox);
}

static void create_failed(struct sandbox *sandbox, int error, const char *stage)
{
	if (!sandbox->fault) {
		sandbox->fault = -error;
		snprintf(sandbox->fault_stage, sizeof(sandbox->fault_stage), "%s", stage);
	}
	rootfs_release(true);
	kill_init(sandbox);
}

void sandbox_destroy(struct sandbox *sandbox, uint64_t request)
{
	if (sandbox->destroy_request || sandbox->create_request) {
		answer_error(request, EBUSY, "sandbox", "it is being made or destroyed");
		return;
	}
	sandbox->destroy_request = request;
	if (sandbox->state == SANDBOX_LIVE)
		kill_init(sandbox);
	else if (sandbox->state == SANDBOX_GONE)
		finish(sandbox, 0);
}

void sandboxes_end(void)
{
	for (size_t i = 0; i < BUCKETS; i++)
		for (struct sandbox *sandbox = table[i], *next; sandbox; sandbox = next) {
			next = sandbox->next;
			if (sandbox->state == SANDBOX_GONE)
				forget(sandbox);
			else if (sandbox->state == SANDBOX_LIVE)
				sandbox_destroy(sandbox, UINT64_MAX);
			else if (sandbox->state == SANDBOX_STARTING)
				create_failed(sandbox, -ECONNRESET, "connection");
			else if (!sandbox->create_request && !sandbox->destroy_request)
				sandbox->destroy_request = UINT64_MAX;
		}
}

/* --- killing all but pid 1 ----------------------------------------------------------- */

/*
 * Answer once no exec that was killed is left, and pid 1 has waited for the dead: until then they
 * count against the limit of processes, and the next command could not be started.
 */
void sandbox_kill_progress(struct sandbox *sandbox)
{
	if (!sandbox->kill_request)
		return;
	for (struct exec *exec = sandbox->execs; exec; exec = exec->sibling)
		if (exec->killed && !(exec->ended && exec->cgroup_gone))
			return;
	if (!sandbox->execs && cgroup_tasks(sandbox) > 1 && sandbox->tries++ < REAP_TRIES)
		timer_set(&sandbox->timer, clock_ns(CLOCK_MONOTONIC) + NS_PER_MS);
	else
		answer_kill(sandbox);
}

void sandbox_kill_all(struct sandbox *sandbox, uint64_t request)
{
	if (sandbox->state != SANDBOX_LIVE) {
		answer_error(request, ESRCH, "sandbox", "it is gone");
		return;
	}
	if (sandbox->kill_request) {
		answer_error(request, EBUSY, "sandbox", "everything in it is being killed");
		return;
	}
	sandbox->killed = 0;
	sandbox->tries = 0;
	for (struct exec *exec = sandbox->execs, *next; exec; exec = next) {
		char name[32];

		next = exec->sibling;
		cgroup_exec_name(exec, "", name, sizeof(name));
		sandbox->killed += cgroup_pids(sandbox, name, NULL, NULL);
		exec_kill(exec, REASON_SIGNAL);
	}
	sandbox->kill_request = request;
	sandbox_kill_progress(sandbox);
}

/* --- reports of pid 1 ---------------------------------------------------------------- */

static uint64_t inode_at(const struct sandbox *sandbox, const char *file)
{
	char path[48];
	struct stat st;

	snprintf(path, sizeof(path), "%d/ns/%s", sandbox->pid, file);
	return fstatat(worker.proc, path, &st, 0) < 0 ? 0 : st.st_ino;
}

static void created(struct sandbox *sandbox)
{
	static const char *const kinds[] = {"user", "mnt", "pid", "net", "ipc", "uts", "cgroup"};
	uint64_t numbers[ARRAY_LEN(kinds) + 2];
	struct builder *b;
	char path[32];

	snprintf(path, sizeof(path), "%d/root", sandbox->pid);
	sandbox->root = openat(worker.proc, path, O_PATH | O_DIRECTORY | O_CLOEXEC);
	if (sandbox->root < 0) {
		create_failed(sandbox, -errno, "open root");
		return;
	}
	sandbox->state = SANDBOX_LIVE;
	sandbox->ooms_seen = cgroup_ooms(sandbox);
	numbers[0] = (uint64_t)sandbox->pid;
	for (size_t i = 0; i < ARRAY_LEN(kinds); i++)
		numbers[i + 1] = inode_at(sandbox, kinds[i]);
	numbers[ARRAY_LEN(numbers) - 1] = clock_ns(CLOCK_MONOTONIC) - sandbox->began_ns;
	b = answer_begin(TYPE_CREATED, sandbox->create_request);
	build_text(b, TAG_SANDBOX, sandbox->id);
	build_u64s(b, TAG_CREATED_NUMBERS, numbers, ARRAY_LEN(numbers));
	build_fd(b, TAG_ROOT_FD, sandbox->root);
	build_fd(b, TAG_PIDFD, sandbox->pidfd);
	sandbox->create_request = 0;
	answer_send(b);
}

static void handle_report(struct sandbox *sandbox, const struct report *report)
{
	struct exec *exec;
	struct usage usage;

	if (report->kind == REPORT_READY && sandbox->state == SANDBOX_STARTING) {
		created(sandbox);
	} else if (report->kind == REPORT_FAILED && sandbox->state == SANDBOX_STARTING) {
		create_failed(sandbox, -report->status,
			      report->stage < init_step_count ? init_steps[report->stage] : "pid 1");
	} else if (report->kind == REPORT_REAPED) {
		exec = exec_of_pid(sandbox, report->pid);
		if (!exec)
			return;
		usage = (struct usage){
			.user_us = report->user_us,
			.system_us = report->system_us,
			.peak_bytes = report->peak_kib << 10,
			.read_bytes = report->blocks_in << 9,
			.write_bytes = report->blocks_out << 9,
		};
		exec_leader_ended(exec, report->status, &usage);
	}
}

static void read_channel(struct sandbox *sandbox, unsigned most)
{
	while (sandbox->channel >= 0 && most--) {
		struct report report;
		ssize_t got = recv(sandbox->channel, &report, sizeof(report), MSG_DONTWAIT);

		/* Told once, if pid 1 died with something unread; what it sent comes after it. */
		if (got < 0 && (errno == EINTR || errno == ECONNRESET))
			continue;
		if (got < 0 && errno == EAGAIN)
			return;
		if (got == (ssize_t)sizeof(report)) {
			handle_report(sandbox, &report);
			continue;
		}
		sandbox->channel_ended = true;
		return;
	}
}

static void channel_ready(struct source *source, uint32_t events)
{
	struct sandbox *sandbox = container_of(source, struct sandbox, channel_source);

	(void)events;
	if (sandbox->channel < 0 || sandbox->channel_ended)
		return;
	read_channel(sandbox, REPORTS_PER_TURN);
	if (!sandbox->channel_ended || sandbox->channel < 0)
		return;
	/* Only pid 1 holds the other end: it is dead or dying. */
	loop_remove(sandbox->channel);
	if (sandbox->state == SANDBOX_STARTING)
		create_failed(sandbox, -ECHILD, "pid 1");
	else if (sandbox->state == SANDBOX_LIVE)
		await_death(sandbox);
}

/* --- CREATE -------------------------------------------------------------------------- */

struct first_process {
	const struct sandbox *sandbox;
	int error;
	const char *stage;
};

/* What setting up takes, and what decides whether root inside could reach a file. */
#define INIT_CAPS                                                                                  \
	(CAP_BIT(CAP_SYS_ADMIN) | CAP_BIT(CAP_NET_ADMIN) | CAP_BIT(CAP_SYS_RESOURCE) |              \
	 CAP_BIT(CAP_SETUID) | CAP_BIT(CAP_SETGID) | CAP_BIT(CAP_DAC_OVERRIDE))
#define CAP_BIT(name) (1u << (name))

/* Not root by any map yet, it would lose all capabilities by execve: ambient ones stay. */
static int keep_capabilities(void)
{
	struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
	struct __user_cap_data_struct data[2] = {
		{.effective = INIT_CAPS, .permitted = INIT_CAPS, .inheritable = INIT_CAPS}, {0}};

	if (syscall(SYS_capset, &header, data) < 0)
		return -errno;
	for (unsigned long cap = 0; cap < 32; cap++)
		if (INIT_CAPS & 1u << cap && prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, cap, 0, 0) < 0)
			return -errno;
	return 0;
}

/* Runs in our memory while we wait, and shares our descriptors until it has its own. */
NEVER_RETURNS static int first_process(void *context)
{
	struct first_process *first = context;
	char *const argv[] = {(char *)INIT_NAME, NULL};
	char *const env[] = {NULL};

	first->stage = "enter cgroups";
	first->error = cgroup_enter_v1(first->sandbox);
	if (first->error)
		return 1;
	first->stage = "descriptors";
	if (sys_close_range(SLOT_END, ~0u, CLOSE_UNSHARE) < 0 ||
	    dup2(SLOT_CHANNEL, INIT_CHANNEL) < 0 || dup3(SLOT_PROGRAM, 4, O_CLOEXEC) < 0 ||
	    sys_close_range(5, ~0u, 0) < 0 || sys_close_range(0, 2, 0) < 0) {
		first->error = -errno;
		return 1;
	}
	first->stage = "capabilities";
	first->error = keep_capabilities();
	if (first->error)
		return 1;
	first->stage = "execute pid 1";
	syscall(SYS_execveat, 4, "", argv, env, EMPTY_PATH);
	first->error = -errno;
	return 1;
}

static int clone_first(struct sandbox *sandbox, int their_end, const char **stage)
{
	struct first_process first = {.sandbox = sandbox};
	auto_close int cgroup = cgroup_open_init(sandbox);
	struct clone_args args = {
		.flags = CLONE_VM | CLONE_VFORK | CLONE_FILES | CLONE_PIDFD | CLONE_CGROUP |
			 CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC |
			 CLONE_NEWUTS,
		.pidfd = (uint64_t)(uintptr_t)&sandbox->pidfd,
		.stack = (uint64_t)(uintptr_t)clone_stack,
		.stack_size = sizeof(clone_stack),
		.cgroup = (uint64_t)(unsigned)cgroup,
	};
	long pid;

	if (cgroup < 0)
		return cgroup;
	if (slot_put(their_end, SLOT_CHANNEL) < 0 || slot_put(worker.program, SLOT_PROGRAM) < 0)
		return -errno;
	pid = clone_onto_stack(&args, first_process, &first);
	slot_clear(SLOT_CHANNEL);
	slot_clear(SLOT_PROGRAM);
	if (pid < 0)
		return (int)pid;
	sandbox->pid = (pid_t)pid;
	if (first.error)
		*stage = first.stage;
	return first.error;
}

static int map_ids(const struct sandbox *sandbox, int *userns)
{
	char path[48], map[48];
	int error;

	snprintf(map, sizeof(map), "0 %u 65536", sandbox->id_base);
	snprintf(path, sizeof(path), "%d/uid_map", sandbox->pid);
	error = write_file_at(worker.proc, path, map);
	if (error)
		return error;
	snprintf(path, sizeof(path), "%d/gid_map", sandbox->pid);
	error = write_file_at(worker.proc, path, map);
	if (error)
		return error;
	snprintf(path, sizeof(path), "%d/ns/user", sandbox->pid);
	*userns = openat(worker.proc, path, O_RDONLY | O_CLOEXEC);
	return *userns < 0 ? -errno : 0;
}

static int open_channel(struct sandbox *sandbox, const struct create_spec *spec, int *their_end)
{
	struct init_config config = {
		.shm_bytes = spec->shm_bytes,
		.no_new_privs = sandbox->no_new_privs,
	};
	int pair[2];

	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0)
		return -errno;
	sandbox->channel = pair[0];
	*their_end = pair[1];
	snprintf(config.hostname, sizeof(config.hostname), "%s", spec->hostname);
	if (spec->root.inject)
		snprintf(config.inject, sizeof(config.inject), "%s", spec->root.inject);
	if (send(sandbox->channel, &config, sizeof(config), MSG_NOSIGNAL) < 0)
		return -errno;
	sandbox->channel_source.ready = channel_ready;
	return loop_add(sandbox->channel, &sandbox->channel_source, EPOLLIN);
}

/* Tell pid 1 by one byte. If it has failed already, its report says at what. */
static int sent(ssize_t result)
{
	return result >= 0 || errno == EPIPE || errno == ECONNRESET ? 0 : -errno;
}

static int send_mapped(const struct sandbox *sandbox)
{
	return sent(send(sandbox->channel, "", 1, MSG_NOSIGNAL | MSG_DONTWAIT));
}

static int send_mounts(const struct sandbox *sandbox, int root, int dev)
{
	union {
		struct cmsghdr header;
		char room[CMSG_SPACE(2 * sizeof(int))];
	} control = {.header = {.cmsg_level = SOL_SOCKET,
				.cmsg_type = SCM_RIGHTS,
				.cmsg_len = CMSG_LEN(2 * sizeof(int))}};
	char go = 1;
	struct iovec part = {.iov_base = &go, .iov_len = 1};
	struct msghdr message = {
		.msg_iov = &part,
		.msg_iovlen = 1,
		.msg_control = &control,
		.msg_controllen = sizeof(control),
	};

	memcpy(CMSG_DATA(&control.header), (int[]){root, dev}, 2 * sizeof(int));
	return sent(sendmsg(sandbox->channel, &message, MSG_NOSIGNAL | MSG_DONTWAIT));
}

/* Each step fails by -EIO when the tests ask for it. */
static int make(struct sandbox *sandbox, const struct create_spec *spec, const char **stage)
{
	auto_close int their_end = -1, userns = -1, root = -1, dev = -1;
	const char *inject = spec->root.inject;
	int error;

	*stage = "cgroup";
	error = cgroup_create(sandbox);
	error = error ? error : injected(inject, *stage) ? -EIO : 0;
	if (error)
		return error;
	*stage = "channel";
	error = open_channel(sandbox, spec, &their_end);
	error = error ? error : injected(inject, *stage) ? -EIO : 0;
	if (error)
		return error;
	*stage = "clone";
	error = clone_first(sandbox, their_end, stage);
	error = error ? error : injected(inject, *stage) ? -EIO : 0;
	if (error)
		return error;
	/* Pid 1 starts meanwhile; with its ids it makes the mounts that need no root. */
	*stage = "map";
	error = injected(inject, *stage) ? -EIO : map_ids(sandbox, &userns);
	error = error ? error : send_mapped(sandbox);
	if (error)
		return error;
	*stage = "limits";
	error = injected(inject, *stage) ? -EIO : cgroup_limit(sandbox, stage);
	if (error)
		return error;
	error = rootfs_make(&spec->root, sandbox->id_base, userns, &root, &dev, stage);
	if (error)
		return error;
	*stage = "go";
	return injected(inject, *stage) ? -EIO : send_mounts(sandbox, root, dev);
}

void sandbox_create(const struct create_spec *spec)
{
	struct sandbox *sandbox;
	const char *stage = "memory";
	int error;

	if (sandbox_find(spec->id)) {
		answer_error(spec->request, EEXIST, "sandbox", "this id is in use");
		return;
	}
	sandbox = calloc(1, sizeof(*sandbox));
	if (!sandbox || timers_reserve() < 0) {
		free(sandbox);
		answer_error(spec->request, ENOMEM, stage, "");
		return;
	}
	snprintf(sandbox->id, sizeof(sandbox->id), "%s", spec->id);
	sandbox->pidfd = sandbox->channel = sandbox->root = sandbox->cgroup = sandbox->oom = -1;
	sandbox->id_base = spec->id_base;
	sandbox->no_new_privs = spec->flags & CREATE_FLAG_NO_NEW_PRIVS;
	sandbox->limits = spec->limits;
	sandbox->create_request = spec->request;
	sandbox->began_ns = clock_ns(CLOCK_MONOTONIC);
	sandbox->timer.fire = timer_fired;
	sandbox->next = *chain_of(sandbox->id);
	*chain_of(sandbox->id) = sandbox;
	sandbox->listed = true;
	worker.sandboxes++;
	error = make(sandbox, spec, &stage);
	if (error)
		create_failed(sandbox, error, stage);
	else
		rootfs_release(false);
}
