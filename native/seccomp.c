/*
 * A deny list in the spirit of the usual container profile: calls that attack the kernel or
 * leave the namespaces fail, the rest passes. The kernel runs the program once per system
 * call number when it is installed (to find those it may skip), so it is a search tree and
 * not a chain: that saves most of the cost of every exec.
 */
#define _GNU_SOURCE
#include "seccomp.h"

#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "kernel.h"
#include "util.h"

#if defined(__x86_64__)
#define NATIVE_ARCH AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define NATIVE_ARCH AUDIT_ARCH_AARCH64
#else
#error "only x86-64 and aarch64 are supported"
#endif

/* Numbers that are the same on every architecture and newer than some libc headers. */
#define NR_quotactl_fd 443
#define NR_open_tree_attr 467
#define NR_last_known 470

#define NAMESPACE_FLAGS                                                                            \
	(CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | \
	 CLONE_NEWPID | CLONE_NEWNET)

enum action {
	ALLOW,
	DENY,
	ABSENT,
	CHECK_CLONE,
	CHECK_SOCKET,
	CHECK_PERSONALITY,
	CHECK_IOCTL,
};

struct rule {
	int number;
	enum action action;
};

static struct rule rules[] = {
	{SYS_clone, CHECK_CLONE},
	{SYS_unshare, CHECK_CLONE},
	{SYS_clone3, ABSENT},
	/* The machine has 65,536 contexts for all together; who asks for them can do without. */
	{SYS_io_setup, ABSENT},
	{SYS_socket, CHECK_SOCKET},
	{SYS_socketpair, CHECK_SOCKET},
	{SYS_personality, CHECK_PERSONALITY},
	{SYS_ioctl, CHECK_IOCTL},
	{SYS_setns, DENY},
	{SYS_mount, DENY},
	{SYS_umount2, DENY},
	{SYS_pivot_root, DENY},
	{SYS_open_tree, DENY},
	{SYS_move_mount, DENY},
	{SYS_fsopen, DENY},
	{SYS_fsconfig, DENY},
	{SYS_fsmount, DENY},
	{SYS_fspick, DENY},
	{SYS_mount_setattr, DENY},
	{NR_open_tree_attr, DENY},
	{SYS_bpf, DENY},
	{SYS_perf_event_open, DENY},
	{SYS_userfaultfd, DENY},
	{SYS_io_uring_setup, DENY},
	{SYS_io_uring_enter, DENY},
	{SYS_io_uring_register, DENY},
	{SYS_keyctl, DENY},
	{SYS_add_key, DENY},
	{SYS_request_key, DENY},
	{SYS_kexec_load, DENY},
	{SYS_kexec_file_load, DENY},
	{SYS_init_module, DENY},
	{SYS_finit_module, DENY},
	{SYS_delete_module, DENY},
	{SYS_open_by_handle_at, DENY},
	{SYS_fanotify_init, DENY},
	{SYS_lookup_dcookie, DENY},
	{SYS_swapon, DENY},
	{SYS_swapoff, DENY},
	{SYS_reboot, DENY},
	{SYS_acct, DENY},
	{SYS_quotactl, DENY},
	{NR_quotactl_fd, DENY},
	{SYS_syslog, DENY},
	{SYS_vhangup, DENY},
	{SYS_settimeofday, DENY},
	{SYS_clock_settime, DENY},
	{SYS_clock_adjtime, DENY},
	{SYS_move_pages, DENY},
	{SYS_migrate_pages, DENY},
	{SYS_nfsservctl, DENY},
#if defined(__x86_64__)
	{SYS_create_module, DENY},
	{SYS_get_kernel_syms, DENY},
	{SYS_query_module, DENY},
	{SYS_iopl, DENY},
	{SYS_ioperm, DENY},
	{SYS_uselib, DENY},
	{SYS_ustat, DENY},
	{SYS_sysfs, DENY},
	{SYS__sysctl, DENY},
#endif
};

/* Filled from its end: jumps lead forward only, so that what they lead to is there already. */
#define PROGRAM_MAX 255u /* what one jump reaches across */
static struct sock_filter program[PROGRAM_MAX];
static size_t program_start;

/* The number space cut into intervals: from `start` up to the next one `action` holds. */
static struct {
	uint32_t start;
	enum action action;
} intervals[2 * ARRAY_LEN(rules) + 2];
static size_t interval_count;

#define FAIL(error) BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (error))
#define PASS BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)
#define LOAD(member) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, member))
#define IF(test, value, skip_then, skip_else)                                                      \
	BPF_JUMP(BPF_JMP | (test) | BPF_K, value, (uint8_t)(skip_then), (uint8_t)(skip_else))

