/* One command from EXEC to the last of its processes. */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>

#include "kernel.h"
#include "spawner.h"

#define BUCKETS 1024u
#define DEATH_TRIES 100u
#define DYING_TRIES 40u
#define KILL_TRIES 8u

static struct exec *table[BUCKETS];

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

	while (exec && (exec->leader_gone || pid != (exec->launch ? launch_pid(exec->launch) : exec->pid)))
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

/* For a while: what resists to be killed shall not gain processor time by that. */
static bool is_dying(const struct exec *exec)
{
	return exec->killed && (!exec->ended || (!exec->cgroup_gone && exec->tries < DYING_TRIES));
}

static void slow_down(struct sandbox *sandbox)
{
	if (!sandbox->hastened || sandbox->state != SANDBOX_LIVE)
		return;
	if (!cgroup_haste_spent(sandbox))
		for (struct exec *exec = sandbox->execs; exec; exec = exec->sibling)
			if (is_dying(exec))
				return;
	cgroup_slow_down(sandbox);
}

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
	slow_down(exec->sandbox);
	timer_cancel(&exec->timer);
	stream_close(&exec->out);
	stream_close(&exec->err);
	for (unsigned i = 0; i < exec->watchers; i++)
		exec_answer_progress(exec, exec->watcher[i].request);
	for (unsigned i = 0; i < exec->signals; i++)
		answer_number(exec->signal[i].request, 0);
	if (exec->watch >= 0)
		inotify_forget(exec->watch);
	free_later(exec);
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

	if (process_read(leftovers->exec, host_pid, &process) == 0)
		build_process(leftovers->b, TAG_LEFTOVER, &process,
			      (uint64_t[]){(uint64_t)process.pid}, 1);
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
	uint64_t numbers[] = {
		signalled ? 2u : 1u,
		(uint64_t)(signalled ? WTERMSIG(status) : WEXITSTATUS(status)),
		reason,
		exec->began_real_ns,
		now_ns() - exec->began_ns,
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

		cgroup_exec_pids(exec, add_leftover, &leftovers);
	}
	keep_answer(exec, b);
	answer_send(b);
}

static enum reason why(const struct exec *exec, int status, uint64_t ooms)
{
	/* A shell that outlives what it ran tells the signal by 128 + its number. */
	int code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);

	if (exec->killed && WIFSIGNALED(status))
		return exec->cause;
	if (ooms && code == 128 + SIGKILL)
		return REASON_OOM;
	return WIFSIGNALED(status) ? REASON_SIGNAL : REASON_EXIT;
}

/* Follow what it left running until its cgroup is empty. */
static void keep_leftovers(struct exec *exec)
{
	exec->watch = cgroup_exec_watch(exec);
	/* It may have become empty before the watch began; and a watch may be refused. */
	timer_in(&exec->timer, (exec->watch < 0 ? 100 : 20) * NS_PER_MS);
}

static void conclude(struct exec *exec)
{
	struct sandbox *sandbox = exec->sandbox;
	uint64_t now_ooms = cgroup_ooms(sandbox);
	uint64_t ooms = now_ooms - exec->ooms_before;
	struct usage used = exec->usage;

	if (now_ooms > sandbox->ooms_seen)
		sandbox->oom_ns = now_ns();
	sandbox->ooms_seen = now_ooms;
	timer_cancel(&exec->timer);
	cgroup_exec_usage(exec, &used);
	exec->cgroup_gone = cgroup_exec_remove(exec) == 0;
	/* After that: the last words of whoever was in it a moment ago. */
	stream_drain(&exec->out);
	stream_drain(&exec->err);
	if (!exec->cgroup_gone) {
		stream_keep(&exec->out);
		stream_keep(&exec->err);
	}
	exec->ended = true;
	exec->tries = 0;
	answer_end(exec, exec->status, why(exec, exec->status, ooms), ooms, &used);
	exec_tell_watchers(exec);
	if (exec->cgroup_gone) {
		forget(exec);
		sandbox_kill_progress(sandbox);
	} else {
		keep_leftovers(exec);
		slow_down(sandbox);
	}
}

