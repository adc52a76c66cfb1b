/*
 * Executed from the sealed memfd as the first process of every namespace of a sandbox, with
 * nothing but one end of its channel. Four messages come by it: what is asked (init_order); that its
 * ids are mapped, with /dev as a detached mount; how to set up (init_config), which a blank waits
 * for; and the root, as a detached mount too. It answers READY or FAILED.
 */
#define _GNU_SOURCE
#include "init.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <net/if.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "kernel.h"
#include "util.h"

enum step {
	STEP_NAMESPACE,
	STEP_LOOPBACK,
	STEP_IDENTITY,
	STEP_PROC,
	STEP_SYS,
	STEP_DEV,
	STEP_DEVPTS,
	STEP_SYSCTL,
	STEP_MASK,
	STEP_HOSTNAME,
	STEP_SHM,
	STEP_ROOT,
	STEP_PLACE,
	STEP_PIVOT,
	STEP_PRIVILEGES,
	STEP_COUNT,
};

const char *const init_steps[] = {
	[STEP_NAMESPACE] = "namespace",
	[STEP_LOOPBACK] = "loopback",
	[STEP_IDENTITY] = "identity",
	[STEP_PROC] = "proc",
	[STEP_SYS] = "sys",
	[STEP_DEV] = "dev",
	[STEP_DEVPTS] = "devpts",
	[STEP_SYSCTL] = "sysctl",
	[STEP_MASK] = "mask",
	[STEP_HOSTNAME] = "hostname",
	[STEP_SHM] = "shm",
	[STEP_ROOT] = "root",
	[STEP_PLACE] = "place",
	[STEP_PIVOT] = "pivot",
	[STEP_PRIVILEGES] = "privileges",
};
const size_t init_step_count = STEP_COUNT;

static struct init_order order;
static struct init_config config;

/*
 * What lies in the root of every sandbox, put together here before there is one. The image can have
 * links where these go: they are moved there by descriptors.
 */
#define NEW_PROC "/new/proc"
#define NEW_SYS "/new/sys"
#define NEW_DEV "/new/dev"

static void report(const struct report *message)
{
	while (send(INIT_CHANNEL, message, sizeof(*message), MSG_NOSIGNAL) < 0 && errno == EINTR)
		;
}

static int receive(void *data, size_t len, int *fd)
{
	return message_receive(INIT_CHANNEL, data, len, fd);
}

static int loopback_up(void)
{
	struct ifreq request = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
	auto_close int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);

	if (fd < 0 || ioctl(fd, SIOCSIFFLAGS, &request) < 0)
		return -errno;
	return 0;
}

static int become_root(void)
{
	/* setgroups first: an unmapped supplementary group must not stay. */
	if (setgroups(0, NULL) < 0 || setresgid(0, 0, 0) < 0 || setresuid(0, 0, 0) < 0)
		return -errno;
	if (setsid() < 0 && errno != EPERM)
		return -errno;
	return 0;
}

static int attach(int mount, const char *path)
{
	return sys_move_mount(mount, "", AT_FDCWD, path, MOVE_EMPTY_PATH) < 0 ? -errno : 0;
}

static int make_mount(const char *type, const char *path, unsigned attributes,
		      const char *const options[][2])
{
	auto_close int fs = sys_fsopen(type);
	auto_close int mount = -1;

	if (fs < 0)
		return -errno;
	for (size_t i = 0; options && options[i][0]; i++)
		if (sys_fsconfig(fs, FSCONFIG_SET_STRING, options[i][0], options[i][1], 0) < 0)
			return -errno;
	if (sys_fsconfig(fs, FSCONFIG_CMD_CREATE, NULL, NULL, 0) < 0)
		return -errno;
	mount = sys_fsmount(fs, attributes);
	return mount < 0 ? -errno : attach(mount, path);
}

static int make_devpts(void)
{
	/* The machine has a few thousand for all sandboxes together. */
	static const char *const options[][2] = {
		{"gid", "5"}, {"mode", "620"}, {"ptmxmode", "666"}, {"max", "128"}, {NULL, NULL}};

	return make_mount("devpts", NEW_DEV "/pts", ATTR_NOSUID | ATTR_NOEXEC, options);
}

static int make_shm(void)
{
	char size[24];
	const char *const options[][2] = {{"mode", "1777"}, {"size", size}, {NULL, NULL}};

	snprintf(size, sizeof(size), "%llu", (unsigned long long)config.shm_bytes);
	return make_mount("tmpfs", NEW_DEV "/shm", ATTR_NOSUID | ATTR_NODEV | ATTR_NOEXEC, options);
}

static int mount_root(int root)
{
	int error = attach(root, "/mnt");

	if (error)
		return error;
	/* The descriptor leads into the mount just moved; /mnt by name does too. */
	return chdir("/mnt") < 0 ? -errno : 0;
}

