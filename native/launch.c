/*
 * Start a command in a sandbox, through three processes that share our memory and run while
 * we wait:
 *
 *   joiner   closes all that is ours, then joins the namespaces of pid 1 but for the user's
 *   inner    the first process born inside: its children's orphans go to the sandbox's pid 1
 *   command  sets itself up, joins the user namespace, and executes
 *
 * As long as they are not of the sandbox's user namespace, nobody in it can signal them: neither
 * a SIGKILL to everything, which would make us go on while the command still uses our memory,
 * nor a SIGSTOP, which would make us wait. For the rest of the way: watchdog.h.
 *
 * When the joiner returns, the command is pid 1's child. All of them are in vfork relative to
 * their parents, so that the OOM killer never takes one, and us with it, for its memory.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <time.h>

#include "kernel.h"
#include "seccomp.h"
#include "spawner.h"
#include "watchdog.h"

#define CAP(name) (1u << (name))
/*
 * Above what a command may ask for, and below 64: a table that grows while it is shared (the father
 * waits in vfork) costs a grace period, 10 ms and more.
 */
#define UNBORN_TRIES 20u
#define HIGH_FD 48
_Static_assert(EXTRA_TARGET_MAX < HIGH_FD && HIGH_FD + EXTRA_MAX + 1 < 64, "descriptors collide");

/* What a container's root usually has. */
#define USUAL_CAPS                                                                                 \
	(CAP(CAP_CHOWN) | CAP(CAP_DAC_OVERRIDE) | CAP(CAP_FOWNER) | CAP(CAP_FSETID) |               \
	 CAP(CAP_KILL) | CAP(CAP_SETGID) | CAP(CAP_SETUID) | CAP(CAP_SETPCAP) |                     \
	 CAP(CAP_NET_BIND_SERVICE) | CAP(CAP_NET_RAW) | CAP(CAP_SYS_CHROOT) | CAP(CAP_MKNOD) |      \
	 CAP(CAP_AUDIT_WRITE) | CAP(CAP_SETFCAP))

#define OTHER_NAMESPACES                                                                             \
	(CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS |  \
	 CLONE_NEWCGROUP)

struct launch {
	const struct exec_spec *spec;
	const char *path; /* the exec's own PATH */
	int error;
	const char *stage;
	pid_t pid; /* written by the kernel, before the command runs */
	uint32_t running; /* cleared by the kernel, when the command has left our memory */
	bool pty;
};

static uint8_t joiner_stack[64 << 10] __attribute__((aligned(16)));
static uint8_t inner_stack[64 << 10] __attribute__((aligned(16)));
static uint8_t command_stack[64 << 10] __attribute__((aligned(16)));

static int failed(struct launch *launch, const char *stage, int error)
{
	launch->stage = stage;
	launch->error = error;
	return 1;
}

/* --- command ------------------------------------------------------------------------- */

/* The sandbox's own /dev/null, or the end of an empty pipe if it has put something else there. */
static int open_null(void)
{
	auto_close int fd = open("/dev/null", O_RDWR | O_NONBLOCK | O_NOFOLLOW | O_NOCTTY | O_CLOEXEC);
	struct stat st;
	int ends[2], result;

	if (fd >= 0 && fstat(fd, &st) == 0 && S_ISCHR(st.st_mode) && st.st_rdev == makedev(1, 3)) {
		if (fcntl(fd, F_SETFL, 0) < 0)
			return -errno;
		result = fd;
		fd = -1;
		return result;
	}
	if (pipe2(ends, O_CLOEXEC) < 0)
		return -errno;
	close(ends[1]);
	return ends[0];
}

/* Everything in its final place; whatever else is open gets closed, but for `pidfd`. */
static int arrange_descriptors(const struct launch *launch, int *pidfd)
{
	const struct exec_spec *spec = launch->spec;
	int high[EXTRA_MAX];
	int last = 2;

	for (size_t i = 0; i < spec->extra_count; i++) {
		high[i] = fcntl(SLOT_EXTRA + (int)i, F_DUPFD_CLOEXEC, HIGH_FD);
		if (high[i] < 0)
			return -errno;
	}
	if (!launch->pty && spec->in < 0) {
		int null = open_null();

		if (null < 0 || (null != 0 && dup2(null, 0) < 0))
			return -errno;
		if (null > 2)
			close(null);
	} else if (dup2(launch->pty ? SLOT_OUT : SLOT_IN, 0) < 0) {
		return -errno;
	}
	if (dup2(SLOT_OUT, 1) < 0 || dup2(launch->pty ? SLOT_OUT : SLOT_ERR, 2) < 0)
		return -errno;
	/* The last of ours: it leads to the sandbox's own pid 1. */
	*pidfd = fcntl(SLOT_PIDFD, F_DUPFD_CLOEXEC, HIGH_FD);
	if (*pidfd < 0)
		return -errno;
	/* In the order of their numbers, so that the gaps between them can be closed. */
	for (int target = 3; target < HIGH_FD; target++)
		for (size_t i = 0; i < spec->extra_count; i++) {
			if (spec->extra[i].target != target)
				continue;
			if (target > last + 1)
				sys_close_range((unsigned)last + 1, (unsigned)target - 1, 0);
			if (dup2(high[i], target) < 0)
				return -errno;
			last = target;
		}
	for (size_t i = 0; i < spec->extra_count; i++)
		close(high[i]);
	return sys_close_range((unsigned)last + 1, HIGH_FD - 1, 0) < 0 ? -errno : 0;
}

