/*
 * The last process of a launch, from its birth to execve: see launch.c. It runs in the worker's
 * memory, beside the worker.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include "kernel.h"
#include "launch.h"
#include "seccomp.h"

#define CAP(name) (1u << (name))
/*
 * Above what a command may ask for, and below 64: a table that grows while it is shared (the father
 * waits in vfork) costs a grace period, 10 ms and more.
 */
#define HIGH_FD 48
#define HELD_FDS 3u
_Static_assert(EXTRA_TARGET_MAX < HIGH_FD && HIGH_FD + EXTRA_MAX + HELD_FDS < 64,
	       "descriptors collide");

/* What a container's root usually has. */
#define USUAL_CAPS                                                                                 \
	(CAP(CAP_CHOWN) | CAP(CAP_DAC_OVERRIDE) | CAP(CAP_FOWNER) | CAP(CAP_FSETID) |               \
	 CAP(CAP_KILL) | CAP(CAP_SETGID) | CAP(CAP_SETUID) | CAP(CAP_SETPCAP) |                     \
	 CAP(CAP_NET_BIND_SERVICE) | CAP(CAP_NET_RAW) | CAP(CAP_SYS_CHROOT) | CAP(CAP_MKNOD) |      \
	 CAP(CAP_AUDIT_WRITE) | CAP(CAP_SETFCAP))

/*
 * Of no use in a user namespace, and what puts a command out of reach of the others in it: who
 * lacks one of its capabilities, and CAP_SYS_PTRACE, can neither trace it nor reach its memory,
 * root and files through /proc.
 */
#define REACH_CAP CAP_WAKE_ALARM

/* Inside a cgroup namespace nobody may put the command where it belongs. */
#define LAST_NAMESPACES (CLONE_NEWUSER | CLONE_NEWCGROUP)

/* The sandbox's own /dev/null, or the end of an empty pipe if it has put something else there. */
static int open_null(void)
{
	int fd = (int)raw(openat, AT_FDCWD, "/dev/null",
			  O_RDWR | O_NONBLOCK | O_NOFOLLOW | O_NOCTTY | O_CLOEXEC);
	struct stat st;
	int ends[2], error;

	if (fd >= 0 && raw(fstat, fd, &st) == 0 && S_ISCHR(st.st_mode) &&
	    st.st_rdev == makedev(1, 3)) {
		error = (int)raw(fcntl, fd, F_SETFL, 0);
		return error < 0 ? error : fd;
	}
	if (fd >= 0)
		raw(close, fd);
	error = (int)raw(pipe2, ends, O_CLOEXEC);
	if (error < 0)
		return error;
	raw(close, ends[1]);
	return ends[0];
}

static int put(int fd, int target)
{
	return (int)raw(dup3, fd, target, 0);
}

static int put_high(int fd)
{
	return (int)raw(fcntl, fd, F_DUPFD_CLOEXEC, HIGH_FD);
}

/* Descriptors that the command needs when its own are in place. */
struct held {
	int pidfd, memory, cpu;
};

static int open_tasks(const struct launch *launch, enum slot base)
{
	int fd = (int)raw(openat, base, launch->tasks, O_WRONLY | O_CLOEXEC | O_NOFOLLOW);
	int high = fd < 0 ? fd : put_high(fd);

	if (fd >= 0)
		raw(close, fd);
	return high;
}

static int hold(const struct launch *launch, struct held *held)
{
	held->pidfd = put_high(SLOT_PIDFD);
	held->memory = launch->limited_memory ? open_tasks(launch, SLOT_MEMORY) : HIGH_FD;
	held->cpu = launch->limited_cpu ? open_tasks(launch, SLOT_CPU) : HIGH_FD;
	return held->pidfd < 0 ? held->pidfd : held->memory < 0 ? held->memory : held->cpu;
}

static int place_stdin(const struct launch *launch)
{
	int null;

	if (launch->pty || launch->spec.in >= 0)
		return put(launch->pty ? SLOT_OUT : SLOT_IN, 0);
	null = open_null();
	if (null > 0) {
		int error = put(null, 0);

		raw(close, null);
		return error;
	}
	return null;
}

/* Everything in its final place; whatever else is open gets closed, but for what is held. */
static int arrange_descriptors(const struct launch *launch, struct held *held)
{
	const struct exec_spec *spec = &launch->spec;
	int high[EXTRA_MAX];
	int last = 2, error;

	for (size_t i = 0; i < spec->extra_count; i++) {
		high[i] = put_high(SLOT_EXTRA + (int)i);
		if (high[i] < 0)
			return high[i];
	}
	error = place_stdin(launch);
	if (error >= 0)
		error = put(SLOT_OUT, 1);
	if (error >= 0)
		error = put(launch->pty ? SLOT_OUT : SLOT_ERR, 2);
	if (error >= 0)
		error = hold(launch, held);
	if (error < 0)
		return error;
	/* In the order of their numbers, so that the gaps between them can be closed. */
	for (int target = 3; target < HIGH_FD; target++)
		for (size_t i = 0; i < spec->extra_count; i++) {
			if (spec->extra[i].target != target)
				continue;
			if (target > last + 1)
				raw(close_range, last + 1, target - 1, 0);
			error = put(high[i], target);
			if (error < 0)
				return error;
			last = target;
		}
	for (size_t i = 0; i < spec->extra_count; i++)
		raw(close, high[i]);
	return (int)raw(close_range, last + 1, HIGH_FD - 1, 0);
}

