/* The start of a command: what it needs, its turn among those of its sandbox, its launch. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <termios.h>

#include "kernel.h"
#include "spawner.h"

#define DEVPTS_MAGIC 0x1cd1
/* Of one sandbox, running or with leftovers; and how many descriptors each may take. */
#define EXECS_MAX 1024u
#define EXECS_ALWAYS 64u
#define EXEC_FILES 4u
/* Of one sandbox at a time. */
#define LAUNCHES_MAX 32u
/*
 * So long the worker waits for a launch, which mostly takes a fraction of it: cheaper than to be
 * told. After one that took longer it does not wait for the next ones of that sandbox.
 */
#define PATIENCE_NS NS_PER_MS
#define SLOW_LAUNCHES 8u
/* So long a launch may take; a sandbox that is throttled much may need seconds. */
#define LAUNCH_MAX_NS (60 * NS_PER_S)
#define KILL_WAIT_MAX_MS 1000u
#ifndef TIOCGPTPEER
#define TIOCGPTPEER _IO('T', 0x41)
#endif

/* A terminal of the sandbox's own, reached by descriptor; the command's end into its slot. */
static int make_terminal(const struct exec_spec *spec)
{
	struct winsize size = {.ws_row = spec->rows, .ws_col = spec->cols};
	auto_close int master = -1, slave = -1;
	struct statfs fs;
	int unlock = 0;

	TRY(master = sys_openat2(spec->sandbox->root, "dev/pts/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC,
				 RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS | RESOLVE_NO_SYMLINKS));
	if (fstatfs(master, &fs) < 0 || fs.f_type != DEVPTS_MAGIC)
		return -EPERM;
	TRY(check(ioctl(master, TIOCSPTLCK, &unlock)));
	TRY(check(ioctl(master, TIOCSWINSZ, &size)));
	TRY(slave = check(ioctl(master, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC)));
	TRY(slot_put(slave, SLOT_OUT));
	TRY(check(fcntl(master, F_SETFL, O_NONBLOCK)));
	return take_fd_from(&master);
}

/* It belongs to whom it is opened by. Returns our end. */
static int open_terminal(const struct exec_spec *spec)
{
	int master;

	act_as(spec->sandbox->id_base + spec->uid, spec->sandbox->id_base + 5);
	master = make_terminal(spec);
	act_as(0, 0);
	return master;
}

/* A pipe that the command may open again by name: it belongs to the command's user. Returns our end. */
static int open_pipe(const struct exec_spec *spec, enum slot slot)
{
	uint32_t base = spec->sandbox->id_base;
	auto_close int ours = -1, theirs = -1;
	int ends[2];

	TRY(check(pipe2(ends, O_CLOEXEC)));
	ours = ends[0];
	theirs = ends[1];
	TRY(slot_put(theirs, slot));
	TRY(check(fchown(theirs, base + spec->uid, base + spec->gid)));
	TRY(check(fcntl(ours, F_SETFL, O_NONBLOCK)));
	return take_fd_from(&ours);
}

static int open_streams(struct exec *exec, const struct exec_spec *spec)
{
	int out, err = -1;

	TRY(out = exec->pty ? open_terminal(spec) : open_pipe(spec, SLOT_OUT));
	stream_open(&exec->out, exec, out);
	if (spec->flags & (EXEC_FLAG_PTY | EXEC_FLAG_MERGE_STDERR))
		TRY(slot_put(SLOT_OUT, SLOT_ERR));
	else
		TRY(err = open_pipe(spec, SLOT_ERR));
	stream_open(&exec->err, exec, err);
	return 0;
}

static int fill_slots(const struct exec_spec *spec)
{
	struct stat st;

	TRY(slot_put(spec->sandbox->pidfd, SLOT_PIDFD));
	if (spec->in >= 0) {
		/* So that /dev/stdin can be opened by name. */
		if (fstat(spec->in, &st) == 0 && S_ISFIFO(st.st_mode))
			(void)!fchown(spec->in, spec->sandbox->id_base + spec->uid,
				      spec->sandbox->id_base + spec->gid);
		TRY(slot_put(spec->in, SLOT_IN));
	}
	return spec->status >= 0 ? slot_put(spec->status, SLOT_STATUS) : 0;
}

static void clear_slots(const struct exec_spec *spec)
{
	slot_clear(SLOT_OUT);
	slot_clear(SLOT_ERR);
	slot_clear(SLOT_PIDFD);
	slot_clear(SLOT_CGROUP);
	if (spec->in >= 0)
		slot_clear(SLOT_IN);
	if (spec->status >= 0)
		slot_clear(SLOT_STATUS);
}

/* --- one launch ------------------------------------------------------------------------ */

/* What it needs, into the slots. */
static int prepare(struct exec *exec, const struct exec_spec *spec, const char **stage)
{
	auto_close int cgroup = -1;

	*stage = exec->pty ? "terminal" : "output";
	TRY(open_streams(exec, spec));
	*stage = "cgroup";
	TRY(cgroup = cgroup_exec_create(exec));
	TRY(slot_put(cgroup, SLOT_CGROUP));
	*stage = "descriptors";
	return fill_slots(spec);
}

/*
 * Any step fails with anything once pid 1 exits, as that takes the sandbox's namespaces, its mounts
 * and its processes along, and the helpers of a launch; and long before we are told.
 */
