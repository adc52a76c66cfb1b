/*
 * Start a command in a sandbox, through three processes that share our memory:
 *
 *   joiner   closes all that is ours, then joins the namespaces of pid 1 but for the user's
 *   inner    the first process born inside: its children's orphans go to the sandbox's pid 1
 *   command  sets itself up, joins the user namespace, and executes
 *
 * Each waits for the next one in vfork. We do not: from the moment on that the joiner has its own
 * table of descriptors the launch goes on beside us, for as long as the sandbox makes it take.
 * Each touches only its own struct launch and stacks, and no function that sets errno.
 *
 * As long as they are not of the sandbox's user namespace, nobody in it can signal them: neither
 * a SIGKILL to everything, after which the command would still use memory that we use again, nor
 * a SIGSTOP. Only the command ever is, for the last of its way; and only it enters the limits of
 * memory and processor: the others are never throttled, and never the OOM killer's choice, nor is
 * it while it is in vfork, as we would have to die with it for its memory.
 *
 * When the joiner has ended, the command is pid 1's child.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/wait.h>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

#include "kernel.h"
#include "launch.h"

#define STACK_SIZE (64u << 10)
#define SPARES_MAX 64u
#define OTHER_NAMESPACES                                                                             \
	(CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS)

static struct launch *spares, *ended;
static unsigned spare_count;

/* --- inner and joiner ---------------------------------------------------------------- */

#define STACK(launch, index)                                                                       \
	.stack = (uint64_t)(uintptr_t)((launch)->stacks + (index)*STACK_SIZE),                     \
	.stack_size = STACK_SIZE

/* Here the kernel holds a new process to the limit: who comes from elsewhere may go beyond. */
static int enter_pids(const struct launch *launch)
{
	int fd = (int)raw(openat, SLOT_V1 + PIDS, launch->tasks, O_WRONLY | O_CLOEXEC | O_NOFOLLOW);
	long done = fd < 0 ? fd : raw(write, fd, "0", 1);

	if (fd >= 0)
		raw(close, fd);
	return done < 0 ? (int)done : 0;
}

static int inner(void *context)
{
	struct launch *launch = context;
	struct clone_args args = {
		.flags = CLONE_VM | CLONE_VFORK | CLONE_FILES | CLONE_CGROUP | CLONE_PARENT_SETTID |
			 CLONE_CHILD_CLEARTID,
		.exit_signal = SIGCHLD,
		.cgroup = SLOT_CGROUP,
		.parent_tid = (uint64_t)(uintptr_t)&launch->pid,
		.child_tid = (uint64_t)(uintptr_t)&launch->running,
		STACK(launch, 2),
	};
	int error = launch->limited[PIDS] ? enter_pids(launch) : 0;
	long pid;

	if (error)
		return launch_failed(launch, "enter cgroups", error);
	launch->running = 1;
	pid = clone_onto_stack(&args, command_run, launch);
	if (pid < 0) {
		launch->running = 0;
		return launch_failed(launch, "fork", (int)pid);
	}
	/* Pid 1 shall not hear of what never was a command. */
	if (launch->error)
		raw(wait4, pid, NULL, __WALL, NULL);
	return 0;
}

/*
 * If inner was killed, as by the end of pid 1, the command may still use our memory; unless there
 * is none, and nobody to clear the flag.
 */
static void await_departure(struct launch *launch)
{
	while (__atomic_load_n(&launch->running, __ATOMIC_ACQUIRE) && launch->pid)
		raw(futex, &launch->running, FUTEX_WAIT, 1, NULL);
}

static void tell(uint32_t *word)
{
	__atomic_store_n(word, 1, __ATOMIC_RELEASE);
	raw(futex, word, FUTEX_WAKE, 1);
}

static int joiner(void *context)
{
	struct launch *launch = context;
	struct clone_args args = {
		.flags = CLONE_VM | CLONE_VFORK | CLONE_FILES,
		STACK(launch, 1),
	};
	int error = (int)raw(close_range, SLOT_END, ~0u, CLOSE_UNSHARE);
	long pid;

	tell(&launch->apart);
	if (error)
		return launch_failed(launch, "descriptors", error);
	raw(close, 2);
	error = (int)raw(setns, SLOT_PIDFD, OTHER_NAMESPACES);
	if (error)
		return launch_failed(launch, "join", error);
	pid = clone_onto_stack(&args, inner, launch);
	if (pid < 0)
		return launch_failed(launch, "fork", (int)pid);
	raw(wait4, pid, NULL, __WALL, NULL);
	await_departure(launch);
	return 0;
}

/* --- in the worker ------------------------------------------------------------------- */

static const char *path_of(char **env)
{
	for (; *env; env++)
		if (strncmp(*env, "PATH=", 5) == 0)
			return *env + 5;
	return "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
}

