/*
 * One directory per sandbox in each hierarchy, and in the unified one a child per exec.
 * Two layouts behind one face: version 1 controllers beside a unified tree without any
 * (kill and freeze work there), or the unified tree alone.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/stat.h>

#include "spawner.h"

#define V1_TCP_LIMIT "memory.kmem.tcp.limit_in_bytes"
#define CPU_PERIOD_US 100000u
/* What a sandbox may use while something of it is killed. */
#define DYING_MILLI 2000u
/* That for so long at a time, and for so small a part of all time. */
#define HASTE_NS (5 * NS_PER_S)
#define HASTE_SHARE 20u

static struct cgroup_bases *const bases = &worker.cgroups;

static const char *const controller_names[CONTROLLERS] = {"memory", "cpu", "pids"};

/* What follows "NAME=", or NULL. */
static const char *path_of(const char *named, const char *name)
{
	size_t len = strlen(name);

	return strncmp(named, name, len) == 0 && named[len] == '=' ? named + len + 1 : NULL;
}

int cgroups_use(const char *named)
{
	const char *path = path_of(named, "unified");
	int *place = &bases->unified;

	for (int i = 0; i < CONTROLLERS && !path; i++) {
		path = path_of(named, controller_names[i]);
		place = &bases->v1[i];
	}
	if (!path || *place >= 0)
		return -EINVAL;
	return *place = check(open(path, O_PATH | O_DIRECTORY | O_CLOEXEC));
}

/* Whether the unified hierarchy gives `name` to the children of the base. */
static bool delegates(const char *name)
{
	char list[256];
	char change[24];

	snprintf(change, sizeof(change), "+%s", name);
	/* May be on already, or not ours to switch on: what counts is what the file says then. */
	(void)write_file_at(bases->unified, "cgroup.subtree_control", change);
	if (read_file_at(bases->unified, "cgroup.subtree_control", list, sizeof(list)) < 0)
		return false;
	for (char *word = strtok(list, " \n"); word; word = strtok(NULL, " \n"))
		if (strcmp(word, name) == 0)
			return true;
	return false;
}

int cgroups_finish(void)
{
	if (bases->unified < 0)
		return -EINVAL;
	for (int i = 0; i < CONTROLLERS; i++) {
		bases->v2[i] = bases->v1[i] < 0 && delegates(controller_names[i]);
		if (bases->v1[i] >= 0)
			TRY(slot_put(bases->v1[i], (enum slot)(SLOT_V1 + i)));
	}
	(void)delegates("io");
	/*
	 * The first limit of its kind has the kernel patch itself, and so does the last one's end:
	 * ours keeps it so.
	 */
	if (bases->v1[MEMORY] >= 0)
		(void)write_file_at(bases->v1[MEMORY], V1_TCP_LIMIT, "1125899906842624");
	bases->split = bases->v2[MEMORY];
	return 0;
}

/* Below a sandbox the controllers only count, per exec; a kernel without one counts less. */
static int split_sandbox(struct sandbox *sandbox)
{
	(void)write_file_at(sandbox->cgroup, "cgroup.subtree_control", "+memory");
	(void)write_file_at(sandbox->cgroup, "cgroup.subtree_control", "+io");
	return check(mkdirat(sandbox->cgroup, "init", 0755));
}

int cgroup_create(struct sandbox *sandbox)
{
	TRY(check(mkdirat(bases->unified, sandbox->id, 0755)));
	for (int i = 0; i < CONTROLLERS; i++)
		if (bases->v1[i] >= 0)
			TRY(check(mkdirat(bases->v1[i], sandbox->id, 0755)));
	TRY(sandbox->cgroup = check(openat(bases->unified, sandbox->id,
					   O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW)));
	return bases->split ? split_sandbox(sandbox) : 0;
}