/* From here on the sandbox's root has power over us. */
static int join_user_namespace(int pidfd)
{
	if (setns(pidfd, CLONE_NEWUSER) < 0)
		return -errno;
	/* A change of identity may have undone this. */
	if (prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) < 0)
		return -errno;
	return close(pidfd) < 0 ? -errno : 0;
}

static int drop_capabilities(bool root)
{
	struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
	struct __user_cap_data_struct data[2] = {{0}, {0}};

	if (root)
		data[0].effective = data[0].permitted = USUAL_CAPS;
	return syscall(SYS_capset, &header, data) < 0 ? -errno : 0;
}

static int limit_bounding_set(void)
{
	for (unsigned long cap = 0; cap < 64; cap++) {
		if (cap < 32 && USUAL_CAPS & 1u << cap)
			continue;
		/* EINVAL: the kernel knows no capability of that number or above. */
		if (prctl(PR_CAPBSET_DROP, cap, 0, 0, 0) < 0)
			return errno == EINVAL ? 0 : -errno;
	}
	return 0;
}

static int take_identity(const struct exec_spec *spec)
{
	int error;
	bool no_new_privs = spec->sandbox->no_new_privs || spec->flags & EXEC_FLAG_NO_NEW_PRIVS;

	/* Not the libc's: those would ask every thread, and tell our parent's memory. */
	if (syscall(SYS_setgroups, spec->group_count, spec->groups) < 0 ||
	    syscall(SYS_setresgid, spec->gid, spec->gid, spec->gid) < 0)
		return -errno;
	error = limit_bounding_set();
	if (error)
		return error;
	if (no_new_privs && prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
		return -errno;
	error = seccomp_install();
	if (error)
		return error;
	if (syscall(SYS_setresuid, spec->uid, spec->uid, spec->uid) < 0)
		return -errno;
	return drop_capabilities(spec->uid == 0);
}

/* Try one file. Only returns when it cannot be executed. */
NEVER_RETURNS static int try_execute(struct launch *launch, const char *file)
{
	int error;

	execve(file, launch->spec->argv, launch->spec->env);
	error = -errno;
	/* The file is there, its interpreter or loader is not. */
	if (error == -ENOENT && faccessat(AT_FDCWD, file, F_OK, AT_SYMLINK_NOFOLLOW) == 0)
		launch->stage = "interpreter";
	return error;
}

NEVER_RETURNS static int execute(struct launch *launch)
{
	const char *name = launch->spec->argv[0];
	const char *at = launch->path;
	size_t len = strlen(name);
	char file[4096];
	int error = -ENOENT;

	launch->stage = "program";
	if (strchr(name, '/')) {
		error = try_execute(launch, name);
		return failed(launch, launch->stage, error);
	}
	while (len && at) {
		const char *end = strchrnul(at, ':');
		size_t dir = (size_t)(end - at);

		if (dir + len + 2 <= sizeof(file)) {
			int one;

			memcpy(file, dir ? at : ".", dir ? dir : 1);
			dir = dir ? dir : 1;
			file[dir] = '/';
			memcpy(file + dir + 1, name, len + 1);
			one = try_execute(launch, file);
			if (one != -ENOENT && one != -ENOTDIR && one != -EACCES)
				return failed(launch, launch->stage, one);
			/* The search goes on; EACCES is what is told if nothing better is found. */
			if (one == -EACCES || strcmp(launch->stage, "interpreter") == 0)
				error = one;
		}
		at = *end ? end + 1 : NULL;
	}
	return failed(launch, launch->stage, error);
}

NEVER_RETURNS static int command(void *context)
{
	struct launch *launch = context;
	const struct exec_spec *spec = launch->spec;
	struct rlimit no_core = {0, 0};
	sigset_t none;
	int error, pidfd = -1;

	if (setsid() < 0)
		return failed(launch, "session", -errno);
	error = arrange_descriptors(launch, &pidfd);
	if (error)
		return failed(launch, "descriptors", error);
	if (launch->pty && ioctl(0, TIOCSCTTY, 0) < 0)
		return failed(launch, "terminal", -errno);
	umask(spec->mask);
	if (setrlimit(RLIMIT_CORE, &no_core) < 0)
		return failed(launch, "limits", -errno);
	error = join_user_namespace(pidfd);
	if (error)
		return failed(launch, "join", error);
	error = take_identity(spec);
	if (error)
		return failed(launch, "user", error);
	if (chdir(spec->cwd) < 0)
		return failed(launch, "cwd", -errno);
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	return execute(launch);
}

/* --- inner and joiner ---------------------------------------------------------------- */

#define STACK(area)                                                                                \
	.stack = (uint64_t)(uintptr_t)(area), .stack_size = sizeof(area)

static int inner(void *context)
{
	struct launch *launch = context;
	struct clone_args args = {
		.flags = CLONE_VM | CLONE_VFORK | CLONE_FILES | CLONE_PARENT_SETTID |
			 CLONE_CHILD_CLEARTID,
		.exit_signal = SIGCHLD,
		.parent_tid = (uint64_t)(uintptr_t)&launch->pid,
		.child_tid = (uint64_t)(uintptr_t)&launch->running,
		STACK(command_stack),
	};
	long pid;

	launch->running = 1;
	pid = clone_onto_stack(&args, command, launch);
	if (pid < 0) {
		launch->running = 0;
		return failed(launch, "fork", (int)pid);
	}
	/* Pid 1 shall not hear of what never was a command. */
	if (launch->error)
		syscall(SYS_wait4, pid, NULL, __WALL, NULL);
	return 0;
}

static int joiner(void *context)
{
	struct launch *launch = context;
	struct clone_args args = {
		.flags = CLONE_VM | CLONE_VFORK | CLONE_FILES,
		STACK(inner_stack),
	};
	long pid;
	int error = cgroup_enter_v1(launch->spec->sandbox);

	if (error)
		return failed(launch, "enter cgroups", error);
	if (sys_close_range(SLOT_END, ~0u, CLOSE_UNSHARE) < 0)
		return failed(launch, "descriptors", -errno);
	close(2);
	if (setns(SLOT_PIDFD, OTHER_NAMESPACES) < 0)
		return failed(launch, "join", -errno);
	pid = clone_onto_stack(&args, inner, launch);
	if (pid < 0)
		return failed(launch, "fork", (int)pid);
	syscall(SYS_wait4, pid, NULL, __WALL, NULL);
	return 0;
}

static const char *path_of(char **env)
{
	for (; *env; env++)
		if (strncmp(*env, "PATH=", 5) == 0)
			return *env + 5;
	return "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
}

/*
 * The command still uses our memory if what waited for it was killed: only by the machine's end.
 * If what should have made it was killed just before, there is none, and nobody clears the flag.
 */
static void await_departure(struct launch *launch)
{
	const struct timespec patience = {.tv_nsec = 100000000l};
	uint32_t running;
	unsigned unborn = 0;

	while ((running = __atomic_load_n(&launch->running, __ATOMIC_ACQUIRE))) {
		if (!__atomic_load_n(&launch->pid, __ATOMIC_ACQUIRE) && unborn++ == UNBORN_TRIES)
			return;
		syscall(SYS_futex, &launch->running, FUTEX_WAIT, running, &patience, NULL, 0);
	}
}

pid_t launch(const struct exec_spec *spec, int cgroup, const char **stage)
{
	struct launch launch = {
		.spec = spec,
		.path = path_of(spec->env),
		.pty = spec->flags & EXEC_FLAG_PTY,
	};
	struct clone_args args = {
		.flags = CLONE_VM | CLONE_VFORK | CLONE_FILES | CLONE_CGROUP,
		.cgroup = (uint64_t)(unsigned)cgroup,
		STACK(joiner_stack),
	};
	char path[ID_MAX + 32];
	long pid;

	snprintf(path, sizeof(path), "%s/x%llu", spec->sandbox->id, (unsigned long long)spec->id);
	watchdog_begin(path, spec->sandbox->suspect);
	pid = clone_onto_stack(&args, joiner, &launch);
	if (pid >= 0) {
		while (syscall(SYS_wait4, pid, NULL, __WALL, NULL) < 0 && errno == EINTR)
			;
		await_departure(&launch);
	}
	if (watchdog_end()) {
		spec->sandbox->suspect = true;
		*stage = "launch";
		return -ETIMEDOUT;
	}
	*stage = pid < 0 ? "fork" : launch.stage;
	if (pid < 0 || launch.error)
		return pid < 0 ? (pid_t)pid : launch.error;
	*stage = "fork";
	return launch.pid > 0 ? launch.pid : -ECHILD;
}

/* --- the baseline -------------------------------------------------------------------- */

NEVER_RETURNS static int measured(void *context)
{
	char *const argv[] = {context, NULL};
	char *const env[] = {NULL};
	sigset_t none;

	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	execve(context, argv, env);
	return 127;
}

int launch_measure(const char *path, uint64_t *durations, size_t count)
{
	struct clone_args args = {
		.flags = CLONE_VM | CLONE_VFORK,
		.exit_signal = SIGCHLD,
		.stack = (uint64_t)(uintptr_t)joiner_stack,
		.stack_size = sizeof(joiner_stack),
	};

	for (size_t i = 0; i < count; i++) {
		uint64_t began = clock_ns(CLOCK_MONOTONIC);
		long pid = clone_onto_stack(&args, measured, (void *)(uintptr_t)path);
		int status;

		if (pid < 0)
			return (int)pid;
		while (waitpid((pid_t)pid, &status, 0) < 0)
			if (errno != EINTR)
				return -errno;
		durations[i] = clock_ns(CLOCK_MONOTONIC) - began;
		if (status)
			return WIFEXITED(status) && WEXITSTATUS(status) == 127 ? -ENOENT : -ECHILD;
	}
	return 0;
}
