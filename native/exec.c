/* One command from EXEC to the last of its processes. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <termios.h>
#include <time.h>

#include "kernel.h"
#include "spawner.h"

#define BUCKETS 1024u
#define DEVPTS_MAGIC 0x1cd1
#define DEATH_TRIES 200u
/* Of one sandbox, running or with leftovers; and how many descriptors each may take. */
#define EXECS_MAX 1024u
#define EXECS_ALWAYS 64u
#define EXEC_FILES 4u
#ifndef TIOCGPTPEER
#define TIOCGPTPEER _IO('T', 0x41)
#endif

static struct exec *table[BUCKETS];
static struct exec *dead;

struct exec *exec_find(uint64_t id)
{
	struct exec *exec = table[id % BUCKETS];

	while (exec && exec->id != id)
		exec = exec->next;
	return exec;
}

struct exec *exec_of_pid(struct sandbox *sandbox, pid_t pid)
{
	struct exec *exec = sandbox->execs;

	while (exec && (exec->ended || exec->pid != pid))
		exec = exec->sibling;
	return exec;
}

static void list(struct exec *exec)
{
	exec->next = table[exec->id % BUCKETS];
	table[exec->id % BUCKETS] = exec;
	exec->sibling = exec->sandbox->execs;
	exec->sandbox->execs = exec;
	exec->listed = true;
	exec->sandbox->exec_count++;
	worker.execs++;
}

static void answer_progress(struct exec *exec, uint64_t request);

/* Drop it; what waits for news of it is told that there will be none. */
static void forget(struct exec *exec)
{
	struct exec **link;

	if (!exec->listed)
		return;
	for (link = &table[exec->id % BUCKETS]; *link != exec; link = &(*link)->next)
		;
	*link = exec->next;
	for (link = &exec->sandbox->execs; *link != exec; link = &(*link)->sibling)
		;
	*link = exec->sibling;
	exec->listed = false;
	exec->sandbox->exec_count--;
	worker.execs--;
	timer_cancel(&exec->timer);
	stream_close(&exec->out);
	stream_close(&exec->err);
	for (unsigned i = 0; i < exec->watchers; i++)
		answer_progress(exec, exec->watcher[i].request);
	if (exec->watch >= 0)
		inotify_forget(exec->watch);
	exec->dead = dead;
	dead = exec;
}

void execs_free_dead(void)
{
	while (dead) {
		struct exec *next = dead->dead;

		free(dead);
		dead = next;
	}
}

/* --- news ---------------------------------------------------------------------------- */

static uint64_t progress_flags(const struct exec *exec)
{
	return (exec->out.eof ? PROGRESS_FLAG_STDOUT_EOF : 0u) |
	       (exec->err.eof ? PROGRESS_FLAG_STDERR_EOF : 0u) |
	       (exec->ended ? PROGRESS_FLAG_ENDED : 0u);
}

static void build_progress(struct builder *b, const struct exec *exec)
{
	uint64_t numbers[] = {exec->out.total, exec->err.total, progress_flags(exec),
			      exec->spool_bytes};

	build_u64s(b, TAG_PROGRESS_NUMBERS, numbers, ARRAY_LEN(numbers));
}

static void answer_progress(struct exec *exec, uint64_t request)
{
	struct builder *b = answer_begin(TYPE_PROGRESS, request);

	build_progress(b, exec);
	answer_send(b);
}

static bool is_news(const struct exec *exec, const struct watcher *watcher)
{
	return exec->out.total > watcher->seen_out || exec->err.total > watcher->seen_err ||
	       (exec->out.eof && exec->err.eof) || exec->ended;
}

static void tell_watchers(struct exec *exec)
{
	unsigned kept = 0;

	for (unsigned i = 0; i < exec->watchers; i++) {
		struct watcher *watcher = &exec->watcher[i];

		if (is_news(exec, watcher))
			answer_progress(exec, watcher->request);
		else
			exec->watcher[kept++] = *watcher;
	}
	exec->watchers = kept;
}