/* A file of the controller that limits the sandbox. */
static int set_limit(const struct sandbox *sandbox, enum controller controller, const char *v1_file,
		     const char *v2_file, const char *value)
{
	char path[ID_MAX + 64];

	if (bases->v2[controller])
		return write_file_at(sandbox->cgroup, v2_file, value);
	if (bases->v1[controller] < 0)
		return -EOPNOTSUPP;
	snprintf(path, sizeof(path), "%s/%s", sandbox->id, v1_file);
	return write_file_at(bases->v1[controller], path, value);
}

static int limit_memory(struct sandbox *sandbox)
{
	char value[24], path[ID_MAX + 64];
	int swap, tcp;

	snprintf(value, sizeof(value), "%" PRIu64, sandbox->limits.of[MEMORY]);
	TRY(set_limit(sandbox, MEMORY, "memory.limit_in_bytes", "memory.max", value));
	swap = set_limit(sandbox, MEMORY, "memory.memsw.limit_in_bytes", "memory.swap.max",
			 bases->v2[MEMORY] ? "0" : value);
	/* Absent where the kernel does not count swap. */
	if (swap != -ENOENT)
		TRY(swap);
	/* Version 1 counts what TCP holds apart, and leaves it out unless it is limited. */
	if (!bases->v2[MEMORY]) {
		snprintf(path, sizeof(path), "%s/" V1_TCP_LIMIT, sandbox->id);
		tcp = write_file_at(bases->v1[MEMORY], path, value);
		if (tcp != -ENOENT)
			TRY(tcp);
	}
	snprintf(path, sizeof(path), "%s/%s", sandbox->id,
		 bases->v2[MEMORY] ? "memory.events" : "memory.oom_control");
	return sandbox->oom = check(openat(bases->v2[MEMORY] ? bases->unified : bases->v1[MEMORY],
					   path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
}

static int set_cpu(const struct sandbox *sandbox, uint64_t milli)
{
	uint64_t quota = milli * (CPU_PERIOD_US / 1000);
	char text[48];
	int len = snprintf(text, sizeof(text), "%" PRIu64, quota < 1000 ? 1000 : quota);

	/* Version 1 has that period by default. */
	if (bases->v2[CPU])
		snprintf(text + len, sizeof(text) - (size_t)len, " %u", CPU_PERIOD_US);
	return set_limit(sandbox, CPU, "cpu.cfs_quota_us", "cpu.max", text);
}

static void count_haste(struct sandbox *sandbox)
{
	uint64_t now = now_ns();
	uint64_t passed = now - sandbox->haste_counted_ns;

	sandbox->haste_counted_ns = now;
	if (sandbox->hastened)
		sandbox->haste_ns -= passed < sandbox->haste_ns ? passed : sandbox->haste_ns;
	else
		sandbox->haste_ns += passed / HASTE_SHARE;
	if (sandbox->haste_ns > HASTE_NS)
		sandbox->haste_ns = HASTE_NS;
}

/*
 * Who is killed needs the processor to die: among a hundred others with a tenth of one that took 15
 * seconds (measured). A sandbox that is to end cannot gain by it; one that goes on could, by
 * commands that resist.
 */
void cgroup_hasten(struct sandbox *sandbox)
{
	if (sandbox->hastened || !sandbox->limits.of[CPU] || sandbox->limits.of[CPU] >= DYING_MILLI)
		return;
	count_haste(sandbox);
	if (sandbox->haste_ns || sandbox->state == SANDBOX_DYING)
		sandbox->hastened = set_cpu(sandbox, DYING_MILLI) == 0;
}

bool cgroup_haste_spent(struct sandbox *sandbox)
{
	count_haste(sandbox);
	return !sandbox->haste_ns;
}

void cgroup_slow_down(struct sandbox *sandbox)
{
	count_haste(sandbox);
	if (sandbox->hastened && set_cpu(sandbox, sandbox->limits.of[CPU]) == 0)
		sandbox->hastened = false;
}

static int limit_pids(const struct sandbox *sandbox)
{
	char value[24];

	snprintf(value, sizeof(value), "%" PRIu64, sandbox->limits.of[PIDS]);
	return set_limit(sandbox, PIDS, "pids.max", "pids.max", value);
}

int cgroup_limit(struct sandbox *sandbox, const char **stage)
{
	*stage = "limit memory";
	if (sandbox->limits.of[MEMORY])
		TRY(limit_memory(sandbox));
	*stage = "limit cpu";
	if (sandbox->limits.of[CPU])
		TRY(set_cpu(sandbox, sandbox->limits.of[CPU]));
	*stage = "limit pids";
	return sandbox->limits.of[PIDS] ? limit_pids(sandbox) : 0;
}

int cgroup_open_init(struct sandbox *sandbox)
{
	const char *name = bases->split ? "init" : ".";

	return check(openat(sandbox->cgroup, name, O_PATH | O_DIRECTORY | O_CLOEXEC));
}

static int remove_directory(int base, const char *name)
{
	if (unlinkat(base, name, AT_REMOVEDIR) < 0 && errno != ENOENT)
		return -errno;
	return 0;
}

/* Children first: execs, and pid 1's leaf. */
static int remove_children(struct sandbox *sandbox)
{
	int copy = openat(sandbox->cgroup, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	DIR *dir = copy < 0 ? NULL : fdopendir(copy);
	struct dirent *entry;
	int error = 0;

	if (!dir) {
		close_quietly(&copy);
		return -EBUSY;
	}
	while ((entry = readdir(dir)))
		if (entry->d_type == DT_DIR && entry->d_name[0] != '.') {
			int one = remove_directory(sandbox->cgroup, entry->d_name);

			error = one ? one : error;
		}
	closedir(dir);
	return error;
}

int cgroup_remove(struct sandbox *sandbox)
{
	int error = remove_directory(bases->unified, sandbox->id);

	close_quietly(&sandbox->oom);
	if (error == -EBUSY && sandbox->cgroup >= 0) {
		error = remove_children(sandbox);
		error = error ? error : remove_directory(bases->unified, sandbox->id);
	}
	for (int i = 0; i < CONTROLLERS; i++)
		if (bases->v1[i] >= 0) {
			int one = remove_directory(bases->v1[i], sandbox->id);

			error = error ? error : one;
		}
	if (!error)
		close_quietly(&sandbox->cgroup);
	return error;
}

int cgroup_open_v1(const struct sandbox *sandbox, int tasks[CONTROLLERS])
{
	char path[ID_MAX + 16];

	snprintf(path, sizeof(path), "%s/tasks", sandbox->id);
	for (int i = 0; i < CONTROLLERS; i++)
		if (bases->v1[i] >= 0)
			TRY(tasks[i] = check(openat(bases->v1[i], path,
						    O_WRONLY | O_CLOEXEC | O_NOFOLLOW)));
	return 0;
}

uint64_t cgroup_tasks(const struct sandbox *sandbox)
{
	char path[ID_MAX + 16], text[32];
	uint64_t count = 0;
	ssize_t len;

	snprintf(path, sizeof(path), "%s/pids.current", sandbox->id);
	len = read_file_at(bases->v1[PIDS] >= 0 ? bases->v1[PIDS] : bases->unified, path, text,
			   sizeof(text));
	if (len > 0)
		parse_number(text, &count);
	return count;
}

uint64_t cgroup_ooms(const struct sandbox *sandbox)
{
	char text[512];
	ssize_t len = sandbox->oom < 0 ? 0 : pread(sandbox->oom, text, sizeof(text) - 1, 0);

	if (len <= 0)
		return 0;
	text[len] = '\0';
	return number_after(text, "oom_kill");
}

void cgroup_exec_name(const struct exec *exec, const char *file, char *buf, size_t size)
{
	snprintf(buf, size, "x%llu%s%s", (unsigned long long)exec->cgroup, *file ? "/" : "", file);
}

int cgroup_exec_create(struct exec *exec)
{
	static uint64_t last;
	struct sandbox *sandbox = exec->sandbox;
	bool spare = sandbox->spare_cgroups > 0;
	char name[32];

	exec->cgroup = spare ? sandbox->spare_cgroup[--sandbox->spare_cgroups] : ++last;
	cgroup_exec_name(exec, "", name, sizeof(name));
	if (!spare && mkdirat(sandbox->cgroup, name, 0755) < 0) {
		exec->cgroup = 0;
		return -errno;
	}
	return check(openat(sandbox->cgroup, name, O_PATH | O_DIRECTORY | O_CLOEXEC));
}

static ssize_t read_exec_file(const struct exec *exec, const char *file, char *text, size_t size)
{
	char path[64];

	cgroup_exec_name(exec, file, path, sizeof(path));
	return read_file_at(exec->sandbox->cgroup, path, text, size);
}

/* 1, 0, or -errno. */
static int populated(const struct exec *exec)
{
	char text[128];

	TRY((int)read_exec_file(exec, "cgroup.events", text, sizeof(text)));
	return number_after(text, "populated") != 0;
}

int cgroup_exec_remove(const struct exec *exec)
{
	struct sandbox *sandbox = exec->sandbox;
	bool room = sandbox->spare_cgroups < SPARE_CGROUPS_MAX;
	char name[32];

	if (room && !exec->cgroup_killed && !bases->split && populated(exec) == 0) {
		sandbox->spare_cgroup[sandbox->spare_cgroups++] = exec->cgroup;
		return 0;
	}
	cgroup_exec_name(exec, "", name, sizeof(name));
	return remove_directory(sandbox->cgroup, name);
}

int cgroup_exec_kill(struct exec *exec)
{
	char path[64];

	exec->cgroup_killed = true;
	cgroup_exec_name(exec, "cgroup.kill", path, sizeof(path));
	return write_file_at(exec->sandbox->cgroup, path, "1");
}

bool cgroup_exec_populated(const struct exec *exec)
{
	return populated(exec) > 0;
}

/* What version 2 controllers counted for the whole tree of the exec replaces the leader's own. */
void cgroup_exec_usage(const struct exec *exec, struct usage *usage)
{
	char text[1024];

	if (!bases->split)
		return;
	if (read_exec_file(exec, "memory.peak", text, sizeof(text)) > 0)
		parse_number(text, &usage->peak_bytes);
	if (read_exec_file(exec, "cpu.stat", text, sizeof(text)) > 0) {
		usage->user_us = number_after(text, "user_usec");
		usage->system_us = number_after(text, "system_usec");
	}
	if (read_exec_file(exec, "io.stat", text, sizeof(text)) > 0) {
		usage->read_bytes = usage->write_bytes = 0;
		for (char *word = strtok(text, " \n"); word; word = strtok(NULL, " \n")) {
			uint64_t value = 0;

			if (strncmp(word, "rbytes=", 7) == 0 && parse_number(word + 7, &value))
				usage->read_bytes += value;
			if (strncmp(word, "wbytes=", 7) == 0 && parse_number(word + 7, &value))
				usage->write_bytes += value;
		}
	}
}

int cgroup_exec_watch(const struct exec *exec)
{
	char name[64], path[128];

	cgroup_exec_name(exec, "cgroup.events", name, sizeof(name));
	snprintf(path, sizeof(path), "/proc/self/fd/%d/%s", exec->sandbox->cgroup, name);
	return check(inotify_add_watch(worker.inotify, path, IN_MODIFY | IN_DONT_FOLLOW));
}

struct pids {
	void (*each)(pid_t pid, void *context);
	void *context;
};

static void one_pid(uint64_t value, void *context)
{
	const struct pids *pids = context;

	/* 0 stands for a process of another pid namespace; there are none of those here. */
	if (value && pids->each)
		pids->each((pid_t)value, pids->context);
}

unsigned cgroup_exec_pids(const struct exec *exec, void (*each)(pid_t pid, void *context),
			  void *context)
{
	struct pids pids = {each, context};
	auto_close int fd = -1;
	char path[64];

	cgroup_exec_name(exec, "cgroup.procs", path, sizeof(path));
	fd = openat(exec->sandbox->cgroup, path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
	return fd < 0 ? 0 : each_number(fd, one_pid, &pids);
}
