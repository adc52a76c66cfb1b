/* Look at processes of a sandbox from outside, through the host's /proc and its cgroups. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "kernel.h"
#include "spawner.h"

#define KILL_ROUNDS 64u
#define REACHED_MAX 4096u
/* PF_EXITING: set before anything of a process goes. */
#define EXITING 0x4u

/* The last number of a line such as "NSpid:\t4021\t7". */
static pid_t last_number(const char *status, const char *key)
{
	const char *line = strstr(status, key);
	uint64_t value = 0;

	if (!line)
		return 0;
	for (line += strlen(key); *line == '\t';) {
		line = parse_number(line + 1, &value);
		if (!line)
			return 0;
	}
	return (pid_t)value;
}

/* Stays this process's, even if its pid is another's later. */
static int open_process(pid_t host_pid)
{
	char name[16];

	snprintf(name, sizeof(name), "%d", host_pid);
	return openat(worker.proc, name, O_PATH | O_DIRECTORY | O_CLOEXEC);
}

static int parse_status(const char *text, struct process *process)
{
	const char *end;

	process->pid = last_number(text, "\nNSpid:");
	if (process->pid <= 0 || strncmp(text, "Name:\t", 6) != 0)
		return -ESRCH;
	/* The kernel escapes newlines in it, so that it may be longer than the name itself. */
	end = strchr(text + 6, '\n');
	process->name_len = end ? (size_t)(end - text - 6) : 0;
	if (process->name_len > sizeof(process->name))
		process->name_len = sizeof(process->name);
	memcpy(process->name, text + 6, process->name_len);
	return 0;
}

/* Whether the process is still of this exec: a pid read before may be another's by now. */
static bool belongs(const struct exec *exec, int process)
{
	char text[4096], name[ID_MAX + 40], group[32];
	size_t len;

	if (read_file_at(process, "cgroup", text, sizeof(text)) < 0)
		return false;
	cgroup_exec_name(exec, "", group, sizeof(group));
	len = (size_t)snprintf(name, sizeof(name), "/%s/%s\n", exec->sandbox->id, group);
	for (char *line = strstr(text, "0::"); line; line = strstr(line + 1, "\n0::")) {
		char *end = strchr(line + 1, '\n');

		if (end && (size_t)(end + 1 - line) >= len && memcmp(end + 1 - len, name, len) == 0)
			return true;
	}
	return false;
}

int process_read(const struct exec *exec, pid_t host_pid, struct process *process)
{
	auto_close int dir = open_process(host_pid);
	char text[4096];

	if (dir < 0 || read_file_at(dir, "status", text, sizeof(text)) < 0)
		return -ESRCH;
	return exec && !belongs(exec, dir) ? -ESRCH : parse_status(text, process);
}

/* "PID (NAME) STATE PPID PGRP SESSION TTY TPGID FLAGS ...", and NAME may have any character. */
static uint64_t flags_of(pid_t host_pid)
{
	auto_close int dir = open_process(host_pid);
	uint64_t flags = 0;
	char text[4096];
	const char *at;

	if (dir < 0 || read_file_at(dir, "stat", text, sizeof(text)) < 0)
		return 0;
	at = strrchr(text, ')');
	for (int i = 0; at && i < 7; i++)
		at = strchr(at + 1, ' ');
	if (at)
		parse_number(at + 1, &flags);
	return flags;
}

bool sandbox_ends(const struct sandbox *sandbox)
{
	return sandbox->state >= SANDBOX_DYING || flags_of(sandbox->pid) & EXITING;
}

void build_process(struct builder *b, uint16_t tag, const struct process *process,
		   const uint64_t *numbers, size_t count)
{
	uint8_t *at = build_space(b, tag, 8 * count + process->name_len);

	if (!at)
		return;
	for (size_t i = 0; i < count; i++)
		put_u64(at + 8 * i, numbers[i]);
	memcpy(at + 8 * count, process->name, process->name_len);
}

/* --- one among those of an exec ------------------------------------------------------- */

struct search {
	const struct exec *exec;
	pid_t found;
};

