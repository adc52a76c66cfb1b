/*
 * Start a command in a sandbox, through two processes that share our memory:
 *
 *   joiner   born among the sandbox's processes; closes all that is ours, then joins the other
 *            namespaces of pid 1 but for the user's. What it leaves when it ends is pid 1's
 *   command  sets itself up, joins the user namespace, and executes
 *
 * The joiner waits for the command in vfork. We do not: from the moment on that it has its own
 * table of descriptors the launch goes on beside us, for as long as the sandbox makes it take.
 * Each touches only its own struct launch and stacks, and no function that sets errno.
 *
 * As long as they are not of the sandbox's user namespace, nobody in it can signal them: neither
 * a SIGKILL to everything, after which the command would still use memory that we use again, nor
 * a SIGSTOP. Only the command ever is, for the last of its way; and only it enters the limits of
 * memory and processor: the joiner is never throttled, and never the OOM killer's choice, nor is
 * the command while it is in vfork, as we would have to die with it for its memory.
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
#include "request.h"

#define STACK_SIZE (64u << 10)
#define SPARES_MAX 64u
#define STRINGS_KEPT 4096u
#define OTHER_NAMESPACES                                                                             \
	(CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS)

static struct launch *spares, *ended;
static unsigned spare_count;

/* --- the joiner ---------------------------------------------------------------------- */

#define STACK(launch, index)                                                                       \
	.stack = (uint64_t)(uintptr_t)((launch)->stacks + (index)*STACK_SIZE),                     \
	.stack_size = STACK_SIZE

/* Here the kernel holds a new process to the limit: who comes from elsewhere may go beyond. */
static int enter_pids(const struct launch *launch)
{
	int fd, done;

	if (!launch->limited[PIDS])
		return 0;
	TRY(fd = open_tasks(launch, PIDS));
	done = (int)raw(write, fd, "0", 1);
	raw(close, fd);
	return done;
}

static int start_command(struct launch *launch)
{
	struct clone_args args = {
		.flags = CLONE_VM | CLONE_VFORK | CLONE_FILES | CLONE_CGROUP | CLONE_PARENT_SETTID |
			 CLONE_CHILD_CLEARTID,
		.exit_signal = SIGCHLD,
		.cgroup = SLOT_CGROUP,
		.parent_tid = (uint64_t)(uintptr_t)&launch->pid,
		.child_tid = (uint64_t)(uintptr_t)&launch->running,
		STACK(launch, 1),
	};
	int pid;

	launch->running = 1;
	pid = (int)clone_onto_stack(&args, command_run, launch);
	/* Pid 1 shall not hear of what never was a command. */
	if (pid > 0 && launch->error)
		raw(wait4, pid, NULL, __WALL, NULL);
	return pid;
}

static void tell(uint32_t *word)
{
	__atomic_store_n(word, 1, __ATOMIC_RELEASE);
	raw(futex, word, FUTEX_WAKE, 1);
}

static int join(struct launch *launch)
{
	int error = (int)raw(close_range, SLOT_END, ~0u, CLOSE_UNSHARE);

	tell(&launch->apart);
	launch->stage = "descriptors";
	TRY(error);
	raw(close, 2);
	launch->stage = "join";
	TRY((int)raw(setns, SLOT_PIDFD, OTHER_NAMESPACES));
	launch->stage = "enter cgroups";
	TRY(enter_pids(launch));
	launch->stage = "fork";
	return start_command(launch);
}

static int joiner(void *context)
{
	struct launch *launch = context;
	int error = join(launch);

	/* Else it is the command's to say. */
	if (error < 0)
		launch->error = error;
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
	size_t room = (argc + envc + 2) * sizeof(char *) + size;
	char **pointers, *at;

	if (room > launch->strings_room) {
		free(launch->strings);
		launch->strings_room = room < STRINGS_KEPT ? STRINGS_KEPT : room;
		launch->strings = malloc(launch->strings_room);
	}
	if (!launch->strings) {
		launch->strings_room = 0;
		return -ENOMEM;
	}
	pointers = (char **)(void *)launch->strings;
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
	launch = calloc(1, sizeof(*launch));
	stacks = mmap(NULL, 2 * STACK_SIZE, PROT_READ | PROT_WRITE,
		      MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK | MAP_NORESERVE, -1, 0);
	if (!launch || stacks == MAP_FAILED) {
		free(launch);
		if (stacks != MAP_FAILED)
			munmap(stacks, 2 * STACK_SIZE);
		return NULL;
	}
	launch->stacks = stacks;
	return launch;
}

static void give_back(struct launch *launch)
{
#ifdef __SANITIZE_ADDRESS__
	/* Who was killed in the middle of a function left marks of its frame. */
	__asan_unpoison_memory_region(launch->stacks, 2 * STACK_SIZE);
#endif
	if (launch->strings_room > STRINGS_KEPT) {
		free(launch->strings);
		launch->strings = NULL;
		launch->strings_room = 0;
	}
	if (spare_count == SPARES_MAX) {
		munmap(launch->stacks, 2 * STACK_SIZE);
		free(launch->strings);
		free(launch);
		return;
	}
	launch->next = spares;
	spares = launch;
	spare_count++;
}