/* A whole tree that was killed ends with the last of it, not with the leader. */
static void conclude_when_dead(struct exec *exec)
{
	if (exec->killed && exec->tries++ < DEATH_TRIES && cgroup_exec_populated(exec))
		timer_in(&exec->timer, (exec->tries < 20 ? 1 : 20) * NS_PER_MS);
	else
		conclude(exec);
}

void exec_leader_ended(struct exec *exec, int status, const struct usage *usage)
{
	exec->leader_gone = true;
	exec->pid = 0; /* another's from now on */
	exec->status = status;
	exec->usage = *usage;
	if (exec->launch)
		return; /* its end comes first */
	exec->tries = 0;
	conclude_when_dead(exec);
}

/* Nobody writes any more. */
static void drain_rest(struct exec *exec)
{
	stream_drain(&exec->out);
	stream_drain(&exec->err);
	if (exec->ended) {
		stream_state_total(&exec->out);
		stream_state_total(&exec->err);
	}
}

void exec_sandbox_gone(struct exec *exec)
{
	static const struct usage unknown;
	uint64_t ooms = cgroup_ooms(exec->sandbox) - exec->ooms_before;

	if (exec->launch) {
		bool tell = launch_spec(exec->launch)->flags & EXEC_FLAG_STARTED;
		bool executed = !launch_close(exec->launch);

		exec->pid = launch_pid(exec->launch);
		exec_unlaunch(exec);
		if (!executed) {
			exec_failed(exec, ESRCH, "sandbox", "it is gone");
			return;
		}
		if (tell)
			exec_tell_started(exec);
	}
	drain_rest(exec);
	if (!exec->ended) {
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
			timer_in(&exec->timer, (exec->tries++ < 20 ? 2 : 100) * NS_PER_MS);
		slow_down(exec->sandbox);
		return;
	}
	exec->cgroup_gone = true;
	drain_rest(exec);
	forget(exec);
	sandbox_kill_progress(sandbox);
}

/*
 * All of it has been killed, yet pid 1 has not heard of the leader: a tracer in the sandbox
 * holds its exit back. Its cgroup may say that nothing of it runs any more; if not, it is killed
 * once more, and what resists that for long is left behind: the sandbox's end takes it along.
 */
static void check_killed(struct exec *exec)
{
	static const struct usage unknown;
	bool running = cgroup_exec_populated(exec);

	exec->tries++;
	if (exec->tries > KILL_TRIES || (!running && exec->tries > 3)) {
		exec_leader_ended(exec, SIGKILL, &unknown);
		return;
	}
	if (running)
		cgroup_exec_kill(exec);
	timer_in(&exec->timer, (running ? 50u * exec->tries : 50u) * NS_PER_MS);
}

void exec_kill(struct exec *exec, enum reason cause)
{
	if (is_queued(exec)) {
		exec_unlaunch(exec);
		exec_failed(exec, ECANCELED, "launch", "it was killed before its turn came");
		return;
	}
	if (!exec->killed)
		exec->cause = cause;
	exec->killed = true;
	exec->tries = 0;
	if (!exec->cgroup_gone) {
		cgroup_hasten(exec->sandbox);
		cgroup_exec_kill(exec);
	}
	timer_in(&exec->timer, (exec->ended ? 1 : 50) * NS_PER_MS);
}

static bool is_late(const struct exec *exec)
{
	return exec->deadline && now_ns() >= exec->deadline;
}