void exec_progress(struct exec *exec)
{
	uint64_t total = exec->out.total + exec->err.total;

	if (exec->kill_bytes && total > exec->kill_bytes && !exec->ended && !exec->killed)
		exec_kill(exec, REASON_OUTPUT_LIMIT);
	if (exec->watchers)
		tell_watchers(exec);
}

/* --- the end ------------------------------------------------------------------------- */

struct leftovers {
	const struct exec *exec;
	struct builder *b;
};

static void add_leftover(pid_t host_pid, void *context)
{
	struct leftovers *leftovers = context;
	struct process process;
	uint8_t *at;

	if (process_read(leftovers->exec, host_pid, &process) < 0)
		return;
	at = build_space(leftovers->b, TAG_LEFTOVER, 16 + process.name_len);
	if (!at)
		return;
	put_u64(at, (uint64_t)host_pid);
	put_u64(at + 8, (uint64_t)process.pid);
	memcpy(at + 16, process.name, process.name_len);
}

static void build_stream(struct builder *b, struct stream *stream, uint16_t data, uint16_t fd)
{
	if (stream->spool >= 0)
		build_fd(b, fd, stream->spool);
	else
		build_bytes(b, data, stream->held, stream->held_len);
	if (stream->spool_errno)
		build_u64s(b, TAG_SPOOL_ERRNO,
			   (uint64_t[]){data == TAG_STDOUT_DATA ? 1u : 2u,
					(uint64_t)stream->spool_errno},
			   2);
}

static void answer_end(struct exec *exec, int status, enum reason reason, uint64_t ooms,
		       const struct usage *usage)
{
	bool signalled = WIFSIGNALED(status);
	uint64_t took = clock_ns(CLOCK_MONOTONIC) - exec->began_ns;
	uint64_t numbers[14] = {
		signalled ? 2u : 1u,
		(uint64_t)(signalled ? WTERMSIG(status) : WEXITSTATUS(status)),
		reason,
		exec->began_real_ns,
		exec->began_real_ns + took,
		took,
		usage->user_us,
		usage->system_us,
		usage->peak_bytes,
		usage->read_bytes,
		usage->write_bytes,
		ooms,
		exec->out.total,
		exec->err.total,
	};
	struct builder *b = answer_begin(TYPE_EXEC_END, exec->request);
	uint8_t *at = build_space(b, TAG_END_NUMBERS, sizeof(numbers) + 64);

	for (size_t i = 0; at && i < ARRAY_LEN(numbers); i++)
		put_u64(at + 8 * i, numbers[i]);
	if (at) {
		sha256_digest(&exec->out.sha, at + sizeof(numbers));
		sha256_digest(&exec->err.sha, at + sizeof(numbers) + 32);
	}
	build_stream(b, &exec->out, TAG_STDOUT_DATA, TAG_STDOUT_FD);
	build_stream(b, &exec->err, TAG_STDERR_DATA, TAG_STDERR_FD);
	if (!exec->cgroup_gone) {
		struct leftovers leftovers = {exec, b};
		char name[32];

		cgroup_exec_name(exec, "", name, sizeof(name));
		cgroup_pids(exec->sandbox, name, add_leftover, &leftovers);
	}
	answer_send(b);
}

static enum reason why(const struct exec *exec, int status, uint64_t ooms)
{
	if (exec->killed && WIFSIGNALED(status))
		return exec->cause;
	if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL && ooms)
		return REASON_OOM;
	return WIFSIGNALED(status) ? REASON_SIGNAL : REASON_EXIT;
}

/* Follow what it left running until its cgroup is empty. */
static void keep_leftovers(struct exec *exec)
{
	exec->watch = cgroup_exec_watch(exec);
	/* It may have become empty before the watch began; and a watch may be refused. */
	timer_set(&exec->timer,
		  clock_ns(CLOCK_MONOTONIC) + (exec->watch < 0 ? 100 : 20) * NS_PER_MS);
}

