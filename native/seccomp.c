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
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
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
#define NR_fspick 433
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
	{NR_fspick, DENY},
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

static struct sock_filter program[512];
static unsigned short program_len;

/* The number space cut into intervals: from `start` up to the next one `action` holds. */
static struct {
	uint32_t start;
	enum action action;
} intervals[2 * ARRAY_LEN(rules) + 2];
static size_t interval_count;

/* Jumps to the code of an action, known once the tree stands. */
static struct {
	unsigned short at;
	bool when_true;
	enum action action;
} jumps[2 * ARRAY_LEN(intervals)];
static size_t jump_count;

static void emit(uint16_t code, uint32_t k, uint8_t jt, uint8_t jf)
{
	if (program_len < ARRAY_LEN(program))
		program[program_len++] = (struct sock_filter){code, jt, jf, k};
}

static void emit_return(uint32_t value)
{
	emit(BPF_RET | BPF_K, value, 0, 0);
}

static void emit_load(size_t offset)
{
	emit(BPF_LD | BPF_W | BPF_ABS, (uint32_t)offset, 0, 0);
}

static void emit_argument(int index)
{
	/* The low half: both architectures are little-endian. */
	emit_load(offsetof(struct seccomp_data, args) + 8 * (size_t)index);
}

/* Allow if the accumulator is one of the values, else fail with `error`. */
static void emit_one_of(const uint32_t *values, uint8_t count, uint32_t error)
{
	for (uint8_t i = 0; i < count; i++)
		emit(BPF_JMP | BPF_JEQ | BPF_K, values[i], (uint8_t)(count - i), 0);
	emit_return(SECCOMP_RET_ERRNO | error);
	emit_return(SECCOMP_RET_ALLOW);
}

static void emit_action(enum action action)
{
	/* AF_UNIX, AF_INET, AF_INET6, AF_NETLINK: the others are mostly ways into the kernel. */
	static const uint32_t families[] = {1, 2, 10, 16};
	static const uint32_t personalities[] = {0, 8, 0x20000, 0x20008, 0xffffffff};

	switch (action) {
	case ALLOW:
		emit_return(SECCOMP_RET_ALLOW);
		return;
	case DENY:
		emit_return(SECCOMP_RET_ERRNO | EPERM);
		return;
	case ABSENT:
		emit_return(SECCOMP_RET_ERRNO | ENOSYS);
		return;
	case CHECK_CLONE:
		emit_argument(0);
		emit(BPF_JMP | BPF_JSET | BPF_K, NAMESPACE_FLAGS, 0, 1);
		emit_return(SECCOMP_RET_ERRNO | EPERM);
		emit_return(SECCOMP_RET_ALLOW);
		return;
	case CHECK_SOCKET:
		emit_argument(0);
		emit_one_of(families, ARRAY_LEN(families), EAFNOSUPPORT);
		return;
	case CHECK_PERSONALITY:
		emit_argument(0);
		emit_one_of(personalities, ARRAY_LEN(personalities), EPERM);
		return;
	case CHECK_IOCTL:
		/* TIOCSTI and TIOCLINUX put words into a terminal's mouth. */
		emit_argument(1);
		emit(BPF_JMP | BPF_JEQ | BPF_K, 0x5412, 1, 0);
		emit(BPF_JMP | BPF_JEQ | BPF_K, 0x541c, 0, 1);
		emit_return(SECCOMP_RET_ERRNO | EPERM);
		emit_return(SECCOMP_RET_ALLOW);
		return;
	}
}

static void add_interval(uint32_t start, enum action action)
{
	bool same_start = interval_count && intervals[interval_count - 1].start == start;
	bool same_action;

	if (same_start)
		interval_count--;
	same_action = interval_count && intervals[interval_count - 1].action == action;
	if (same_action)
		return;
	intervals[interval_count].start = start;
	intervals[interval_count++].action = action;
}

static void emit_tree(size_t low, size_t high);

/* Where a comparison leads: to a subtree, which comes next, or to an action. */
static void lead(unsigned short at, bool when_true, size_t low, size_t high)
{
	uint8_t *offset = when_true ? &program[at].jt : &program[at].jf;

	if (high - low > 1) {
		*offset = (uint8_t)(program_len - at - 1);
		emit_tree(low, high);
		return;
	}
	jumps[jump_count].at = at;
	jumps[jump_count].when_true = when_true;
	jumps[jump_count++].action = intervals[low].action;
}

/* A search tree over the intervals [low, high), two at least. */
static void emit_tree(size_t low, size_t high)
{
	size_t middle = low + (high - low) / 2;
	unsigned short at = program_len;

	emit(BPF_JMP | BPF_JGE | BPF_K, intervals[middle].start, 0, 0);
	lead(at, false, low, middle);
	lead(at, true, middle, high);
}

/* Once each, behind the tree; a jump reaches 255 instructions, more than there are. */
static void emit_actions(void)
{
	for (enum action action = ALLOW; action <= CHECK_IOCTL; action++) {
		unsigned short start = program_len;

		for (size_t i = 0; i < jump_count; i++) {
			uint8_t offset = (uint8_t)(start - jumps[i].at - 1);

			if (jumps[i].action == action && jumps[i].when_true)
				program[jumps[i].at].jt = offset;
			else if (jumps[i].action == action)
				program[jumps[i].at].jf = offset;
		}
		emit_action(action);
	}
}

static int compare_rules(const void *a, const void *b)
{
	return ((const struct rule *)a)->number - ((const struct rule *)b)->number;
}

void seccomp_prepare(void)
{
	qsort(rules, ARRAY_LEN(rules), sizeof(rules[0]), compare_rules);
	program_len = 0;
	interval_count = jump_count = 0;
	add_interval(0, ALLOW);
	for (size_t i = 0; i < ARRAY_LEN(rules); i++) {
		add_interval((uint32_t)rules[i].number, rules[i].action);
		add_interval((uint32_t)rules[i].number + 1, ALLOW);
	}
	/* Behind the newest known number lie what we have not judged and, on x86-64, x32. */
	add_interval(NR_last_known + 1, ABSENT);
	emit_load(offsetof(struct seccomp_data, arch));
	emit(BPF_JMP | BPF_JEQ | BPF_K, NATIVE_ARCH, 1, 0);
	emit_return(SECCOMP_RET_KILL_PROCESS);
	emit_load(offsetof(struct seccomp_data, nr));
	emit_tree(0, interval_count);
	emit_actions();
	if (program_len > 255)
		abort();
}

int seccomp_install(void)
{
	struct sock_fprog filter = {.len = program_len, .filter = program};

	return (int)raw(seccomp, SECCOMP_SET_MODE_FILTER, 0, &filter);
}