/* Move each mount, and what lies on it, to its place below the current directory. */
static int place_mounts(void)
{
	static const char *const mounts[][2] = {{NEW_PROC, "proc"}, {NEW_SYS, "sys"}, {NEW_DEV, "dev"}};

	for (size_t i = 0; i < ARRAY_LEN(mounts); i++) {
		auto_close int place =
			sys_openat2(AT_FDCWD, mounts[i][1], O_PATH | O_DIRECTORY | O_CLOEXEC,
				    RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS);

		if (place < 0 || sys_move_mount(AT_FDCWD, mounts[i][0], place, "", TO_EMPTY_PATH) < 0)
			return -errno;
	}
	return 0;
}

static int pivot(void)
{
	if (syscall(SYS_pivot_root, ".", ".") < 0 || umount2(".", MNT_DETACH) < 0 || chdir("/") < 0)
		return -errno;
	return 0;
}

/* Cover `path` by a copy of the mount at `cover`, or by itself, read-only. */
static int cover(const char *path, const char *with)
{
	struct mount_attributes read_only = {
		.attr_set = ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV | ATTR_NOEXEC};
	auto_close int copy = sys_open_tree(AT_FDCWD, with, CLONE_TREE | O_CLOEXEC);

	if (copy < 0)
		return errno == ENOENT ? 0 : -errno;
	if (strcmp(with, NEW_DEV "/null") != 0 && sys_mount_setattr(copy, "", EMPTY_PATH, &read_only) < 0)
		return -errno;
	if (sys_move_mount(copy, "", AT_FDCWD, path, MOVE_EMPTY_PATH) < 0)
		return errno == ENOENT ? 0 : -errno;
	return 0;
}

/*
 * What root of this namespace can read or write of what tells of the host or changes it. Most of
 * what runtimes cover belongs to the host's root alone and is closed to ours without a cover,
 * which would cost time and memory: those are left out, but asked for each time.
 */
static const struct {
	const char *path;
	const char *with; /* NULL: itself */
	int mode; /* covered if root here could do this to it */
} masked[] = {
	{NEW_PROC "/kcore", NEW_DEV "/null", R_OK},
	{NEW_PROC "/keys", NEW_DEV "/null", R_OK},
	{NEW_PROC "/timer_list", NEW_DEV "/null", R_OK},
	{NEW_PROC "/latency_stats", NEW_DEV "/null", R_OK},
	{NEW_PROC "/sched_debug", NEW_DEV "/null", R_OK},
	{NEW_PROC "/kmsg", NEW_DEV "/null", R_OK},
	{NEW_PROC "/kpageflags", NEW_DEV "/null", R_OK},
	{NEW_PROC "/sysrq-trigger", NEW_DEV "/null", W_OK},
	{NEW_PROC "/acpi", NEW_DEV "/.empty", R_OK},
	{NEW_PROC "/asound", NEW_DEV "/.empty", R_OK},
	{NEW_PROC "/scsi", NEW_DEV "/.empty", R_OK},
	{NEW_SYS "/firmware", NEW_DEV "/.empty", R_OK},
	{NEW_SYS "/devices/virtual/powercap", NEW_DEV "/.empty", R_OK},
	{NEW_PROC "/bus", NULL, W_OK},
	{NEW_PROC "/fs", NULL, W_OK},
	{NEW_PROC "/irq", NULL, W_OK},
	{NEW_PROC "/sys", NULL, F_OK},
};

static int mask_paths(void)
{
	for (size_t i = 0; i < ARRAY_LEN(masked); i++) {
		const char *path = masked[i].path;
		int error = 0;

		if (faccessat(AT_FDCWD, path, masked[i].mode, 0) == 0)
			error = cover(path, masked[i].with ? masked[i].with : path);
		if (error < 0)
			return error;
	}
	/* The covers keep it; nobody can put anything into a removed directory. */
	return rmdir(NEW_DEV "/.empty") < 0 ? -errno : 0;
}

static int set_sysctls(void)
{
	/* No user namespace below this one: it would bring back every capability. */
	return write_file_at(AT_FDCWD, NEW_PROC "/sys/user/max_user_namespaces", "0");
}

static int drop_privileges(void)
{
	struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
	struct __user_cap_data_struct none[2] = {{0}, {0}};
	struct rlimit no_core = {0, 0};

	/* The bounding set stays: it only bounds what execve gives, and we execute nothing. */
	prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
	if (setrlimit(RLIMIT_CORE, &no_core) < 0 || syscall(SYS_capset, &header, none) < 0)
		return -errno;
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 || prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) < 0)
		return -errno;
	/* Changing identity clears the death signal, so it comes last. */
	if (prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) < 0)
		return -errno;
	return sys_close_range(INIT_CHANNEL + 1, ~0u, 0) < 0 ? -errno : 0;
}