static void conclude(struct exec *exec)
{
	uint64_t now_ooms = cgroup_ooms(exec->sandbox);
	uint64_t ooms = now_ooms - exec->ooms_before;
	struct usage used = exec->usage;

	exec->sandbox->ooms_seen = now_ooms;
	timer_cancel(&exec->timer);
	stream_drain(&exec->out);
	stream_drain(&exec->err);
	cgroup_exec_usage(exec, &used);
	exec->ended = true;
	exec->cgroup_gone = cgroup_exec_remove(exec) == 0;
	exec->tries = 0;
	answer_end(exec, exec->status, why(exec, exec->status, ooms), ooms, &used);
	tell_watchers(exec);
	if (exec->cgroup_gone) {
		struct sandbox *sandbox = exec->sandbox;

		forget(exec);
		sandbox_kill_progress(sandbox);
	} else {
		keep_leftovers(exec);
	}
}

/* A whole tree that was killed ends with the last of it, not with the leader. */
static void conclude_when_dead(struct exec *exec)
{
	if (exec->killed && exec->tries++ < DEATH_TRIES && cgroup_exec_populated(exec))
		timer_set(&exec->timer, clock_ns(CLOCK_MONOTONIC) +
						(exec->tries < 20 ? 1 : 20) * NS_PER_MS);
	else
		conclude(exec);
}

void exec_leader_ended(struct exec *exec, int status, const struct usage *usage)
{
	exec->leader_gone = true;
	exec->pid = 0; /* another's from now on */
	exec->status = status;
	exec->usage = *usage;
	exec->tries = 0;
	conclude_when_dead(exec);
}

void exec_sandbox_gone(struct exec *exec)
{
	static const struct usage unknown;
	uint64_t ooms = cgroup_ooms(exec->sandbox) - exec->ooms_before;

	if (!exec->ended) {
		stream_drain(&exec->out);
		stream_drain(&exec->err);
		exec->ended = true;
		exec->cgroup_gone = true; /* no process is left; it goes with the sandbox's */
		if (exec->leader_gone)
			answer_end(exec, exec->status, why(exec, exec->status, ooms), ooms, &exec->usage);
		else
			answer_end(exec, SIGKILL, REASON_SANDBOX_GONE, ooms, &unknown);
	}
	forget(exec);
}

void exec_check_cgroup(struct exec *exec)
{
	struct sandbox *sandbox = exec->sandbox;

	if (!exec->ended || exec->cgroup_gone)
		return;
	if (cgroup_exec_remove(exec) < 0) {
		if (exec->killed || exec->watch < 0 || exec->tries < 10)
			timer_set(&exec->timer, clock_ns(CLOCK_MONOTONIC) +
							(exec->tries++ < 20 ? 2 : 100) * NS_PER_MS);
		return;
	}
	exec->cgroup_gone = true;
	stream_drain(&exec->out);
	stream_drain(&exec->err);
	forget(exec);
	sandbox_kill_progress(sandbox);
}

/*
 * All of it has been killed, yet pid 1 has not heard of the leader: a tracer in the sandbox
 * holds its exit back. Its cgroup says that nothing of it runs any more.
 */
static void check_killed(struct exec *exec)
{
	static const struct usage unknown;

	if (!cgroup_exec_populated(exec) && exec->tries++ >= 3) {
		exec_leader_ended(exec, SIGKILL, &unknown);
		return;
	}
	timer_set(&exec->timer, clock_ns(CLOCK_MONOTONIC) + 50 * NS_PER_MS);
}

void exec_kill(struct exec *exec, enum reason cause)
{
	if (!exec->killed)
		exec->cause = cause;
	exec->killed = true;
	exec->tries = 0;
	if (!exec->cgroup_gone)
		cgroup_exec_kill(exec);
	timer_set(&exec->timer, clock_ns(CLOCK_MONOTONIC) + (exec->ended ? 1 : 50) * NS_PER_MS);
}

