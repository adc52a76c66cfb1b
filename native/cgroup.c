/*
 * One directory per sandbox in each hierarchy, and in the unified one a child per exec.
 * Two layouts behind one face: version 1 controllers beside a unified tree without any
 * (kill and freeze work there), or the unified tree alone.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <time.h>

#include "spawner.h"

#define CPU_PERIOD_US 100000u
/* What a sandbox may use while something of it is killed. */
#define DYING_MILLI 2000u
/* That for so long at a time, and for so small a part of all time. */
#define HASTE_NS (5 * NS_PER_S)
#define HASTE_SHARE 20u

static struct cgroup_bases *const bases = &worker.cgroups;

int cgroups_use(const char *name, const char *path)
{
	int *place = strcmp(name, "unified") == 0  ? &bases->unified
		     : strcmp(name, "memory") == 0 ? &bases->memory
		     : strcmp(name, "cpu") == 0	   ? &bases->cpu
		     : strcmp(name, "pids") == 0   ? &bases->pids
						   : NULL;

	if (!place || *place >= 0)
		return -EINVAL;
	*place = open(path, O_PATH | O_DIRECTORY | O_CLOEXEC);
	return *place < 0 ? -errno : 0;
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

static int keep_for_helpers(void)
{
	int error = bases->memory < 0 ? 0 : slot_put(bases->memory, SLOT_MEMORY);

	error = error || bases->cpu < 0 ? error : slot_put(bases->cpu, SLOT_CPU);
	return error || bases->pids < 0 ? error : slot_put(bases->pids, SLOT_PIDS);
}

int cgroups_finish(void)
{
	if (bases->unified < 0)
		return -EINVAL;
	bases->v2_memory = bases->memory < 0 && delegates("memory");
	bases->v2_cpu = bases->cpu < 0 && delegates("cpu");
	bases->v2_pids = bases->pids < 0 && delegates("pids");
	(void)delegates("io");
	bases->split = bases->v2_memory;
	return keep_for_helpers();
}

static int make_directory(int base, const char *id)
{
	return mkdirat(base, id, 0755) < 0 ? -errno : 0;
}

/* Below a sandbox the controllers only count, per exec; a kernel without one counts less. */
static int split_sandbox(struct sandbox *sandbox)
{
	(void)write_file_at(sandbox->cgroup, "cgroup.subtree_control", "+memory");
	(void)write_file_at(sandbox->cgroup, "cgroup.subtree_control", "+io");
	return make_directory(sandbox->cgroup, "init");
}

int cgroup_create(struct sandbox *sandbox)
{
	const int v1[] = {bases->memory, bases->cpu, bases->pids};
	int error = make_directory(bases->unified, sandbox->id);

	for (size_t i = 0; i < ARRAY_LEN(v1) && !error; i++)
		if (v1[i] >= 0)
			error = make_directory(v1[i], sandbox->id);
	if (error)
		return error;
	sandbox->cgroup =
		openat(bases->unified, sandbox->id, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
	if (sandbox->cgroup < 0)
		return -errno;
	return bases->split ? split_sandbox(sandbox) : 0;
}

static int set_number(int base, const struct sandbox *sandbox, const char *file, uint64_t value)
{
	char path[ID_MAX + 64];

	snprintf(path, sizeof(path), "%s/%s", sandbox->id, file);
	return write_number_at(base, path, value);
}

static int limit_memory(struct sandbox *sandbox)
{
	char path[ID_MAX + 64];
	int error;

	if (bases->memory >= 0) {
		error = set_number(bases->memory, sandbox, "memory.limit_in_bytes",
				   sandbox->limits.memory);
		if (!error) {
			int swap = set_number(bases->memory, sandbox, "memory.memsw.limit_in_bytes",
					      sandbox->limits.memory);

			/* Absent where the kernel does not count swap. */
			error = swap == -ENOENT ? 0 : swap;
		}
		snprintf(path, sizeof(path), "%s/memory.oom_control", sandbox->id);
		sandbox->oom = openat(bases->memory, path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
	} else if (bases->v2_memory) {
		error = write_number_at(sandbox->cgroup, "memory.max", sandbox->limits.memory);
		if (!error) {
			int swap = write_number_at(sandbox->cgroup, "memory.swap.max", 0);

			error = swap == -ENOENT ? 0 : swap;
		}
		sandbox->oom =
			openat(sandbox->cgroup, "memory.events", O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
	} else {
		return -EOPNOTSUPP;
	}
	if (error)
		return error;
	return sandbox->oom < 0 ? -errno : 0;
}

static int set_cpu(const struct sandbox *sandbox, uint64_t milli)
{
	uint64_t quota = milli * (CPU_PERIOD_US / 1000);
	char text[48];

	if (quota < 1000)
		quota = 1000;
	if (bases->cpu >= 0) {
		/* The period is that by default. */
		return set_number(bases->cpu, sandbox, "cpu.cfs_quota_us", quota);
	}
	if (!bases->v2_cpu)
		return -EOPNOTSUPP;
	snprintf(text, sizeof(text), "%llu %u", (unsigned long long)quota, CPU_PERIOD_US);
	return write_file_at(sandbox->cgroup, "cpu.max", text);
}

static void count_haste(struct sandbox *sandbox)
{
	uint64_t now = clock_ns(CLOCK_MONOTONIC);
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
	if (sandbox->hastened || !sandbox->limits.cpu_milli || sandbox->limits.cpu_milli >= DYING_MILLI)
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
	if (sandbox->hastened && set_cpu(sandbox, sandbox->limits.cpu_milli) == 0)
		sandbox->hastened = false;
}

static int limit_pids(struct sandbox *sandbox)
{
	if (bases->pids >= 0)
		return set_number(bases->pids, sandbox, "pids.max", sandbox->limits.pids);
	if (!bases->v2_pids)
		return -EOPNOTSUPP;
	return write_number_at(sandbox->cgroup, "pids.max", sandbox->limits.pids);
}

int cgroup_limit(struct sandbox *sandbox, const char **stage)
{
	int error = 0;

	if (sandbox->limits.memory) {
		*stage = "limit memory";
		error = limit_memory(sandbox);
	}
	if (!error && sandbox->limits.cpu_milli) {
		*stage = "limit cpu";
		error = set_cpu(sandbox, sandbox->limits.cpu_milli);
	}
	if (!error && sandbox->limits.pids) {
		*stage = "limit pids";
		error = limit_pids(sandbox);
	}
	return error;
}

int cgroup_open_init(struct sandbox *sandbox)
{
	const char *name = bases->split ? "init" : ".";
	int fd = openat(sandbox->cgroup, name, O_PATH | O_DIRECTORY | O_CLOEXEC);

	return fd < 0 ? -errno : fd;
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
	const int v1[] = {bases->memory, bases->cpu, bases->pids};
	int error = 0;

	close_quietly(&sandbox->oom);
	for (size_t i = 0; i < ARRAY_LEN(v1); i++)
		if (v1[i] >= 0) {
			int one = remove_directory(v1[i], sandbox->id);

			error = one ? one : error;
		}
	if (sandbox->cgroup >= 0) {
		int one = remove_directory(bases->unified, sandbox->id);

		if (one == -EBUSY) {
			one = remove_children(sandbox);
			one = one ? one : remove_directory(bases->unified, sandbox->id);
		}
		error = one ? one : error;
	} else {
		int one = remove_directory(bases->unified, sandbox->id);

		error = one ? one : error;
	}
	if (!error)
		close_quietly(&sandbox->cgroup);
	return error;
}

int cgroup_open_v1(const struct sandbox *sandbox, int tasks[V1_MAX])
{
	const int v1[V1_MAX] = {bases->memory, bases->cpu, bases->pids};
	char path[ID_MAX + 16];
	size_t len = strlen(sandbox->id);

	memcpy(path, sandbox->id, len);
	memcpy(path + len, "/tasks", sizeof("/tasks"));
	for (size_t i = 0; i < V1_MAX; i++) {
		if (v1[i] < 0)
			continue;
		tasks[i] = openat(v1[i], path, O_WRONLY | O_CLOEXEC | O_NOFOLLOW);
		if (tasks[i] < 0)
			return -errno;
	}
	return 0;
}

uint64_t cgroup_tasks(const struct sandbox *sandbox)
{
	char path[ID_MAX + 16], text[32];
	uint64_t count = 0;
	ssize_t len;

	snprintf(path, sizeof(path), "%s/pids.current", sandbox->id);
	len = read_file_at(bases->pids >= 0 ? bases->pids : bases->unified, path, text, sizeof(text));
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
	int fd;

	exec->cgroup = spare ? sandbox->spare_cgroup[--sandbox->spare_cgroups] : ++last;
	cgroup_exec_name(exec, "", name, sizeof(name));
	if (!spare && mkdirat(sandbox->cgroup, name, 0755) < 0) {
		exec->cgroup = 0;
		return -errno;
	}
	fd = openat(sandbox->cgroup, name, O_PATH | O_DIRECTORY | O_CLOEXEC);
	return fd < 0 ? -errno : fd;
}

/* 1, 0, or -errno. */
static int populated(const struct exec *exec)
{
	char path[64], text[128];
	ssize_t len;

	cgroup_exec_name(exec, "cgroup.events", path, sizeof(path));
	len = read_file_at(exec->sandbox->cgroup, path, text, sizeof(text));
	return len < 0 ? (int)len : number_after(text, "populated") != 0;
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
	char path[64], text[1024];

	if (!bases->split)
		return;
	cgroup_exec_name(exec, "memory.peak", path, sizeof(path));
	if (read_file_at(exec->sandbox->cgroup, path, text, sizeof(text)) > 0)
		parse_number(text, &usage->peak_bytes);
	cgroup_exec_name(exec, "cpu.stat", path, sizeof(path));
	if (read_file_at(exec->sandbox->cgroup, path, text, sizeof(text)) > 0) {
		usage->user_us = number_after(text, "user_usec");
		usage->system_us = number_after(text, "system_usec");
	}
	cgroup_exec_name(exec, "io.stat", path, sizeof(path));
	if (read_file_at(exec->sandbox->cgroup, path, text, sizeof(text)) > 0) {
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
	int watch;

	cgroup_exec_name(exec, "cgroup.events", name, sizeof(name));
	snprintf(path, sizeof(path), "/proc/self/fd/%d/%s", exec->sandbox->cgroup, name);
	watch = inotify_add_watch(worker.inotify, path, IN_MODIFY | IN_DONT_FOLLOW);
	return watch < 0 ? -errno : watch;
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

unsigned cgroup_pids(const struct sandbox *sandbox, const char *cgroup,
		     void (*each)(pid_t pid, void *context), void *context)
{
	struct pids pids = {each, context};
	auto_close int fd = -1;
	char path[64];

	snprintf(path, sizeof(path), "%s/cgroup.procs", cgroup);
	fd = openat(sandbox->cgroup, path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
	return fd < 0 ? 0 : each_number(fd, one_pid, &pids);
}
