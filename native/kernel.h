/* System calls and constants that libc lacks or that clash with the kernel's; each returns -errno. */
#pragma once

#include <fcntl.h>
#include <linux/mount.h>
#include <linux/openat2.h>
#include <linux/sched.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

#define CLOSE_UNSHARE 2u /* CLOSE_RANGE_UNSHARE */
#define EMPTY_PATH 0x1000 /* AT_EMPTY_PATH */
#define CLONE_TREE 1u /* OPEN_TREE_CLONE */
#define CLONE_CGROUP 0x200000000ull /* CLONE_INTO_CGROUP */
#define ATTR_IDMAP 0x100000u /* MOUNT_ATTR_IDMAP */
#define ATTR_RDONLY 0x1u
#define ATTR_NOSUID 0x2u
#define ATTR_NODEV 0x4u
#define ATTR_NOEXEC 0x8u
#define MOVE_EMPTY_PATH 4u /* MOVE_MOUNT_F_EMPTY_PATH */
#define TO_EMPTY_PATH 0x40u /* MOVE_MOUNT_T_EMPTY_PATH */

struct mount_attributes {
	uint64_t attr_set;
	uint64_t attr_clr;
	uint64_t propagation;
	uint64_t userns_fd;
};

/*
 * System calls that return -errno and leave errno alone: helpers share it, as all our memory,
 * with the worker and with each other.
 */
static inline long raw_syscall(long number, long a, long b, long c, long d, long e)
{
#if defined(__x86_64__)
	register long r10 __asm__("r10") = d;
	register long r8 __asm__("r8") = e;
	long result;

	__asm__ volatile("syscall"
			 : "=a"(result)
			 : "0"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8)
			 : "rcx", "r11", "memory");
	return result;
#elif defined(__aarch64__)
	register long x8 __asm__("x8") = number;
	register long x0 __asm__("x0") = a;
	register long x1 __asm__("x1") = b;
	register long x2 __asm__("x2") = c;
	register long x3 __asm__("x3") = d;
	register long x4 __asm__("x4") = e;

	__asm__ volatile("svc #0"
			 : "+r"(x0)
			 : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4)
			 : "memory", "cc");
	return x0;
#else
#error "only x86-64 and aarch64 are supported"
#endif
}

#define raw_padded(number, a, b, c, d, e, ...)                                                     \
	raw_syscall(number, (long)(a), (long)(b), (long)(c), (long)(d), (long)(e))
#define raw(name, ...) raw_padded(SYS_##name, ##__VA_ARGS__, 0, 0, 0, 0, 0, 0)

static inline int sys_open_tree(int dir, const char *path, unsigned flags)
{
	return (int)raw(open_tree, dir, path, flags);
}

static inline int sys_move_mount(int from, const char *from_path, int to, const char *to_path,
				 unsigned flags)
{
	return (int)raw(move_mount, from, from_path, to, to_path, flags);
}

/* A detached mount, to the place that `path` names. */
static inline int sys_attach(int mount, const char *path)
{
	return sys_move_mount(mount, "", AT_FDCWD, path, MOVE_EMPTY_PATH);
}

/* Make the current directory, a mount, the root, and leave the old one. */
static inline int pivot_here(void)
{
	int error = (int)raw(pivot_root, ".", ".");

	error = error ? error : (int)raw(umount2, ".", 2 /* MNT_DETACH */);
	return error ? error : (int)raw(chdir, "/");
}

static inline int sys_fsopen(const char *type)
{
	return (int)raw(fsopen, type, 1 /* FSOPEN_CLOEXEC */);
}

static inline int sys_fsconfig(int fs, unsigned command, const char *key, const void *value,
			       int aux)
{
	return (int)raw(fsconfig, fs, command, key, value, aux);
}

static inline int sys_fsset(int fs, const char *key, const char *value)
{
	return sys_fsconfig(fs, FSCONFIG_SET_STRING, key, value, 0);
}

/* A detached mount of what `fs` is set to. */
static inline int sys_fsmount(int fs, unsigned attributes)
{
	int error = sys_fsconfig(fs, FSCONFIG_CMD_CREATE, NULL, NULL, 0);

	return error ? error : (int)raw(fsmount, fs, 1 /* FSMOUNT_CLOEXEC */, attributes);
}

/* Name and value of what a file system is set to, up to a pair of NULLs. */
typedef const char *const mount_option[2];
/* A detached mount of a file system of its own; or -errno. */
int new_mount(const char *type, unsigned attributes, const mount_option *options);

static inline int sys_mount_setattr(int dir, const char *path, unsigned flags,
				    struct mount_attributes *attributes)
{
	return (int)raw(mount_setattr, dir, path, flags, attributes, sizeof(*attributes));
}

static inline int sys_close_range(unsigned first, unsigned last, unsigned flags)
{
	return (int)raw(close_range, first, last, flags);
}

static inline int sys_openat2(int dir, const char *path, uint64_t flags, uint64_t resolve)
{
	struct open_how how = {.flags = flags, .resolve = resolve};

	return (int)raw(openat2, dir, path, &how, sizeof(how));
}

/*
 * For functions that end in execve on a stack that will be used again: what the sanitizer noted of
 * their frames would never be taken back.
 */
#define NEVER_RETURNS __attribute__((no_sanitize("address"), noinline))

/*
 * Become this program under another name, with nothing open but what was in SLOT_CHANNEL, and
 * /dev/null. Returns -errno.
 */
#define CHANNEL 3
int execute_self(const char *name);

/*
 * clone3 whose child runs `fn(arg)` on `args->stack` and exits with its result. The caller's
 * memory may be shared (CLONE_VM); with CLONE_VFORK the caller waits until the child has
 * executed something or exited. Returns the pid or -errno.
 */
long clone_onto_stack(struct clone_args *args, int (*fn)(void *), void *arg);