static size_t measure(char **strings, size_t *count)
{
	size_t size = 0;

	for (*count = 0; strings[*count]; ++*count)
		size += strlen(strings[*count]) + 1;
	return size;
}

static char *copy(char *to, const char *text)
{
	return stpcpy(to, text) + 1;
}

/* The request's memory is used again while the launch goes on. */
static int copy_strings(struct launch *launch, const struct exec_spec *spec)
{
	size_t argc, envc;
	size_t size = measure(spec->argv, &argc) + measure(spec->env, &envc) + strlen(spec->cwd) + 1;
	char **pointers = malloc((argc + envc + 2) * sizeof(*pointers) + size);
	char *at;

	if (!pointers)
		return -ENOMEM;
	launch->strings = (char *)pointers;
	launch->spec.argv = pointers;
	launch->spec.env = pointers + argc + 1;
	at = (char *)(pointers + argc + envc + 2);
	for (size_t i = 0; i < argc; i++) {
		launch->spec.argv[i] = at;
		at = copy(at, spec->argv[i]);
	}
	for (size_t i = 0; i < envc; i++) {
		launch->spec.env[i] = at;
		at = copy(at, spec->env[i]);
	}
	launch->spec.argv[argc] = launch->spec.env[envc] = NULL;
	launch->spec.cwd = at;
	copy(at, spec->cwd);
	launch->path = path_of(launch->spec.env);
	return 0;
}

static struct launch *take_spare(void)
{
	struct launch *launch = spares;
	uint8_t *stacks;

	if (launch) {
		spares = launch->next;
		spare_count--;
		return launch;
	}
	launch = malloc(sizeof(*launch));
	stacks = mmap(NULL, 3 * STACK_SIZE, PROT_READ | PROT_WRITE,
		      MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK | MAP_NORESERVE, -1, 0);
	if (!launch || stacks == MAP_FAILED) {
		free(launch);
		if (stacks != MAP_FAILED)
			munmap(stacks, 3 * STACK_SIZE);
		return NULL;
	}
	launch->stacks = stacks;
	return launch;
}

static void give_back(struct launch *launch)
{
	free(launch->strings);
	launch->strings = NULL;
#ifdef __SANITIZE_ADDRESS__
	/* Who was killed in the middle of a function left marks of its frame. */
	__asan_unpoison_memory_region(launch->stacks, 3 * STACK_SIZE);
#endif
	if (spare_count == SPARES_MAX) {
		munmap(launch->stacks, 3 * STACK_SIZE);
		free(launch);
		return;
	}
	launch->next = spares;
	spares = launch;
	spare_count++;
}

struct launch *launch_new(const struct exec_spec *spec, struct exec *exec)
{
	const struct sandbox *sandbox = spec->sandbox;
	struct launch *launch = take_spare();

	if (!launch)
		return NULL;
	*launch = (struct launch){
		.exec = exec,
		.spec = *spec,
		.stacks = launch->stacks,
		.pidfd = -1,
		.pty = spec->flags & EXEC_FLAG_PTY,
	};
	for (int i = 0; i < CONTROLLERS; i++)
		launch->limited[i] = worker.cgroups.v1[i] >= 0 && sandbox->limits.of[i];
	if (sandbox->no_new_privs)
		launch->spec.flags |= EXEC_FLAG_NO_NEW_PRIVS;
	snprintf(launch->tasks, sizeof(launch->tasks), "%s/tasks", sandbox->id);
	if (copy_strings(launch, spec) < 0) {
		give_back(launch);
		return NULL;
	}
	return launch;
}

const struct exec_spec *launch_spec(const struct launch *launch)
{
	return &launch->spec;
}

static int *held_fd(struct exec_spec *spec, size_t index)
{
	return index ? &spec->extra[index - 1].fd : &spec->in;
}

int launch_hold(struct launch *launch)
{
	int error = 0;

	/* After a failure the rest stays the request's alone. */
	for (size_t i = 0; i <= launch->spec.extra_count; i++) {
		int *fd = held_fd(&launch->spec, i);

		if (*fd >= 0)
			*fd = error ? -1 : dup_cloexec(*fd);
		error = *fd < -1 ? *fd : error;
	}
	launch->held = true;
	return error;
}

/* The numbers stay: they say what is in the slots. */
static void let_go(struct launch *launch)
{
	for (size_t i = 0; launch->held && i <= launch->spec.extra_count; i++)
		if (*held_fd(&launch->spec, i) >= 0)
			close(*held_fd(&launch->spec, i));
	launch->held = false;
}

static bool gone(const struct launch *launch)
{
	return !__atomic_load_n(&launch->alive, __ATOMIC_ACQUIRE);
}

static void await_change(uint32_t *word, uint32_t from, uint64_t ns)
{
	const struct timespec time = {.tv_sec = (time_t)(ns / NS_PER_S),
				      .tv_nsec = (long)(ns % NS_PER_S)};

	if (__atomic_load_n(word, __ATOMIC_ACQUIRE) == from)
		raw(futex, word, FUTEX_WAIT, from, &time);
}