/* From here on the sandbox's root has power over us. */
static int join_user_namespace(int pidfd)
{
	int error = (int)raw(setns, pidfd, LAST_NAMESPACES);

	/* A change of identity may have undone this. */
	if (!error)
		error = (int)raw(prctl, PR_SET_DUMPABLE, 0, 0, 0, 0);
	return error ? error : (int)raw(close, pidfd);
}

/*
 * What is throttled from here on is only this launch. The files were opened by the host's root,
 * which is what the kernel asks for.
 */
static int enter_cgroups(const struct launch *launch, const struct held *held)
{
	long done = launch->limited_memory ? raw(write, held->memory, "0", 1) : 0;

	if (done >= 0 && launch->limited_cpu)
		done = raw(write, held->cpu, "0", 1);
	return done < 0 ? (int)done : 0;
}

static int drop_capabilities(bool root, bool out_of_reach)
{
	struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
	struct __user_cap_data_struct data[2] = {{0}, {0}};
	int error;

	if (root)
		data[0].effective = data[0].permitted = USUAL_CAPS;
	if (out_of_reach) {
		data[1].effective = data[1].permitted = 1u << (REACH_CAP - 32);
		/* Root's programs get it from the bounding set, others only so. */
		data[1].inheritable = root ? 0 : data[1].permitted;
	}
	error = (int)raw(capset, &header, data);
	if (!error && out_of_reach && !root)
		error = (int)raw(prctl, PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, REACH_CAP, 0, 0);
	return error;
}

static int limit_bounding_set(bool out_of_reach)
{
	for (unsigned long cap = 0; cap < 64; cap++) {
		int error;

		if (cap < 32 && USUAL_CAPS & 1u << cap)
			continue;
		if (cap == REACH_CAP && out_of_reach)
			continue;
		error = (int)raw(prctl, PR_CAPBSET_DROP, cap, 0, 0, 0);
		/* The kernel knows no capability of that number or above. */
		if (error < 0)
			return error == -EINVAL ? 0 : error;
	}
	return 0;
}

static int take_identity(const struct exec_spec *spec)
{
	bool apart = spec->flags & EXEC_FLAG_OUT_OF_REACH;
	int error = (int)raw(setgroups, spec->group_count, spec->groups);

	error = error ? error : (int)raw(setresgid, spec->gid, spec->gid, spec->gid);
	error = error ? error : limit_bounding_set(apart);
	if (!error && spec->flags & EXEC_FLAG_NO_NEW_PRIVS)
		error = (int)raw(prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
	error = error ? error : seccomp_install();
	if (!error && apart)
		error = (int)raw(prctl, PR_SET_KEEPCAPS, 1, 0, 0, 0);
	error = error ? error : (int)raw(setresuid, spec->uid, spec->uid, spec->uid);
	return error ? error : drop_capabilities(spec->uid == 0, apart);
}

/* Try one file. Only returns when it cannot be executed. */
NEVER_RETURNS static int try_execute(struct launch *launch, const char *file)
{
	int error = (int)raw(execve, file, launch->spec.argv, launch->spec.env);
	struct stat st;

	/* The file is there, its interpreter or loader is not. */
	if (error == -ENOENT && raw(newfstatat, AT_FDCWD, file, &st, AT_SYMLINK_NOFOLLOW) == 0)
		launch->stage = "interpreter";
	return error;
}

NEVER_RETURNS static int execute(struct launch *launch)
{
	const char *name = launch->spec.argv[0];
	const char *at = launch->path;
	size_t len = strlen(name);
	char file[4096];
	int error = -ENOENT;

	launch->stage = "program";
	if (strchr(name, '/')) {
		error = try_execute(launch, name);
		return launch_failed(launch, launch->stage, error);
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
				return launch_failed(launch, launch->stage, one);
			/* The search goes on; EACCES is what is told if nothing better is found. */
			if (one == -EACCES || strcmp(launch->stage, "interpreter") == 0)
				error = one;
		}
		at = *end ? end + 1 : NULL;
	}
	return launch_failed(launch, launch->stage, error);
}

NEVER_RETURNS int command_run(void *context)
{
	struct launch *launch = context;
	const struct exec_spec *spec = &launch->spec;
	struct rlimit no_core = {0, 0};
	struct held held = {-1, -1, -1};
	uint64_t no_signals = 0;
	uint32_t open = GATE_OPEN;
	int error;

	error = (int)raw(setsid);
	if (error < 0)
		return launch_failed(launch, "session", error);
	error = arrange_descriptors(launch, &held);
	if (error)
		return launch_failed(launch, "descriptors", error);
	error = launch->pty ? (int)raw(ioctl, 0, TIOCSCTTY, 0) : 0;
	if (error)
		return launch_failed(launch, "terminal", error);
	raw(umask, spec->mask);
	error = (int)raw(prlimit64, 0, RLIMIT_CORE, &no_core, NULL);
	if (error)
		return launch_failed(launch, "limits", error);
	error = join_user_namespace(held.pidfd);
	if (error)
		return launch_failed(launch, "join", error);
	error = take_identity(spec);
	if (error)
		return launch_failed(launch, "user", error);
	error = (int)raw(chdir, spec->cwd);
	if (error)
		return launch_failed(launch, "cwd", error);
	error = enter_cgroups(launch, &held);
	if (error)
		return launch_failed(launch, "enter cgroups", error);
	if (!__atomic_compare_exchange_n(&launch->gate, &open, GATE_PASSED, false, __ATOMIC_SEQ_CST,
					 __ATOMIC_SEQ_CST))
		return launch_failed(launch, "launch", -ETIMEDOUT);
	raw(rt_sigprocmask, SIG_SETMASK, &no_signals, NULL, sizeof(no_signals));
	return execute(launch);
}