struct launch *launch_new(struct request *r, const struct exec_spec *spec, struct exec *exec)
{
	const struct sandbox *sandbox = spec->sandbox;
	struct launch *launch = take_spare();

	if (!launch)
		return NULL;
	*launch = (struct launch){
		.exec = exec,
		.spec = *spec,
		.stacks = launch->stacks,
		.strings = launch->strings,
		.strings_room = launch->strings_room,
		.pidfd = -1,
		.pty = spec->flags & EXEC_FLAG_PTY,
		.no_new_privs = sandbox->no_new_privs,
	};
	for (int i = 0; i < CONTROLLERS; i++)
		launch->limited[i] = worker.cgroups.v1[i] >= 0 && sandbox->limits.of[i];
	snprintf(launch->tasks, sizeof(launch->tasks), "%s/tasks", sandbox->id);
	if (copy_strings(launch, spec) < 0) {
		give_back(launch);
		return NULL;
	}
	launch->spec.in = keep_fd(r, spec->in);
	launch->spec.status = keep_fd(r, spec->status);
	launch->held = true;
	return launch;
}

const struct exec_spec *launch_spec(const struct launch *launch)
{
	return &launch->spec;
}

/* The numbers stay: they say what is in the slots. */
static void let_go(struct launch *launch)
{
	if (launch->held && launch->spec.in >= 0)
		close(launch->spec.in);
	if (launch->held && launch->spec.status >= 0)
		close(launch->spec.status);
	launch->held = false;
}

/* Its joiner has left our memory. */
static bool over(const struct launch *launch)
{
	return !__atomic_load_n(&launch->alive, __ATOMIC_ACQUIRE);
}

/*
 * So has the command. If the joiner was killed, as by the end of pid 1, it may still be there;
 * unless there is none, and nobody to clear the flag.
 */
static bool gone(const struct launch *launch)
{
	return over(launch) && !(__atomic_load_n(&launch->running, __ATOMIC_ACQUIRE) && launch->pid);
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

	if (launch->pidfd < 0 || !over(launch))
		return;
	loop_close(&launch->pidfd);
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

/* Begin the joiner, as one of the sandbox's processes. Returns its pid or -errno. */
static int begin_inside(struct launch *launch)
{
	struct clone_args args = {
		.flags = CLONE_VM | CLONE_FILES | CLONE_CHILD_CLEARTID,
		.child_tid = (uint64_t)(uintptr_t)&launch->alive,
		STACK(launch, 0),
	};
	pid_t pid;

	launch->stage = "join";
	TRY(check(setns(SLOT_PIDFD, CLONE_NEWPID)));
	launch->stage = "fork";
	launch->alive = 1;
	pid = (pid_t)clone_onto_stack(&args, joiner, launch);
	if (setns(worker.home_pids, CLONE_NEWPID) < 0)
		fatal("leave a sandbox's processes");
	if (pid < 0)
		launch->alive = 0;
	else
		launch->joiner = pid;
	return pid;
}

/* Be told when it is over. Returns 0 or -errno. */
static int watch(struct launch *launch)
{
	TRY(launch->pidfd = check(syscall(SYS_pidfd_open, launch->joiner, 0)));
	launch->source.ready = joiner_ended;
	return loop_add(launch->pidfd, &launch->source, EPOLLIN);
}

bool launch_begin(struct launch *launch, uint64_t patience_ns)
{
	int pid;

	forget_peak();
	pid = begin_inside(launch);
	if (pid < 0)
		launch->error = pid;
	else if (patience_ns)
		await_change(&launch->alive, 1, patience_ns);
	/* So far nobody else has a say in how long it takes. */
	while (!over(launch) && !__atomic_load_n(&launch->apart, __ATOMIC_ACQUIRE))
		await_change(&launch->apart, 0, 10 * NS_PER_MS);
	let_go(launch);
	if (!over(launch) && watch(launch) == 0)
		return false;
	/* Without memory for that there is but one way left to learn of its end. */
	while (!over(launch))
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
	if (!over(launch) || launch->pidfd >= 0)
		return; /* joiner_ended comes again */
	let_go(launch);
	launch->next = ended;
	ended = launch;
}

bool launches_reap(void)
{
	for (struct launch **link = &ended; *link;) {
		struct launch *launch = *link;

		/* It has left our memory, but may not be through with its exit. */
		if (launch->joiner && raw(wait4, launch->joiner, NULL, WNOHANG | __WALL, NULL) != 0)
			launch->joiner = 0;
		if (launch->joiner || !gone(launch)) {
			link = &launch->next;
			continue;
		}
		*link = launch->next;
		give_back(launch);
	}
	return ended;
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
		TRY(check(waitpid((pid_t)pid, &status, 0)));
		durations[i] = now_ns() - began;
		if (status)
			return WIFEXITED(status) && WEXITSTATUS(status) == 127 ? -ENOENT : -ECHILD;
	}
	return 0;
}
