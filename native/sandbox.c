/* The sandboxes there are, what their pid 1 tells, and their end. How they begin: create.c. */
#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>

#include "init.h"
#include "kernel.h"
#include "spawner.h"

#define BUCKETS 1024u
#define REMOVE_TRIES 600u
#define REAP_TRIES 500u
/* A sandbox can make pid 1 report orphans for as long as it likes: others get their turn between. */
#define REPORTS_PER_TURN 64u

static struct sandbox *table[BUCKETS];

static struct sandbox **chain_of(const char *id)
{
	return &table[hash_of(id) % BUCKETS];
}

struct sandbox *sandbox_find(const char *id)
{
	struct sandbox *sandbox = *chain_of(id);

	while (sandbox && strcmp(sandbox->id, id) != 0)
		sandbox = sandbox->next;
	return sandbox;
}

static void timer_fired(struct timer *timer);
static void lease_over(struct timer *timer);

void sandbox_list(struct sandbox *sandbox)
{
	sandbox->timer.fire = timer_fired;
	sandbox->lease.fire = lease_over;
	sandbox->next = *chain_of(sandbox->id);
	*chain_of(sandbox->id) = sandbox;
	sandbox->queue = (struct link)RING(sandbox->queue);
	sandbox->running.streams = (struct link)RING(sandbox->running.streams);
	sandbox->bulk.streams = (struct link)RING(sandbox->bulk.streams);
	sandbox->leftover.streams = (struct link)RING(sandbox->leftover.streams);
	sandbox->listed = true;
	worker.sandboxes++;
}

static void forget(struct sandbox *sandbox)
{
	struct sandbox **link = chain_of(sandbox->id);

	if (!sandbox->listed)
		return;
	while (*link != sandbox)
		link = &(*link)->next;
	*link = sandbox->next;
	timer_cancel(&sandbox->lease);
	sandbox->listed = false;
	worker.sandboxes--;
	free_later(sandbox);
}

/* --- the end of one ------------------------------------------------------------------ */

static void answer_kill(struct sandbox *sandbox)
{
	for (unsigned i = 0; i < sandbox->killers; i++)
		answer_number(sandbox->killer[i].request, sandbox->killer[i].killed);
	sandbox->killers = 0;
	timer_cancel(&sandbox->timer);
}