static void not_started(struct exec *exec, int error, const char *stage)
{
	if (sandbox_ends(exec->sandbox))
		exec_failed(exec, ESRCH, "sandbox", "it is gone");
	else
		exec_failed(exec, -error, stage, "");
}

static void begin(struct exec *exec)
{
	const struct exec_spec *spec = launch_spec(exec->launch);
	struct sandbox *sandbox = exec->sandbox;
	const char *stage;
	bool over = false;
	int error = prepare(exec, spec, &stage);

	if (!error) {
		sandbox->launches++;
		over = launch_begin(exec->launch, sandbox->slow ? 0 : PATIENCE_NS);
		if (!over)
			sandbox->slow = SLOW_LAUNCHES;
		else if (sandbox->slow)
			sandbox->slow--;
	}
	clear_slots(spec);
	if (over) {
		exec_launched(exec);
	} else if (error) {
		exec_unlaunch(exec);
		not_started(exec, error, stage);
	}
}

/* --- turns ------------------------------------------------------------------------------ */

/* A launch that ends at once comes here again: the one that is here already goes on. */
static void next_turns(struct sandbox *sandbox)
{
	if (sandbox->taking_turns)
		return;
	sandbox->taking_turns = true;
	while (sandbox->state == SANDBOX_LIVE && !ring_is_empty(&sandbox->queue) &&
	       sandbox->launches < LAUNCHES_MAX) {
		struct exec *exec = container_of(sandbox->queue.next, struct exec, queued);

		unlink_one(&exec->queued);
		begin(exec);
	}
	sandbox->taking_turns = false;
}

void exec_unlaunch(struct exec *exec)
{
	unlink_one(&exec->queued);
	launch_release(exec->launch);
	exec->launch = NULL;
}

void exec_launched(struct exec *exec)
{
	struct sandbox *sandbox = exec->sandbox;
	bool tell = launch_spec(exec->launch)->flags & EXEC_FLAG_STARTED;
	const char *stage;
	pid_t pid = launch_result(exec->launch, &stage);

	exec_unlaunch(exec);
	sandbox->launches--;
	if (pid >= 0)
		exec_started(exec, pid, tell);
	else
		not_started(exec, pid, stage);
	next_turns(sandbox);
}

static void set_timer(struct exec *exec)
{
	uint64_t limit = now_ns() + LAUNCH_MAX_NS;

	timer_set(&exec->timer, exec->deadline && exec->deadline < limit ? exec->deadline : limit);
}

void exec_overdue(struct exec *exec)
{
	uint64_t now = now_ns();
	bool late = exec->deadline && now >= exec->deadline;

	if (exec->killed) {
		unsigned wait_ms = 50u << (exec->tries < 5 ? exec->tries : 5);

		/* The command may have been born since. */
		exec->tries++;
		cgroup_exec_kill(exec);
		timer_set(&exec->timer,
			  now + (wait_ms < KILL_WAIT_MAX_MS ? wait_ms : KILL_WAIT_MAX_MS) * NS_PER_MS);
	} else if (is_queued(exec) && late) {
		exec_unlaunch(exec);
		exec_failed(exec, ETIMEDOUT, "launch", "its turn did not come before its deadline");
	} else if (late) {
		exec_kill(exec, REASON_DEADLINE);
	} else if (!is_queued(exec) && launch_close(exec->launch)) {
		exec_kill(exec, REASON_INFRASTRUCTURE);
	} else {
		set_timer(exec);
	}
}

/* --- EXEC ------------------------------------------------------------------------------- */

/* Whether one more could take the descriptors that other sandboxes need. */
static bool too_many(const struct sandbox *sandbox)
{
	uint64_t quarter = worker.files / 4 / EXEC_FILES;
	uint64_t most = quarter < EXECS_MAX ? quarter : EXECS_MAX;
	uint64_t always = most / 4 < EXECS_ALWAYS ? most / 4 : EXECS_ALWAYS;

	if (sandbox->exec_count >= most)
		return true;
	return sandbox->exec_count >= always && worker.execs * EXEC_FILES + worker.kept_files > worker.files / 2;
}

int exec_start(struct request *r, const struct exec_spec *spec)
{
	struct sandbox *sandbox = spec->sandbox;
	struct kept *kept = NULL;
	struct exec *exec;
	char name[32];
	int error;

	if (sandbox->state != SANDBOX_LIVE)
		return fail(r, ESRCH, "sandbox", "it is gone");
	if (exec_find(spec->id))
		return fail(r, EEXIST, "exec", "this id is in use");
	if (too_many(sandbox))
		return fail(r, EAGAIN, "execs",
			    "too many commands of this sandbox run or have left processes; end some");
	snprintf(name, sizeof(name), "exec.%" PRIu64, spec->id);
	if (spec->keep.note && !(kept = keep(name, KEPT_EXEC, &spec->keep, &error)))
		return fail(r, -error, "keep", "");
	exec = exec_new(r, spec);
	if (!exec) {
		keep_drop(name);
		return fail(r, ENOMEM, "memory", "");
	}
	if (kept)
		keep_exec(kept, exec);
	set_timer(exec);
	link_last(&sandbox->queue, &exec->queued);
	next_turns(sandbox);
	return 0;
}
