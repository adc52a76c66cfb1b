/*
 * Run inside sandboxes by the tests: does what a shell cannot.
 *
 *   trace PID      attach to a process and never wait for it
 *   hold PID       the same, and have it stop before it exits
 *   grow MIB       touch that much memory, then say so and pause
 *   watch PATH     try to open whatever appears in /proc for writing or reading of its memory, until
 *                  PATH exists
 *   stop SECONDS   send SIGSTOP to everything in the sandbox, again and again
 *   calls          make system calls that must be refused; print "NAME errno" for each
 *   rlimits        print the limits
 *   deep N         make N nested directories below the current one
 *   keep KIND N    keep up to N of a kind open (see kinds) and print how many those are
 *
 * As pid 1 it ends at once, with the number of its standard descriptors.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <mqueue.h>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static int trace(pid_t pid, unsigned long options)
{
	if (ptrace(PTRACE_SEIZE, pid, NULL, options) < 0)
		return perror("seize"), 1;
	puts("attached");
	fflush(stdout);
	for (;;)
		pause();
}

static int grow(size_t mib)
{
	char *memory = malloc(mib << 20);

	for (size_t at = 0; memory && at < mib << 20; at += 4096)
		memory[at] = 1;
	puts(memory ? "grown" : "refused");
	fflush(stdout);
	return 0;
}

/* Whether a process runs a program of the sandbox's own, or has gone. */
static int executed(const char *pid)
{
	char path[64], name[64] = "";
	ssize_t len;
	int fd;

	snprintf(path, sizeof(path), "/proc/%s/comm", pid);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return 1;
	len = read(fd, name, sizeof(name) - 1);
	close(fd);
	name[len > 0 ? len : 0] = '\0';
	return len <= 0 || strcmp(name, "busybox\n") == 0 || strcmp(name, "true\n") == 0 ||
	       strcmp(name, "sh\n") == 0 || strcmp(name, "probe\n") == 0;
}

static void try_one(const char *pid, const char *file, int flags)
{
	char path[64], target[256] = "", byte;
	ssize_t len;
	int fd, content;

	snprintf(path, sizeof(path), "/proc/%s/%s", pid, file);
	fd = open(path, flags | O_CLOEXEC);
	if (fd < 0)
		return;
	/*
	 * Files of a process that is exiting can be opened, and are empty. The list of descriptors
	 * of one in the middle of execve, too, by the root of its namespace: it tells numbers, and
	 * what counts is whether they lead anywhere.
	 */
	if (strcmp(file, "fd") == 0)
		content = readlinkat(fd, "0", &byte, 1) == 1;
	else
		content = flags & O_DIRECTORY || pread(fd, &byte, 1, 0) == 1;
	/* It may have executed meanwhile: then all of it is the sandbox's own. Or it has gone. */
	snprintf(path, sizeof(path), "/proc/%s/exe", pid);
	len = readlink(path, target, sizeof(target) - 1);
	if ((content && len < 0 && errno == EACCES) || strstr(target, "memfd"))
		printf("opened %s of %s\n", file, pid);
	close(fd);
}

/* Every process but ourselves: nothing of a helper may ever be readable. */
static int watch(const char *until)
{
	unsigned long seen = 0;
	char self[16];

	snprintf(self, sizeof(self), "%d", getpid());
	do {
		DIR *dir = opendir("/proc");
		struct dirent *entry;

		while (dir && (entry = readdir(dir))) {
			if (entry->d_name[0] < '1' || entry->d_name[0] > '9' ||
			    strcmp(entry->d_name, self) == 0 || executed(entry->d_name))
				continue;
			seen++;
			try_one(entry->d_name, "mem", O_RDWR);
			try_one(entry->d_name, "environ", O_RDONLY);
			try_one(entry->d_name, "exe", O_RDONLY);
			try_one(entry->d_name, "cwd", O_RDONLY | O_DIRECTORY);
			try_one(entry->d_name, "fd", O_RDONLY | O_DIRECTORY);
			try_one(entry->d_name, "root", O_RDONLY | O_DIRECTORY);
			try_one(entry->d_name, "maps", O_RDONLY);
		}
		if (dir)
			closedir(dir);
	} while (access(until, F_OK) < 0);
	printf("watched %d\n", seen > 0);
	return 0;
}

static int stop(double seconds)
{
	time_t until = time(NULL) + (time_t)seconds;

	while (time(NULL) < until)
		kill(-1, SIGSTOP);
	kill(-1, SIGCONT);
	return 0;
}

static void say(const char *name, long result)
{
	printf("%s %s\n", name, result < 0 ? strerrorname_np(errno) : "ok");
}