static void answer_failed(const struct sandbox *sandbox)
{
	int status = sandbox->exit_status;
	char message[48] = "";

	/* Pid 1 told nothing itself. */
	if (sandbox->fault == ECHILD)
		snprintf(message, sizeof(message), "it ended by %s %d",
			 WIFSIGNALED(status) ? "signal" : "exit code",
			 WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
	answer_error(sandbox->create_request, sandbox->fault, sandbox->fault_stage, message);
}

static void finish(struct sandbox *sandbox, int error)
{
	if (sandbox->create_request) {
		answer_failed(sandbox);
		sandbox->create_request = 0;
		keep_drop(sandbox->id); /* nothing is left of it */
		forget(sandbox);
		return;
	}
	sandbox->state = SANDBOX_GONE;
	if (!sandbox->destroy_request)
		return;
	if (error)
		answer_error(sandbox->destroy_request, -error, "remove cgroup", "");
	else
		answer_ok(sandbox->destroy_request);
	forget(sandbox);
}

static void clean(struct sandbox *sandbox)
{
	int error = cgroup_remove(sandbox);

	if (error && sandbox->tries++ < REMOVE_TRIES) {
		/* Dead processes hold a version 1 cgroup for a moment after they were reaped. */
		uint64_t wait = sandbox->tries < 20 ? sandbox->tries * NS_PER_MS : 50 * NS_PER_MS;

		timer_in(&sandbox->timer, wait);
		return;
	}
	finish(sandbox, error);
}

static void report_gone(struct sandbox *sandbox, uint64_t ooms)
{
	bool signalled = WIFSIGNALED(sandbox->exit_status);
	uint64_t code = (uint64_t)(signalled ? WTERMSIG(sandbox->exit_status)
					     : WEXITSTATUS(sandbox->exit_status));
	uint64_t cause = signalled ? GONE_CAUSE_SIGNAL : GONE_CAUSE_EXIT;
	struct builder *b = answer_begin(TYPE_SANDBOX_GONE, 0);

	/* Commands that ended after the kill, but before pid 1 was dead, have seen it already. */
	if (signalled && code == SIGKILL &&
	    (ooms > sandbox->ooms_seen ||
	     (sandbox->oom_ns && now_ns() - sandbox->oom_ns < NS_PER_S)))
		cause = GONE_CAUSE_OOM;
	sandbox->gone_cause = cause;
	sandbox->gone_code = code;
	build_text(b, TAG_SANDBOX, sandbox->id);
	build_u64s(b, TAG_GONE_NUMBERS, (uint64_t[]){cause, code}, 2);
	answer_send(b);
}

/* Pid 1 has been reaped, and with it went every process of its namespace. */
static void after_death(struct sandbox *sandbox)
{
	uint64_t ooms = cgroup_ooms(sandbox);

	while (sandbox->execs)
		exec_sandbox_gone(sandbox->execs);
	answer_kill(sandbox);
	if (!sandbox->create_request && !sandbox->destroy_request)
		report_gone(sandbox, ooms);
	loop_close(&sandbox->channel);
	loop_close(&sandbox->pidfd);
	close_quietly(&sandbox->root);
	sandbox->state = SANDBOX_CLEANING;
	sandbox->tries = 0;
	clean(sandbox);
}

static void timer_fired(struct timer *timer)
{
	struct sandbox *sandbox = container_of(timer, struct sandbox, timer);

	if (sandbox->state == SANDBOX_CLEANING)
		clean(sandbox);
	else
		sandbox_kill_progress(sandbox);
}

static void read_channel(struct sandbox *sandbox, unsigned most);

static void pidfd_ready(struct source *source, uint32_t)
{
	struct sandbox *sandbox = container_of(source, struct sandbox, pidfd_source);
	siginfo_t info = {0};

	if (sandbox->pidfd < 0 || sandbox->state == SANDBOX_CLEANING)
		return;
	if (waitid(P_PIDFD, (id_t)sandbox->pidfd, &info, WEXITED | WNOHANG | __WALL) < 0 ||
	    info.si_pid == 0)
		return;
	sandbox->exit_status = info.si_code == CLD_EXITED ? (info.si_status & 0xff) << 8
							  : info.si_status & 0x7f;
	/* What it reported before it died counts. */
	if (!sandbox->channel_ended)
		read_channel(sandbox, UINT_MAX);
	after_death(sandbox);
}

static void await_death(struct sandbox *sandbox)
{
	if (sandbox->state == SANDBOX_DYING)
		return;
	sandbox->state = SANDBOX_DYING;
	cgroup_hasten(sandbox);
	sandbox->pidfd_source.ready = pidfd_ready;
	loop_add(sandbox->pidfd, &sandbox->pidfd_source, EPOLLIN);
}

static void kill_init(struct sandbox *sandbox)
{
	if (sandbox->pid <= 0) {
		after_death(sandbox);
		return;
	}
	syscall(SYS_pidfd_send_signal, sandbox->pidfd, SIGKILL, NULL, 0);
	await_death(sandbox);
}

void create_failed(struct sandbox *sandbox, int error, const char *stage)
{
	if (!sandbox->fault) {
		sandbox->fault = -error;
		snprintf(sandbox->fault_stage, sizeof(sandbox->fault_stage), "%s", stage);
	}
	rootfs_release(true);
	kill_init(sandbox);
}

/* Whether its pid 1 lives and nothing is under way with it. */
static bool stands(const struct sandbox *sandbox)
{
	return sandbox->state == SANDBOX_LIVE || sandbox->state == SANDBOX_BLANK;
}

void sandbox_destroy(struct sandbox *sandbox, uint64_t request)
{
	bool asked = sandbox->destroy_request && request_is_current(sandbox->destroy_request);

	if (asked || sandbox->create_request) {
		answer_error(request, EBUSY, "sandbox", "it is being made or destroyed");
		return;
	}
	sandbox->destroy_request = request;
	if (stands(sandbox))
		kill_init(sandbox);
	else if (sandbox->state == SANDBOX_GONE)
		finish(sandbox, 0);
}

static void end_one(struct sandbox *sandbox)
{
	if (sandbox->state == SANDBOX_GONE)
		forget(sandbox);
	else if (stands(sandbox))
		sandbox_destroy(sandbox, UINT64_MAX);
	else if (sandbox->state == SANDBOX_STARTING)
		create_failed(sandbox, -ECONNRESET, "connection");
	else if (!sandbox->create_request && !sandbox->destroy_request)
		sandbox->destroy_request = UINT64_MAX;
}

void sandboxes_end(void)
{
	sandboxes_each(end_one);
}

void sandboxes_each(void (*each)(struct sandbox *sandbox))
{
	for (size_t i = 0; i < BUCKETS; i++)
		for (struct sandbox *sandbox = table[i], *next; sandbox; sandbox = next) {
			next = sandbox->next;
			each(sandbox);
		}
}

/* --- without a daemon ---------------------------------------------------------------- */

static void lease_over(struct timer *timer)
{
	struct sandbox *sandbox = container_of(timer, struct sandbox, lease);

	if (sandbox->state == SANDBOX_STARTING) {
		timer_in(timer, NS_PER_S);
	} else if (sandbox->state == SANDBOX_LIVE) {
		sandbox_kill_all(sandbox, REQUEST_NOBODYS); /* the next daemon may let it be read, or ends it */
	}
}

void sandbox_lease_on(struct sandbox *sandbox)
{
	uint64_t now = clock_ns(CLOCK_REALTIME);
	uint64_t left = sandbox->expires_ns > now ? sandbox->expires_ns - now : 0;

	sandbox->killers = 0;
	if (kept_has(sandbox->id)) {
		if (sandbox->expires_ns)
			timer_in(&sandbox->lease, left);
		for (struct exec *exec = sandbox->execs; exec; exec = exec->sibling)
			exec_lease_on(exec);
	} else if (sandbox->create_request) {
		sandbox->unwanted = true;
	} else {
		sandbox_destroy(sandbox, REQUEST_NOBODYS);
	}
}

void sandbox_lease_off(struct sandbox *sandbox)
{
	timer_cancel(&sandbox->lease);
	for (struct exec *exec = sandbox->execs; exec; exec = exec->sibling)
		exec_lease_off(exec);
}

void sandbox_await(struct sandbox *sandbox, uint64_t request)
{
	if (sandbox->create_request)
		sandbox->create_request = request;
	else if (sandbox->root >= 0)
		answer_created(sandbox, request);
	else
		answer_error(request, ESRCH, "sandbox", "it is gone");
}

/* --- killing all but pid 1 ----------------------------------------------------------- */

/*
 * Answer once no exec that was killed is left, and pid 1 has waited for the dead: until then they
 * count against the limit of processes, and the next command could not be started.
 */
void sandbox_kill_progress(struct sandbox *sandbox)
{
	if (!sandbox->killers)
		return;
	for (struct exec *exec = sandbox->execs; exec; exec = exec->sibling)
		if (exec->killed && !(exec->ended && exec->cgroup_gone))
			return;
	if (!sandbox->execs && cgroup_tasks(sandbox) > 1 && sandbox->tries++ < REAP_TRIES)
		timer_in(&sandbox->timer, NS_PER_MS);
	else
		answer_kill(sandbox);
}

void sandbox_kill_all(struct sandbox *sandbox, uint64_t request)
{
	uint64_t killed = 0;

	if (sandbox->state != SANDBOX_LIVE) {
		answer_error(request, ESRCH, "sandbox", "it is gone");
		return;
	}
	if (sandbox->killers == KILLERS_MAX) {
		answer_error(request, EBUSY, "kill", "too many wait for everything in it to be killed");
		return;
	}
	if (!sandbox->killers)
		sandbox->tries = 0;
	for (struct exec *exec = sandbox->execs, *next; exec; exec = next) {
		next = exec->sibling;
		killed += cgroup_exec_pids(exec, NULL, NULL);
		exec_kill(exec, REASON_SIGNAL);
	}
	sandbox->killer[sandbox->killers++] = (struct killer){request, killed};
	sandbox_kill_progress(sandbox);
}

/* --- reports of pid 1 ---------------------------------------------------------------- */

static void handle_report(struct sandbox *sandbox, const struct report *report)
{
	struct exec *exec;
	struct usage usage;

	if (report->kind == REPORT_PREPARED && sandbox->state == SANDBOX_STARTING) {
		prepared(sandbox);
	} else if (report->kind == REPORT_READY && sandbox->state == SANDBOX_STARTING) {
		created(sandbox);
	} else if (report->kind == REPORT_FAILED && sandbox->state == SANDBOX_STARTING) {
		create_failed(sandbox, -report->status,
			      init_step_name(report->stage) ? init_step_name(report->stage) : "pid 1");
	} else if (report->kind == REPORT_REAPED) {
		exec = exec_of_pid(sandbox, report->pid);
		if (!exec)
			return;
		usage = (struct usage){
			.user_us = report->user_us,
			.system_us = report->system_us,
			.peak_bytes = report->peak_kib << 10,
			.read_bytes = report->blocks_in << 9,
			.write_bytes = report->blocks_out << 9,
		};
		exec_leader_ended(exec, report->status, &usage);
	}
}

static void read_channel(struct sandbox *sandbox, unsigned most)
{
	while (sandbox->channel >= 0 && most--) {
		struct report report;
		ssize_t got = recv(sandbox->channel, &report, sizeof(report), MSG_DONTWAIT);

		/* Told once, if pid 1 died with something unread; what it sent comes after it. */
		if (got < 0 && errno == ECONNRESET)
			continue;
		if (got < 0 && errno == EAGAIN)
			return;
		if (got == (ssize_t)sizeof(report)) {
			handle_report(sandbox, &report);
			continue;
		}
		sandbox->channel_ended = true;
		return;
	}
}

static void channel_ready(struct source *source, uint32_t)
{
	struct sandbox *sandbox = container_of(source, struct sandbox, channel_source);

	if (sandbox->channel < 0 || sandbox->channel_ended)
		return;
	read_channel(sandbox, REPORTS_PER_TURN);
	if (!sandbox->channel_ended || sandbox->channel < 0)
		return;
	/* Only pid 1 holds the other end: it is dead or dying. */
	loop_remove(sandbox->channel);
	if (sandbox->state == SANDBOX_STARTING)
		create_failed(sandbox, -ECHILD, "pid 1");
	else if (stands(sandbox))
		await_death(sandbox);
}

int sandbox_listen(struct sandbox *sandbox)
{
	sandbox->channel_source.ready = channel_ready;
	return loop_add(sandbox->channel, &sandbox->channel_source, EPOLLIN);
}
