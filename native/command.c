/*
 * The last process of a launch, from its birth to execve: see launch.c. It runs in the worker's
 * memory, beside the worker.
 */
#define _GNU_SOURCE
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
/* By what number the command has its status pipe. */
#define STATUS_FD 3

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
	int ends[2];

	if (fd >= 0 && raw(fstat, fd, &st) == 0 && S_ISCHR(st.st_mode) &&
	    st.st_rdev == makedev(1, 3)) {
		TRY((int)raw(fcntl, fd, F_SETFL, 0));
		return fd;
	}
	if (fd >= 0)
		raw(close, fd);
	TRY((int)raw(pipe2, ends, O_CLOEXEC));
	raw(close, ends[1]);
	return ends[0];
}

static int put(int fd, int target)
{
	return (int)raw(dup3, fd, target, 0);
}

int open_tasks(const struct launch *launch, enum controller controller)
{
	int base = SLOT_V1 + (int)controller;

	return (int)raw(openat, base, launch->tasks, O_WRONLY | O_CLOEXEC | O_NOFOLLOW);
}

static int place_stdin(const struct launch *launch)
{
	int null, error;

	if (launch->pty || launch->spec.in >= 0)
		return put(launch->pty ? SLOT_OUT : SLOT_IN, 0);
	TRY(null = open_null());
	if (!null)
		return 0;
	error = put(null, 0);
	raw(close, null);
	return error;
}

/*
 * Everything in its final place. What else the command needs on its way lies above: the sandbox's pidfd,
 * and the files of memory and processor, since all lower numbers are taken.
 */
static int arrange_descriptors(const struct launch *launch, int tasks[PIDS])
{
	int last = 2;

	TRY(place_stdin(launch));
	TRY(put(SLOT_OUT, 1));
	TRY(put(SLOT_ERR, 2));
	for (int i = 0; i < PIDS; i++)
		if (launch->limited[i])
			TRY(tasks[i] = open_tasks(launch, (enum controller)i));
	if (launch->spec.status >= 0)
		TRY(last = put(SLOT_STATUS, STATUS_FD));
	return (int)raw(close_range, last + 1, SLOT_PIDFD - 1, 0);
}

/* From here on the sandbox's root has power over us. */
static int join_user_namespace(void)
{
	TRY((int)raw(setns, SLOT_PIDFD, LAST_NAMESPACES));
	/* A change of identity may have undone this. */
	TRY((int)raw(prctl, PR_SET_DUMPABLE, 0, 0, 0, 0));
	return (int)raw(close, SLOT_PIDFD);
}

/*
 * What is throttled from here on is only this launch. The files were opened by the host's root,
 * which is what the kernel asks for.
 */
static int enter_cgroups(const struct launch *launch, const int tasks[PIDS])
{
	for (int i = 0; i < PIDS; i++)
		if (launch->limited[i])
			TRY((int)raw(write, tasks[i], "0", 1));
	return 0;
}

static int drop_capabilities(bool root, bool out_of_reach)
{
	struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
	struct __user_cap_data_struct data[2] = {{0}, {0}};

	if (root)
		data[0].effective = data[0].permitted = USUAL_CAPS;
	if (out_of_reach) {
		data[1].effective = data[1].permitted = 1u << (REACH_CAP - 32);
		/* Root's programs get it from the bounding set, others only so. */
		data[1].inheritable = root ? 0 : data[1].permitted;
	}
	TRY((int)raw(capset, &header, data));
	if (!out_of_reach || root)
		return 0;
	return (int)raw(prctl, PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, REACH_CAP, 0, 0);
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

static int take_identity(const struct launch *launch)
{
	const struct exec_spec *spec = &launch->spec;
	bool apart = spec->flags & EXEC_FLAG_OUT_OF_REACH;

	TRY((int)raw(setgroups, spec->group_count, spec->groups));
	TRY((int)raw(setresgid, spec->gid, spec->gid, spec->gid));
	TRY(limit_bounding_set(apart));
	if (launch->no_new_privs)
		TRY((int)raw(prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
	TRY(seccomp_install());
	if (apart)
		TRY((int)raw(prctl, PR_SET_KEEPCAPS, 1, 0, 0, 0));
	TRY((int)raw(setresuid, spec->uid, spec->uid, spec->uid));
	return drop_capabilities(spec->uid == 0, apart);
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
	size_t len = strlen(name);
	char file[4096];
	int error = -ENOENT;

	if (strchr(name, '/'))
		return try_execute(launch, name);
	for (const char *at = launch->path, *end; len && at; at = *end ? end + 1 : NULL) {
		size_t dir;
		int one;

		end = strchrnul(at, ':');
		dir = (size_t)(end - at);
		if (dir + len + 2 > sizeof(file))
			continue;
		memcpy(file, dir ? at : ".", dir ? dir : 1);
		dir = dir ? dir : 1;
		file[dir] = '/';
		memcpy(file + dir + 1, name, len + 1);
		one = try_execute(launch, file);
		if (one != -ENOENT && one != -ENOTDIR && one != -EACCES)
			return one;
		/* The search goes on; EACCES is what is told if nothing better is found. */
		if (one == -EACCES || strcmp(launch->stage, "interpreter") == 0)
			error = one;
	}
	return error;
}

/* Up to the execution, which needs a frame that the sanitizer does not watch. */
static int set_up(struct launch *launch)
{
	const struct exec_spec *spec = &launch->spec;
	struct rlimit no_core = {0, 0};
	int tasks[PIDS] = {-1, -1};
	uint32_t open = GATE_OPEN;

	launch->stage = "descriptors";
	TRY(arrange_descriptors(launch, tasks));
	raw(umask, spec->mask);
	launch->stage = "limits";
	TRY((int)raw(prlimit64, 0, RLIMIT_CORE, &no_core, NULL));
	launch->stage = "join";
	TRY(join_user_namespace());
	launch->stage = "user";
	TRY(take_identity(launch));
	launch->stage = "cwd";
	TRY((int)raw(chdir, spec->cwd));
	launch->stage = "enter cgroups";
	TRY(enter_cgroups(launch, tasks));
	/* The scheduler groups processes by session until they have a cgroup: 45 us if this is first. */
	launch->stage = "session";
	TRY((int)raw(setsid));
	launch->stage = "terminal";
	if (launch->pty)
		TRY((int)raw(ioctl, 0, TIOCSCTTY, 0));
	launch->stage = "launch";
	return __atomic_compare_exchange_n(&launch->gate, &open, GATE_PASSED, false, __ATOMIC_SEQ_CST,
					   __ATOMIC_SEQ_CST)
		       ? 0
		       : -ETIMEDOUT;
}

NEVER_RETURNS int command_run(void *context)
{
	struct launch *launch = context;
	uint64_t no_signals = 0;

	launch->error = set_up(launch);
	if (launch->error)
		return 1;
	raw(rt_sigprocmask, SIG_SETMASK, &no_signals, NULL, sizeof(no_signals));
	launch->stage = "program";
	launch->error = execute(launch);
	return 1;
}
