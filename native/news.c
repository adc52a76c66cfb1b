/* What is told of a command that was started, and what can be asked of it. */
#define _GNU_SOURCE
#include <signal.h>

#include "request.h"

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

void exec_answer_progress(const struct exec *exec, uint64_t request)
{
	struct builder *b = answer_begin(TYPE_PROGRESS, request);

	build_progress(b, exec);
	answer_send(b);
}

static bool is_news(const struct exec *exec, const struct watcher *watcher)
{
	return exec->out.total > watcher->seen_out || exec->err.total > watcher->seen_err ||
	       (exec->out.eof && exec->err.eof);
}

void exec_tell_watchers(struct exec *exec)
{
	unsigned kept = 0;

	for (unsigned i = 0; i < exec->watchers; i++) {
		struct watcher *watcher = &exec->watcher[i];

		if (is_news(exec, watcher))
			exec_answer_progress(exec, watcher->request);
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
		exec_tell_watchers(exec);
}

void exec_tell_started(const struct exec *exec)
{
	struct builder *b = answer_begin(TYPE_STARTED, exec->request);
	pid_t host = inspect_host_pid(exec);
	uint64_t numbers[] = {(uint64_t)host, (uint64_t)exec->pid};

	build_u64s(b, TAG_STARTED_NUMBERS, numbers, ARRAY_LEN(numbers));
	/* A terminal that has hung up already is no more: its last holder was fast. */
	if (exec->pty && exec->out.fd >= 0)
		build_fd(b, TAG_PTY_FD, exec->out.fd);
	answer_send(b);
}

int exec_output(struct request *r, struct exec *exec)
{
	struct builder *b;
	int error = stream_spool(&exec->out);

	error = error ? error : stream_spool(&exec->err);
	if (error)
		return fail(r, -error, "spool", "");
	b = answer_begin(TYPE_OUTPUT, r->frame->request);
	build_progress(b, exec);
	build_fd(b, TAG_STDOUT_FD, exec->out.spool);
	build_fd(b, TAG_STDERR_FD, exec->err.spool);
	answer_send(b);
	return 0;
}

int exec_watch(struct request *r, struct exec *exec, const uint64_t seen[2])
{
	if (exec->watchers == WATCHERS_MAX)
		return fail(r, EBUSY, "watch", "too many watch this exec");
	exec->watcher[exec->watchers++] = (struct watcher){r->frame->request, seen[0], seen[1]};
	exec_tell_watchers(exec);
	return 0;
}

void exec_mark(struct exec *exec, uint64_t request)
{
	if (!is_queued(exec)) {
		stream_drain(&exec->out);
		stream_drain(&exec->err);
	}
	exec_answer_progress(exec, request);
	exec_progress(exec);
}

void exec_await(struct exec *exec, uint64_t request)
{
	exec->request = request;
	if (!exec->launch)
		exec_tell_started(exec);
}

int exec_forget(struct request *r, struct exec *exec)
{
	if (!exec->ended)
		return fail(r, EBUSY, "exec", "it has not ended");
	exec->forgotten = true;
	stream_forget(&exec->out);
	stream_forget(&exec->err);
	answer_ok(r->frame->request);
	return 0;
}

void exec_signal(struct exec *exec, uint64_t request, int signum, enum scope scope)
{
	unsigned reached;

	if (exec->cgroup_gone || (scope == SCOPE_LEADER && exec->ended)) {
		answer_number(request, 0);
		return;
	}
	if (scope == SCOPE_TREE && signum == SIGKILL) {
		reached = cgroup_exec_pids(exec, NULL, NULL);
		if (exec->ended)
			cgroup_exec_kill(exec);
		else
			exec_kill(exec, REASON_SIGNAL);
	} else if (exec->launch) {
		/* What is there is perhaps not yet the command, or it may run for a while already. */
		if (exec->signals == SIGNALS_MAX)
			answer_error(request, EBUSY, "signal", "too many wait for it to start");
		else
			exec->signal[exec->signals++] = (struct early_signal){request, signum, scope};
		return;
	} else {
		reached = inspect_signal(exec, signum, scope);
	}
	answer_number(request, reached);
}