static void timer_fired(struct timer *timer)
{
	struct exec *exec = container_of(timer, struct exec, timer);

	if (exec->ended)
		exec_check_cgroup(exec);
	else if (exec->leader_gone)
		conclude_when_dead(exec);
	else if (exec->killed)
		check_killed(exec);
	else
		exec_kill(exec, REASON_DEADLINE);
}

void exec_cgroup_event(int watch)
{
	for (size_t i = 0; i < BUCKETS; i++)
		for (struct exec *exec = table[i]; exec; exec = exec->next)
			if (exec->watch == watch) {
				exec_check_cgroup(exec);
				return;
			}
}

/* --- the start ----------------------------------------------------------------------- */

/* Both ends of a terminal of the sandbox's own, reached by descriptor. */
static int open_terminal(const struct exec_spec *spec, int *master, int *slave)
{
	struct sandbox *sandbox = spec->sandbox;
	struct winsize size = {.ws_row = spec->rows, .ws_col = spec->cols};
	struct statfs fs;
	int unlock = 0;
	int error = 0;

	/* The terminal belongs to whom it is opened by. */
	setfsgid(sandbox->id_base + 5);
	setfsuid(sandbox->id_base + spec->uid);
	prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
	*master = sys_openat2(sandbox->root, "dev/pts/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC,
			      RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS | RESOLVE_NO_SYMLINKS);
	if (*master < 0)
		error = -errno;
	else if (fstatfs(*master, &fs) < 0 || fs.f_type != DEVPTS_MAGIC)
		error = -EPERM;
	else if (ioctl(*master, TIOCSPTLCK, &unlock) < 0 ||
		 ioctl(*master, TIOCSWINSZ, &size) < 0 ||
		 (*slave = ioctl(*master, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC)) < 0)
		error = -errno;
	setfsuid(0);
	setfsgid(0);
	prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
	return error;
}

/* A pipe that the command may open again by name: it belongs to the command's user. */
static int open_pipe(const struct exec_spec *spec, int *ours, int *theirs)
{
	int ends[2];

	if (pipe2(ends, O_CLOEXEC) < 0)
		return -errno;
	*ours = ends[0];
	*theirs = ends[1];
	if (fcntl(*ours, F_SETFL, O_NONBLOCK) < 0 ||
	    fchown(*theirs, spec->sandbox->id_base + spec->uid, spec->sandbox->id_base + spec->gid) < 0)
		return -errno;
	return 0;
}

struct ends {
	int out, err; /* ours */
	int slot_out, slot_err; /* the command's */
};

static int open_streams(const struct exec_spec *spec, struct ends *ends)
{
	int error;

	if (spec->flags & EXEC_FLAG_PTY) {
		error = open_terminal(spec, &ends->out, &ends->slot_out);
		if (!error && fcntl(ends->out, F_SETFL, O_NONBLOCK) < 0)
			error = -errno;
		return error;
	}
	error = open_pipe(spec, &ends->out, &ends->slot_out);
	if (error || spec->flags & EXEC_FLAG_MERGE_STDERR)
		return error;
	return open_pipe(spec, &ends->err, &ends->slot_err);
}

static int fill_slots(const struct exec_spec *spec, const struct ends *ends)
{
	int err = ends->slot_err >= 0 ? ends->slot_err : ends->slot_out;
	int error = slot_put(ends->slot_out, SLOT_OUT);

	error = error ? error : slot_put(err, SLOT_ERR);
	error = error ? error : slot_put(spec->sandbox->pidfd, SLOT_PIDFD);
	if (!error && spec->in >= 0) {
		struct stat st;

		/* So that /dev/stdin can be opened by name. */
		if (fstat(spec->in, &st) == 0 && S_ISFIFO(st.st_mode))
			(void)!fchown(spec->in, spec->sandbox->id_base + spec->uid,
				      spec->sandbox->id_base + spec->gid);
		error = slot_put(spec->in, SLOT_IN);
	}
	for (size_t i = 0; i < spec->extra_count && !error; i++)
		error = slot_put(spec->extra[i].fd, SLOT_EXTRA + (enum slot)i);
	return error;
}