static void joiner_ended(struct source *source, uint32_t)
{
	struct launch *launch = container_of(source, struct launch, source);

	if (launch->pidfd < 0 || !gone(launch))
		return;
	loop_remove(launch->pidfd);
	close_quietly(&launch->pidfd);
	if (launch->exec)
		exec_launched(launch->exec);
	else
		launch_release(launch);
}

/*
 * A command begins in our memory, so that the kernel counts the most that this ever was as the
 * command's own peak: of whatever another sandbox has made us hold.
 */
static void forget_peak(void)
{
	if (worker.swollen)
		worker.swollen = write_file_at(worker.proc, "self/clear_refs", "5") < 0;
}

bool launch_begin(struct launch *launch, uint64_t patience_ns)
{
	struct clone_args args = {
		.flags = CLONE_VM | CLONE_FILES | CLONE_PIDFD | CLONE_CHILD_CLEARTID,
		.pidfd = (uint64_t)(uintptr_t)&launch->pidfd,
		.child_tid = (uint64_t)(uintptr_t)&launch->alive,
		STACK(launch, 0),
	};
	long pid;

	forget_peak();
	worker.started_ns = now_ns();
	launch->alive = 1;
	pid = clone_onto_stack(&args, joiner, launch);
	if (pid < 0) {
		launch->alive = 0;
		launch->pidfd = -1;
		launch_failed(launch, "fork", (int)pid);
	} else {
		launch->joiner = (pid_t)pid;
		if (patience_ns)
			await_change(&launch->alive, 1, patience_ns);
		/* So far nobody else has a say in how long it takes. */
		while (!gone(launch) && !__atomic_load_n(&launch->apart, __ATOMIC_ACQUIRE))
			await_change(&launch->apart, 0, 10 * NS_PER_MS);
	}
	let_go(launch);
	if (gone(launch)) {
		close_quietly(&launch->pidfd);
		return true;
	}
	launch->source.ready = joiner_ended;
	if (loop_add(launch->pidfd, &launch->source, EPOLLIN) == 0)
		return false;
	/* Without memory for that there is but one way left to learn of its end. */
	while (!gone(launch))
		await_change(&launch->alive, 1, NS_PER_S);
	close_quietly(&launch->pidfd);
	return true;
}

pid_t launch_pid(const struct launch *launch)
{
	return __atomic_load_n(&launch->pid, __ATOMIC_ACQUIRE);
}

bool launch_close(struct launch *launch)
{
	uint32_t gate = GATE_OPEN;

	return __atomic_compare_exchange_n(&launch->gate, &gate, GATE_CLOSED, false, __ATOMIC_SEQ_CST,
					   __ATOMIC_SEQ_CST) ||
	       gate == GATE_CLOSED;
}

pid_t launch_result(const struct launch *launch, const char **stage)
{
	*stage = launch->error ? launch->stage : "launch";
	if (launch->error)
		return launch->error;
	if (__atomic_load_n(&launch->gate, __ATOMIC_SEQ_CST) == GATE_CLOSED)
		return -ETIMEDOUT;
	*stage = "fork";
	return launch->pid > 0 ? launch->pid : -ECHILD;
}

void launch_release(struct launch *launch)
{
	launch->exec = NULL;
	if (!gone(launch) || launch->pidfd >= 0)
		return; /* joiner_ended comes again */
	let_go(launch);
	if (!launch->joiner) {
		give_back(launch);
		return;
	}
	launch->next = ended;
	ended = launch;
}

/* They have left our memory, but may not be through with their exit. */
void launches_reap(void)
{
	for (struct launch **link = &ended; *link;) {
		struct launch *launch = *link;

		if (raw(wait4, launch->joiner, NULL, WNOHANG | __WALL, NULL) == 0) {
			link = &launch->next;
			continue;
		}
		*link = launch->next;
		give_back(launch);
	}
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
	static uint8_t stack[16 << 10] __attribute__((aligned(16)));
	struct clone_args args = {
		.flags = CLONE_VM | CLONE_VFORK,
		.exit_signal = SIGCHLD,
		.stack = (uint64_t)(uintptr_t)stack,
		.stack_size = sizeof(stack),
	};

	for (size_t i = 0; i < count; i++) {
		uint64_t began = now_ns();
		long pid = clone_onto_stack(&args, measured, (void *)(uintptr_t)path);
		int status;

		if (pid < 0)
			return (int)pid;
		while (waitpid((pid_t)pid, &status, 0) < 0)
			if (errno != EINTR)
				return -errno;
		durations[i] = now_ns() - began;
		if (status)
			return WIFEXITED(status) && WEXITSTATUS(status) == 127 ? -ENOENT : -ECHILD;
	}
	return 0;
}
