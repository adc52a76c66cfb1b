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

static struct init_order order;
static struct init_config config;
static int mount_given = -1; /* with the last message */
static const char *inject = order.inject; /* the step that shall fail */

/*
 * What lies in the root of every sandbox, put together here before there is one. The image can have
 * links where these go: they are moved there by descriptors.
 */
#define NEW_PROC "/new/proc"
#define NEW_SYS "/new/sys"
#define NEW_DEV "/new/dev"

static void report(const struct report *message)
{
	send(CHANNEL, message, sizeof(*message), MSG_NOSIGNAL);
}

static int receive(void *data, size_t len, int *fd)
{
	return message_receive(CHANNEL, data, len, fd);
}

static int loopback_up(void)
{
	struct ifreq request = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
	auto_close int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);

	return check(fd < 0 ? fd : ioctl(fd, SIOCSIFFLAGS, &request));
}

static int become_root(void)
{
	/* setgroups first: an unmapped supplementary group must not stay. */
	if (setgroups(0, NULL) < 0 || setresgid(0, 0, 0) < 0 || setresuid(0, 0, 0) < 0)
		return -errno;
	return setsid() < 0 && errno != EPERM ? -errno : 0;
}

static int make_mount(const char *type, const char *path, unsigned attributes,
		      const mount_option *options)
{
	auto_close int mount = new_mount(type, attributes, options);

	return mount < 0 ? mount : sys_attach(mount, path);
}

static int make_devpts(void)
{
	/* The machine has a few thousand for all sandboxes together. */
	static const mount_option options[] = {
		{"gid", "5"}, {"mode", "620"}, {"ptmxmode", "666"}, {"max", "128"}, {NULL, NULL}};

	return make_mount("devpts", NEW_DEV "/pts", ATTR_NOSUID | ATTR_NOEXEC, options);
}

static int make_shm(void)
{
	char size[24];
	const mount_option options[] = {{"mode", "1777"}, {"size", size}, {NULL, NULL}};

	snprintf(size, sizeof(size), "%llu", (unsigned long long)config.shm_bytes);
	return make_mount("tmpfs", NEW_DEV "/shm", ATTR_NOSUID | ATTR_NODEV | ATTR_NOEXEC, options);
}

static int mount_root(void)
{
	TRY(sys_attach(mount_given, "/mnt"));
	return check(chdir("/mnt"));
}

/* Move each mount, and what lies on it, to its place below the current directory. */
static int place_mounts(void)
{
	static const char *const mounts[][2] = {{NEW_PROC, "proc"}, {NEW_SYS, "sys"}, {NEW_DEV, "dev"}};

	for (size_t i = 0; i < ARRAY_LEN(mounts); i++) {
		auto_close int place =
			sys_openat2(AT_FDCWD, mounts[i][1], O_PATH | O_DIRECTORY | O_CLOEXEC,
				    RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS);

		TRY(place);
		TRY(sys_move_mount(AT_FDCWD, mounts[i][0], place, "", TO_EMPTY_PATH));
	}
	return 0;
}

/* Cover `path` by a copy of the mount at `cover`, or by itself, read-only. */
static int cover(const char *path, const char *with)
{
	struct mount_attributes read_only = {
		.attr_set = ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV | ATTR_NOEXEC};
	auto_close int copy = sys_open_tree(AT_FDCWD, with, CLONE_TREE | O_CLOEXEC);

	TRY(copy);
	if (strcmp(with, NEW_DEV "/null") != 0)
		TRY(sys_mount_setattr(copy, "", EMPTY_PATH, &read_only));
	return sys_attach(copy, path);
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
	/* Each trigger takes a grace period to close: thousands hold up a kill for minutes. */
	{NEW_PROC "/pressure", NEW_DEV "/.empty", R_OK},
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
		int error = -ENOENT;

		if (faccessat(AT_FDCWD, path, masked[i].mode, 0) == 0)
			error = cover(path, masked[i].with ? masked[i].with : path);
		if (error != -ENOENT)
			TRY(error);
	}
	/* The covers keep it; nobody can put anything into a removed directory. */
	return check(rmdir(NEW_DEV "/.empty"));
}

static int drop_privileges(void)
{
	struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
	struct __user_cap_data_struct none[2] = {{0}, {0}};
	struct rlimit no_core = {0, 0};

	/* The bounding set stays: it only bounds what execve gives, and we execute nothing. */
	prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
	TRY(check(setrlimit(RLIMIT_CORE, &no_core)));
	TRY((int)raw(capset, &header, none));
	TRY(check(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)));
	TRY(check(prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)));
	/* Changing identity clears the death signal, so it comes last. */
	TRY(check(prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)));
	return sys_close_range(CHANNEL + 1, ~0u, 0);
}

/* Not in clone3: there it would be rooted at the worker's own cgroup. */
static int unshare_cgroups(void)
{
	return check(unshare(CLONE_NEWCGROUP));
}

static int make_proc(void)
{
	return make_mount("proc", NEW_PROC, ATTR_NOSUID | ATTR_NODEV | ATTR_NOEXEC, NULL);
}

static int make_sys(void)
{
	return make_mount("sysfs", NEW_SYS, ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV | ATTR_NOEXEC, NULL);
}

static int attach_dev(void)
{
	return sys_attach(mount_given, NEW_DEV);
}

/* No user namespace below this one: it would bring back every capability. */
static int forbid_user_namespaces(void)
{
	return write_file_at(AT_FDCWD, NEW_PROC "/sys/user/max_user_namespaces", "0");
}

static int set_hostname(void)
{
	return check(sethostname(config.hostname, strlen(config.hostname)));
}

static int await_order(void)
{
	return receive(&order, sizeof(order), NULL);
}

static int await_mount(void)
{
	char go;

	close_quietly(&mount_given);
	return receive(&go, 1, &mount_given);
}

static int await_config(void)
{
	struct report prepared = {.kind = REPORT_PREPARED};

	if (order.ahead)
		report(&prepared);
	TRY(receive(&config, sizeof(config), NULL));
	inject = config.inject;
	return check(prctl(PR_SET_NAME, INIT_NAME, 0, 0, 0));
}

/* Each is begun as soon as the worker has done, or told, what it needs. */
static const struct {
	const char *name;
	int (*run)(void);
	int (*await)(void);
} steps[] = {
	{"namespace", unshare_cgroups, await_order},
	{"loopback", loopback_up, NULL},
	{"identity", become_root, await_mount}, /* our ids are mapped */
	{"proc", make_proc, NULL},
	{"sys", make_sys, NULL},
	{"dev", attach_dev, NULL},
	{"devpts", make_devpts, NULL},
	{"sysctl", forbid_user_namespaces, NULL},
	{"mask", mask_paths, NULL},
	{"hostname", set_hostname, await_config},
	{"shm", make_shm, NULL},
	{"root", mount_root, await_mount},
	{"place", place_mounts, NULL},
	{"pivot", pivot_here, NULL},
	{"privileges", drop_privileges, NULL},
};

const char *init_step_name(size_t index)
{
	return index < ARRAY_LEN(steps) ? steps[index].name : NULL;
}

static void set_up(void)
{
	for (size_t i = 0; i < ARRAY_LEN(steps); i++) {
		int error = steps[i].await ? steps[i].await() : 0;

		if (!error)
			error = strcmp(inject, steps[i].name) == 0 ? -EIO : steps[i].run();
		if (error) {
			report(&(struct report){
				.kind = REPORT_FAILED, .status = -error, .stage = (uint32_t)i});
			_exit(1);
		}
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