static void clear_slots(const struct exec_spec *spec)
{
	slot_clear(SLOT_OUT);
	slot_clear(SLOT_ERR);
	slot_clear(SLOT_PIDFD);
	if (spec->in >= 0)
		slot_clear(SLOT_IN);
	for (size_t i = 0; i < spec->extra_count; i++)
		slot_clear(SLOT_EXTRA + (enum slot)i);
}

/* The command runs: from here on the exec has an end of its own. */
static void started(struct exec *exec, const struct exec_spec *spec, struct ends *ends)
{
	list(exec);
	if (stream_open(&exec->out, exec, ends->out) < 0 ||
	    stream_open(&exec->err, exec, ends->err) < 0)
		exec_kill(exec, REASON_INFRASTRUCTURE);
	else if (spec->deadline_ns)
		timer_set(&exec->timer, exec->began_ns + spec->deadline_ns);
	if (spec->flags & EXEC_FLAG_STARTED) {
		struct builder *b = answer_begin(TYPE_STARTED, exec->request);
		pid_t host = inspect_host_pid(exec->sandbox, exec);
		uint64_t numbers[] = {(uint64_t)host, (uint64_t)exec->pid};

		build_u64s(b, TAG_STARTED_NUMBERS, numbers, ARRAY_LEN(numbers));
		if (spec->flags & EXEC_FLAG_PTY)
			build_fd(b, TAG_PTY_FD, exec->out.fd);
		answer_send(b);
	}
	ends->out = ends->err = -1;
}

static int try_start(struct exec *exec, const struct exec_spec *spec, struct ends *ends,
		     const char **stage)
{
	auto_close int cgroup = -1;
	int error;

	*stage = "output";
	error = open_streams(spec, ends);
	if (error)
		return error;
	*stage = "cgroup";
	cgroup = cgroup_exec_create(exec);
	if (cgroup < 0)
		return cgroup;
	*stage = "descriptors";
	error = fill_slots(spec, ends);
	if (!error) {
		exec->began_ns = clock_ns(CLOCK_MONOTONIC);
		exec->began_real_ns = clock_ns(CLOCK_REALTIME);
		exec->pid = launch(spec, cgroup, stage);
		error = exec->pid < 0 ? exec->pid : 0;
	}
	clear_slots(spec);
	if (error)
		cgroup_exec_remove(exec);
	return error;
}

/* Whether one more could take the descriptors that other sandboxes need. */
static bool too_many(const struct sandbox *sandbox)
{
	uint64_t quarter = worker.files / 4 / EXEC_FILES;
	uint64_t most = quarter < EXECS_MAX ? quarter : EXECS_MAX;
	uint64_t always = most / 4 < EXECS_ALWAYS ? most / 4 : EXECS_ALWAYS;

	if (sandbox->exec_count >= most)
		return true;
	return sandbox->exec_count >= always && worker.execs * EXEC_FILES > worker.files / 2;
}

static struct exec *new_exec(const struct exec_spec *spec)
{
	struct exec *exec = calloc(1, sizeof(*exec));

	if (!exec || timers_reserve() < 0) {
		free(exec);
		return NULL;
	}
	exec->sandbox = spec->sandbox;
	exec->id = spec->id;
	exec->request = spec->request;
	exec->watch = -1;
	exec->out.fd = exec->out.spool = exec->err.fd = exec->err.spool = -1;
	exec->spool_bytes = spec->spool_bytes < SPOOL_MIN ? SPOOL_MIN : spec->spool_bytes;
	exec->inline_bytes = spec->inline_bytes < INLINE_MAX ? spec->inline_bytes : INLINE_MAX;
	exec->kill_bytes = spec->kill_bytes;
	exec->timer.fire = timer_fired;
	return exec;
}