static void search_one(pid_t host_pid, void *context)
{
	struct search *search = context;
	struct process process;

	if (!search->found && process_read(search->exec, host_pid, &process) == 0 &&
	    process.pid == search->exec->pid)
		search->found = host_pid;
}

pid_t inspect_host_pid(const struct exec *exec)
{
	struct search search = {.exec = exec};

	cgroup_exec_pids(exec, search_one, &search);
	return search.found;
}

/* --- signals -------------------------------------------------------------------------- */

struct signalling {
	const struct exec *exec;
	int signum;
	enum scope scope;
	unsigned reached;
};

static pid_t reached[REACHED_MAX];

/* Dying takes a while, so that a later round may meet the same process again. */
static void count(struct signalling *signalling, pid_t host_pid)
{
	for (unsigned i = 0; i < signalling->reached && i < REACHED_MAX; i++)
		if (reached[i] == host_pid)
			return;
	if (signalling->reached < REACHED_MAX)
		reached[signalling->reached] = host_pid;
	signalling->reached++;
}

static void signal_one(pid_t host_pid, void *context)
{
	struct signalling *signalling = context;
	const struct exec *exec = signalling->exec;
	auto_close int pidfd = (int)syscall(SYS_pidfd_open, host_pid, 0);
	auto_close int process = pidfd < 0 ? -1 : open_process(host_pid);
	char text[4096];
	pid_t pid, group;

	/* First a hold on whatever has this pid, then the question what it is. */
	if (process < 0 || read_file_at(process, "status", text, sizeof(text)) < 0 ||
	    !belongs(exec, process))
		return;
	pid = last_number(text, "\nNSpid:");
	group = last_number(text, "\nNSpgid:");
	if (strstr(text, "\nState:\tZ"))
		return;
	if (signalling->scope == SCOPE_LEADER && (pid != exec->pid || exec->ended))
		return;
	if (signalling->scope == SCOPE_GROUP && group != exec->pid)
		return;
	if (signalling->scope == SCOPE_CHILDREN && pid == exec->pid)
		return;
	if (syscall(SYS_pidfd_send_signal, pidfd, signalling->signum, NULL, 0) == 0)
		count(signalling, host_pid);
}

unsigned inspect_signal(const struct exec *exec, int signum, enum scope scope)
{
	struct signalling signalling = {.exec = exec, .signum = signum, .scope = scope};
	unsigned before, rounds = 0;

	/* Those to be killed may fork meanwhile. */
	do {
		before = signalling.reached;
		cgroup_exec_pids(exec, signal_one, &signalling);
	} while (signum == SIGKILL && scope != SCOPE_LEADER && signalling.reached > before &&
		 ++rounds < KILL_ROUNDS);
	return signalling.reached;
}

/* --- PROCESSES ------------------------------------------------------------------------ */

struct listing {
	struct builder *b;
	const struct exec *exec; /* NULL for pid 1, which we hold */
};

static void list_one(pid_t host_pid, void *context)
{
	struct listing *listing = context;
	struct process process;
	uint64_t numbers[3] = {0, (uint64_t)host_pid, listing->exec ? listing->exec->id : 0};

	if (process_read(listing->exec, host_pid, &process) < 0)
		return;
	numbers[0] = (uint64_t)process.pid;
	build_process(listing->b, TAG_PROCESS, &process, numbers, ARRAY_LEN(numbers));
}

void inspect_processes(struct sandbox *sandbox, uint64_t request)
{
	struct listing listing;

	if (sandbox->state != SANDBOX_LIVE) {
		answer_error(request, ESRCH, "sandbox", "it is gone");
		return;
	}
	listing = (struct listing){.b = answer_begin(TYPE_PROCESS_LIST, request)};
	list_one(sandbox->pid, &listing);
	for (struct exec *exec = sandbox->execs; exec; exec = exec->sibling) {
		listing.exec = exec;
		if (!exec->cgroup_gone)
			cgroup_exec_pids(exec, list_one, &listing);
	}
	answer_send(listing.b);
}