static void timer_fired(struct timer *timer)
{
	struct exec *exec = container_of(timer, struct exec, timer);

	slow_down(exec->sandbox);
	if (exec->ended)
		exec_check_cgroup(exec);
	else if (exec->launch)
		exec_overdue(exec);
	else if (exec->leader_gone)
		conclude_when_dead(exec);
	else if (exec->killed)
		check_killed(exec);
	else if (is_late(exec) || !kept_waits(exec->kept))
		exec_kill(exec, REASON_DEADLINE);
	/* Else it has reported to the next daemon that what was to end by now did. */
}

/* --- without a daemon ------------------------------------------------------------------ */

/* Whether its timer is for its end alone. */
static bool only_runs(const struct exec *exec)
{
	return !(exec->launch || exec->leader_gone || exec->killed || exec->ended);
}

void exec_lease_on(struct exec *exec)
{
	uint64_t now = clock_ns(CLOCK_REALTIME);
	uint64_t left = exec->expires_ns > now ? exec->expires_ns - now : 0;

	if (exec->expires_ns && only_runs(exec) && !(exec->deadline && exec->deadline < now_ns() + left))
		timer_in(&exec->timer, left);
}

void exec_lease_off(struct exec *exec)
{
	if (!exec->expires_ns || !only_runs(exec))
		return;
	timer_cancel(&exec->timer);
	if (exec->deadline)
		timer_set(&exec->timer, exec->deadline);
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

struct exec *exec_new(struct request *r, const struct exec_spec *spec)
{
	struct exec *exec = calloc(1, sizeof(*exec));

	if (exec && timers_reserve() == 0)
		exec->launch = launch_new(r, spec, exec);
	if (!exec || !exec->launch) {
		free(exec);
		return NULL;
	}
	exec->sandbox = spec->sandbox;
	exec->id = spec->id;
	exec->request = spec->request;
	exec->pty = spec->flags & EXEC_FLAG_PTY;
	exec->watch = -1;
	exec->out.fd = exec->out.spool = exec->err.fd = exec->err.spool = -1;
	exec->spool_bytes = spec->spool_bytes < SPOOL_MIN ? SPOOL_MIN : spec->spool_bytes;
	exec->inline_bytes = spec->inline_bytes < INLINE_MAX ? spec->inline_bytes : INLINE_MAX;
	exec->kill_bytes = spec->kill_bytes;
	exec->out.exec = exec->err.exec = exec;
	exec->timer.fire = timer_fired;
	exec->began_ns = worker.started_ns = now_ns();
	exec->began_real_ns = clock_ns(CLOCK_REALTIME);
	exec->deadline = spec->deadline_ns ? exec->began_ns + spec->deadline_ns : 0;
	exec->ooms_before = cgroup_ooms(exec->sandbox);
	list(exec);
	return exec;
}

static void send_early(struct exec *exec)
{
	unsigned count = exec->signals;

	exec->signals = 0;
	for (unsigned i = 0; i < count; i++)
		exec_signal(exec, exec->signal[i].request, exec->signal[i].signum, exec->signal[i].scope);
}

void exec_started(struct exec *exec, pid_t pid, bool tell)
{
	exec->pid = pid;
	exec->tries = 0;
	if (tell)
		exec_tell_started(exec);
	send_early(exec);
	if (exec->leader_gone) {
		exec_leader_ended(exec, exec->status, &exec->usage);
	} else if (!exec->killed) {
		timer_cancel(&exec->timer);
		if (exec->deadline)
			timer_set(&exec->timer, exec->deadline);
	}
}

/* What there is of its cgroup may take a moment to be empty. */
void exec_failed(struct exec *exec, int error, const char *stage, const char *message)
{
	struct builder *b = error_begin(exec->request, error, stage, message);

	keep_answer(exec, b);
	answer_send(b);
	exec->ended = exec->forgotten = true;
	exec->tries = 0;
	exec_check_cgroup(exec);
}

void execs_unwatch(void)
{
	for (size_t i = 0; i < BUCKETS; i++)
		for (struct exec *exec = table[i]; exec; exec = exec->next)
			exec->watchers = 0;
}