void exec_start(const struct exec_spec *spec)
{
	struct ends ends = {-1, -1, -1, -1};
	const char *stage = "memory";
	struct exec *exec;
	int error;

	if (spec->sandbox->state != SANDBOX_LIVE) {
		answer_error(spec->request, ESRCH, "sandbox", "it is gone");
		return;
	}
	if (exec_find(spec->id)) {
		answer_error(spec->request, EEXIST, "exec", "this id is in use");
		return;
	}
	if (too_many(spec->sandbox)) {
		answer_error(spec->request, EAGAIN, "execs",
			     "too many commands of this sandbox run or have left processes; end some");
		return;
	}
	exec = new_exec(spec);
	if (!exec) {
		answer_error(spec->request, ENOMEM, stage, "");
		return;
	}
	exec->ooms_before = cgroup_ooms(spec->sandbox);
	error = try_start(exec, spec, &ends, &stage);
	if (!error)
		started(exec, spec, &ends);
	else
		answer_error(spec->request, -error, stage, "");
	if (error)
		free(exec);
	close_quietly(&ends.out);
	close_quietly(&ends.err);
	close_quietly(&ends.slot_out);
	close_quietly(&ends.slot_err);
}

/* --- requests about one -------------------------------------------------------------- */

void exec_output(struct exec *exec, uint64_t request)
{
	struct builder *b;
	int error = stream_spool(&exec->out);

	error = error ? error : stream_spool(&exec->err);
	if (error) {
		answer_error(request, -error, "spool", "");
		return;
	}
	b = answer_begin(TYPE_OUTPUT, request);
	build_progress(b, exec);
	build_fd(b, TAG_STDOUT_FD, exec->out.spool);
	build_fd(b, TAG_STDERR_FD, exec->err.spool);
	answer_send(b);
}

void exec_watch(struct exec *exec, uint64_t request, uint64_t seen_out, uint64_t seen_err)
{
	if (exec->watchers == WATCHERS_MAX) {
		answer_error(request, EBUSY, "watch", "too many watch this exec");
		return;
	}
	exec->watcher[exec->watchers++] = (struct watcher){request, seen_out, seen_err};
	tell_watchers(exec);
}

void exec_mark(struct exec *exec, uint64_t request)
{
	stream_drain(&exec->out);
	stream_drain(&exec->err);
	answer_progress(exec, request);
	exec_progress(exec);
}

void exec_forget(struct exec *exec, uint64_t request)
{
	if (!exec->ended) {
		answer_error(request, EBUSY, "exec", "it has not ended");
		return;
	}
	exec->forgotten = true;
	for (struct stream *stream = &exec->out;; stream = &exec->err) {
		close_quietly(&stream->spool);
		free(stream->held);
		stream->held = NULL;
		stream->held_len = stream->held_cap = 0;
		stream->spool_errno = ENOENT; /* drained and counted, kept no more */
		if (stream == &exec->err)
			break;
	}
	answer_ok(request);
}

void exec_signal(struct exec *exec, uint64_t request, int signum, enum scope scope)
{
	unsigned reached;
	char name[32];

	if (exec->cgroup_gone || (scope == SCOPE_LEADER && exec->ended)) {
		answer_number(request, 0);
		return;
	}
	if (scope == SCOPE_TREE && signum == SIGKILL) {
		cgroup_exec_name(exec, "", name, sizeof(name));
		reached = cgroup_pids(exec->sandbox, name, NULL, NULL);
		cgroup_exec_kill(exec);
	} else {
		reached = inspect_signal(exec, signum, scope);
	}
	answer_number(request, reached);
}