/* `mount`: the one that came with the last message. */
static int run_step(enum step step, int mount)
{
	switch (step) {
	case STEP_NAMESPACE:
		/* Not in clone3: there it would be rooted at the worker's own cgroup. */
		return unshare(CLONE_NEWCGROUP) < 0 ? -errno : 0;
	case STEP_LOOPBACK:
		return loopback_up();
	case STEP_IDENTITY:
		return become_root();
	case STEP_PROC:
		return make_mount("proc", NEW_PROC, ATTR_NOSUID | ATTR_NODEV | ATTR_NOEXEC, NULL);
	case STEP_SYS:
		return make_mount("sysfs", NEW_SYS,
				  ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV | ATTR_NOEXEC, NULL);
	case STEP_DEV:
		return attach(mount, NEW_DEV);
	case STEP_DEVPTS:
		return make_devpts();
	case STEP_SYSCTL:
		return set_sysctls();
	case STEP_MASK:
		return mask_paths();
	case STEP_HOSTNAME:
		return sethostname(config.hostname, strlen(config.hostname)) < 0 ? -errno : 0;
	case STEP_SHM:
		return make_shm();
	case STEP_ROOT:
		return mount_root(mount);
	case STEP_PLACE:
		return place_mounts();
	case STEP_PIVOT:
		return pivot();
	case STEP_PRIVILEGES:
		return drop_privileges();
	case STEP_COUNT:
		break;
	}
	return -EINVAL;
}

static void fail(enum step step, int error)
{
	struct report message = {
		.kind = REPORT_FAILED, .status = -error, .stage = (uint32_t)step};

	report(&message);
	_exit(1);
}

/* Wait for what the worker has to have done, or to tell, before a step. */
static int await_worker(enum step step, int *mount)
{
	struct report prepared = {.kind = REPORT_PREPARED};
	char go;

	switch (step) {
	case STEP_NAMESPACE:
		return receive(&order, sizeof(order), NULL);
	/* What needs no ids is done while the worker maps them, */
	case STEP_IDENTITY:
		return receive(&go, 1, mount);
	/* what needs no configuration before it is asked for, */
	case STEP_HOSTNAME:
		if (order.ahead)
			report(&prepared);
		return receive(&config, sizeof(config), NULL);
	/* and what needs no root while it is made. */
	case STEP_ROOT:
		close_quietly(mount);
		return receive(&go, 1, mount);
	default:
		return 0;
	}
}

static void set_up(void)
{
	int mount = -1;

	for (enum step step = 0; step < STEP_COUNT; step++) {
		int error = await_worker(step, &mount);
		const char *inject = step < STEP_HOSTNAME ? order.inject : config.inject;

		if (step == STEP_HOSTNAME)
			prctl(PR_SET_NAME, INIT_NAME, 0, 0, 0);
		if (!error)
			error = strcmp(inject, init_steps[step]) == 0 ? -EIO : run_step(step, mount);
		if (error)
			fail(step, error);
	}
}

static void reap(void)
{
	for (;;) {
		struct report message = {.kind = REPORT_REAPED};
		struct rusage used = {0};
		int status = 0;
		pid_t pid = wait4(-1, &status, WNOHANG | __WALL, &used);

		if (pid <= 0)
			return;
		message.pid = pid;
		message.status = status;
		message.user_us = (uint64_t)used.ru_utime.tv_sec * 1000000 +
				  (uint64_t)used.ru_utime.tv_usec;
		message.system_us = (uint64_t)used.ru_stime.tv_sec * 1000000 +
				    (uint64_t)used.ru_stime.tv_usec;
		message.peak_kib = (uint64_t)used.ru_maxrss;
		message.blocks_in = (uint64_t)used.ru_inblock;
		message.blocks_out = (uint64_t)used.ru_oublock;
		report(&message);
	}
}

_Noreturn void init_main(void)
{
	struct report ready = {.kind = REPORT_READY};
	sigset_t all, child;

	/*
	 * While execve told us who we are, our ids were being mapped: user and effective user may look
	 * like two, and a libc that takes us for setuid then opens /dev/null where one of these is
	 * closed, or crashes for want of it.
	 */
	sys_close_range(0, 2, 0);
	prctl(PR_SET_NAME, BLANK_NAME, 0, 0, 0);
	sigfillset(&all);
	sigprocmask(SIG_SETMASK, &all, NULL);
	sigemptyset(&child);
	sigaddset(&child, SIGCHLD);
	set_up();
	report(&ready);
	for (;;) {
		siginfo_t info;

		sigwaitinfo(&child, &info);
		reap();
	}
}