static int calls(void)
{
	static char buf[4096];

	say("unshare-user", unshare(CLONE_NEWUSER));
	say("unshare-mount", unshare(CLONE_NEWNS));
	say("clone-user", syscall(SYS_clone, CLONE_NEWUSER | SIGCHLD, 0, 0, 0, 0));
	say("clone3", syscall(SYS_clone3, buf, 88));
	say("setns", setns(0, 0));
	say("mount", mount("none", "/tmp", "tmpfs", 0, NULL));
	say("fsopen", syscall(430, "tmpfs", 0));
	say("open_tree", syscall(428, AT_FDCWD, "/", 1));
	say("pivot_root", syscall(SYS_pivot_root, ".", "."));
	say("bpf", syscall(SYS_bpf, 0, buf, 64));
	say("perf", syscall(SYS_perf_event_open, buf, 0, -1, -1, 0));
	say("userfaultfd", syscall(SYS_userfaultfd, 0));
	say("io_uring", syscall(SYS_io_uring_setup, 1, buf));
	say("aio", syscall(SYS_io_setup, 1, buf));
	say("keyctl", syscall(SYS_keyctl, 0, 0));
	say("add_key", syscall(SYS_add_key, "user", "x", "y", 1, -3));
	say("kexec", syscall(SYS_kexec_load, 0, 0, NULL, 0));
	say("init_module", syscall(SYS_init_module, buf, 1, ""));
	say("handle", syscall(SYS_open_by_handle_at, 0, buf, 0));
	say("swapon", syscall(SYS_swapon, "/tmp", 0));
	say("reboot", syscall(SYS_reboot, 0xfee1dead, 672274793, 0, NULL));
	say("vsock", socket(40, SOCK_STREAM, 0));
	say("alg", socket(38, SOCK_SEQPACKET, 0));
	say("packet", socket(17, SOCK_RAW, 0));
	say("inet", socket(2, SOCK_STREAM, 0));
	say("unix", socket(1, SOCK_STREAM, 0));
	say("netlink", socket(16, SOCK_RAW, 0));
	say("personality", syscall(SYS_personality, 0x0040000));
	say("personality-query", syscall(SYS_personality, 0xffffffff));
	say("mknod-disk", mknod("/tmp/disk", S_IFBLK | 0666, 0x800));
	say("mknod-null", mknod("/tmp/null", S_IFCHR | 0666, 0x103));
	say("mknod-fifo", mknod("/tmp/fifo", S_IFIFO | 0666, 0));
	say("chroot", chroot("/"));
	say("beyond", syscall(999));
#if defined(__x86_64__)
	say("x32", syscall(0x40000000 | 39));
#endif
	say("ambient", prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, 21, 0, 0));
	return 0;
}

static int rlimits(void)
{
	struct rlimit limit;

	getrlimit(RLIMIT_CORE, &limit);
	printf("core %lu %lu\n", (unsigned long)limit.rlim_cur, (unsigned long)limit.rlim_max);
	return 0;
}

static int deep(long count)
{
	for (long i = 0; i < count; i++)
		if (mkdir("d", 0700) < 0 || chdir("d") < 0)
			return perror("deep"), 1;
	return 0;
}

static int open_terminal(long number)
{
	(void)number;
	return open("/dev/ptmx", O_RDWR | O_NOCTTY);
}

static int open_inotify(long number)
{
	(void)number;
	return inotify_init();
}

static int open_queue(long number)
{
	char name[16];

	snprintf(name, sizeof(name), "/q%ld", number);
	return mq_open(name, O_RDWR | O_CREAT, 0600, NULL);
}

/* A connection to itself that holds 128 KiB which nobody reads. */
static int open_filled(long number)
{
	struct sockaddr_in here = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
	socklen_t len = sizeof(here);
	int listener = socket(AF_INET, SOCK_STREAM, 0);
	int from = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
	int size = 1 << 18;
	static char content[1 << 17];

	(void)number;
	setsockopt(from, SOL_SOCKET, SO_SNDBUF, &size, sizeof(size));
	if (bind(listener, (struct sockaddr *)&here, len) || listen(listener, 1) ||
	    getsockname(listener, (struct sockaddr *)&here, &len))
		return -1;
	if (connect(from, (struct sockaddr *)&here, len) && errno != EINPROGRESS)
		return -1;
	if (accept(listener, NULL, NULL) < 0)
		return -1;
	return send(from, content, sizeof(content), 0) == sizeof(content) ? from : -1;
}

static const struct {
	const char *name;
	int (*open_one)(long number);
} kinds[] = {
	{"terminals", open_terminal},
	{"inotify", open_inotify},
	{"queues", open_queue},
	{"filled", open_filled},
};

static int keep(const char *kind, long count)
{
	long got = 0;

	for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++)
		if (strcmp(kind, kinds[i].name) == 0)
			while (got < count && kinds[i].open_one(got) >= 0)
				got++;
	printf("%ld\n", got);
	fflush(stdout);
	pause();
	return 0;
}

static int standard_descriptors(void)
{
	int count = 0;

	for (int fd = 0; fd <= 2; fd++)
		count += fcntl(fd, F_GETFD) >= 0;
	return count;
}

int main(int argc, char **argv)
{
	const char *verb = argc > 1 ? argv[1] : "";
	const char *value = argc > 2 ? argv[2] : "0";

	if (getpid() == 1)
		return standard_descriptors();
	if (strcmp(verb, "trace") == 0)
		return trace(atoi(value), 0);
	if (strcmp(verb, "hold") == 0)
		return trace(atoi(value), PTRACE_O_TRACEEXIT);
	if (strcmp(verb, "grow") == 0)
		return grow((size_t)atol(value));
	if (strcmp(verb, "watch") == 0)
		return watch(value);
	if (strcmp(verb, "stop") == 0)
		return stop(atof(value));
	if (strcmp(verb, "calls") == 0)
		return calls();
	if (strcmp(verb, "rlimits") == 0)
		return rlimits();
	if (strcmp(verb, "deep") == 0)
		return deep(atol(value));
	if (strcmp(verb, "keep") == 0 && argc > 3)
		return keep(value, atol(argv[3]));
	return 2;
}