/* Of arguments the low half: both architectures are little-endian. */
static const struct sock_filter allow[] = {PASS};
static const struct sock_filter deny[] = {FAIL(EPERM)};
static const struct sock_filter absent[] = {FAIL(ENOSYS)};
static const struct sock_filter check_clone[] = {
	LOAD(args[0]), IF(BPF_JSET, NAMESPACE_FLAGS, 0, 1), FAIL(EPERM), PASS,
};
/* AF_UNIX, AF_INET, AF_INET6, AF_NETLINK: the others are mostly ways into the kernel. */
static const struct sock_filter check_socket[] = {
	LOAD(args[0]),
	IF(BPF_JEQ, 1, 4, 0), IF(BPF_JEQ, 2, 3, 0), IF(BPF_JEQ, 10, 2, 0), IF(BPF_JEQ, 16, 1, 0),
	FAIL(EAFNOSUPPORT), PASS,
};
static const struct sock_filter check_personality[] = {
	LOAD(args[0]),
	IF(BPF_JEQ, 0, 5, 0), IF(BPF_JEQ, 8, 4, 0), IF(BPF_JEQ, 0x20000, 3, 0),
	IF(BPF_JEQ, 0x20008, 2, 0), IF(BPF_JEQ, 0xffffffff, 1, 0),
	FAIL(EPERM), PASS,
};
/* TIOCSTI and TIOCLINUX put words into a terminal's mouth. */
static const struct sock_filter check_ioctl[] = {
	LOAD(args[1]), IF(BPF_JEQ, 0x5412, 1, 0), IF(BPF_JEQ, 0x541c, 0, 1), FAIL(EPERM), PASS,
};

#define CODE(of) {of, ARRAY_LEN(of), 0}
static struct {
	const struct sock_filter *code;
	size_t len;
	size_t at; /* in the program */
} actions[] = {
	[ALLOW] = CODE(allow),
	[DENY] = CODE(deny),
	[ABSENT] = CODE(absent),
	[CHECK_CLONE] = CODE(check_clone),
	[CHECK_SOCKET] = CODE(check_socket),
	[CHECK_PERSONALITY] = CODE(check_personality),
	[CHECK_IOCTL] = CODE(check_ioctl),
};

/* Put code before what is there. Returns where it begins. */
static size_t prepend(const struct sock_filter *code, size_t len)
{
	if (len > program_start)
		abort();
	program_start -= len;
	memcpy(program + program_start, code, len * sizeof(*code));
	return program_start;
}

static void add_interval(uint32_t start, enum action action)
{
	if (interval_count && intervals[interval_count - 1].start == start)
		interval_count--;
	if (interval_count && intervals[interval_count - 1].action == action)
		return;
	intervals[interval_count].start = start;
	intervals[interval_count++].action = action;
}

/* A search tree over the intervals [low, high). Returns where it begins. */
static size_t prepend_tree(size_t low, size_t high)
{
	size_t middle = low + (high - low) / 2;
	size_t above, below;

	if (high - low == 1)
		return actions[intervals[low].action].at;
	above = prepend_tree(middle, high);
	below = prepend_tree(low, middle);
	return prepend(&(const struct sock_filter)IF(BPF_JGE, intervals[middle].start,
						     above - program_start, below - program_start), 1);
}

static int compare_rules(const void *a, const void *b)
{
	return ((const struct rule *)a)->number - ((const struct rule *)b)->number;
}

void seccomp_prepare(void)
{
	static const struct sock_filter head[] = {
		LOAD(arch), IF(BPF_JEQ, NATIVE_ARCH, 1, 0),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
		LOAD(nr),
	};

	qsort(rules, ARRAY_LEN(rules), sizeof(rules[0]), compare_rules);
	add_interval(0, ALLOW);
	for (size_t i = 0; i < ARRAY_LEN(rules); i++) {
		add_interval((uint32_t)rules[i].number, rules[i].action);
		add_interval((uint32_t)rules[i].number + 1, ALLOW);
	}
	/* Behind the newest known number lie what we have not judged and, on x86-64, x32. */
	add_interval(NR_last_known + 1, ABSENT);
	program_start = PROGRAM_MAX;
	for (size_t i = 0; i < ARRAY_LEN(actions); i++)
		actions[i].at = prepend(actions[i].code, actions[i].len);
	prepend_tree(0, interval_count);
	prepend(head, ARRAY_LEN(head));
}

int seccomp_install(void)
{
	struct sock_fprog filter = {.len = (unsigned short)(PROGRAM_MAX - program_start),
				    .filter = program + program_start};

	return (int)raw(seccomp, SECCOMP_SET_MODE_FILTER, 0, &filter);
}
