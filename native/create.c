/*
 * PREPARE and CREATE: from nothing to a pid 1 that has set its sandbox up. PREPARE makes a blank: all
 * that needs neither image nor limits. CREATE makes the rest of one, or the whole at once.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include "init.h"
#include "kernel.h"
#include "spawner.h"

const char *step_name(size_t index)
{
	static const char *const steps[] = {
		"cgroup", "channel", "clone",	     "map", "devices",	"layers",
		"upper",  "overlay", "mount points", "go",  "writable", "limits",
	};

	return index < ARRAY_LEN(steps) ? steps[index] : init_step_name(index - ARRAY_LEN(steps));
}

static uint8_t clone_stack[32 << 10] __attribute__((aligned(16)));

/* --- what pid 1 is told -------------------------------------------------------------- */

/* If it has failed already, its report says at what. */
static int tell(const struct sandbox *sandbox, const void *data, size_t len, int fd)
{
	int error = message_send(sandbox->channel, data, len, fd);

	return error == -EPIPE || error == -ECONNRESET ? 0 : error;
}

static int open_channel(struct sandbox *sandbox, bool ahead, const char *inject, int *their_end)
{
	struct init_order order = {.ahead = ahead};
	int pair[2];

	TRY(check(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair)));
	sandbox->channel = pair[0];
	*their_end = pair[1];
	if (inject)
		snprintf(order.inject, sizeof(order.inject), "%s", inject);
	TRY(tell(sandbox, &order, sizeof(order), -1));
	return sandbox_listen(sandbox);
}

static int tell_config(const struct sandbox *sandbox, const struct create_spec *spec)
{
	struct init_config config = {.shm_bytes = spec->shm_bytes};

	snprintf(config.hostname, sizeof(config.hostname), "%s", spec->hostname);
	if (spec->root.inject)
		snprintf(config.inject, sizeof(config.inject), "%s", spec->root.inject);
	return tell(sandbox, &config, sizeof(config), -1);
}

/* --- its birth ----------------------------------------------------------------------- */

struct first_process {
	int tasks[CONTROLLERS];
	int error;
	const char *stage;
};

/* What setting up takes, and what decides whether root inside could reach a file. */
#define INIT_CAPS                                                                                  \
	(CAP_BIT(CAP_SYS_ADMIN) | CAP_BIT(CAP_NET_ADMIN) | CAP_BIT(CAP_SYS_RESOURCE) |              \
	 CAP_BIT(CAP_SETUID) | CAP_BIT(CAP_SETGID) | CAP_BIT(CAP_DAC_OVERRIDE))
#define CAP_BIT(name) (1u << (name))

/* Not root by any map yet, it would lose all capabilities by execve: ambient ones stay. */
static int keep_capabilities(void)
{
	struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
	struct __user_cap_data_struct data[2] = {
		{.effective = INIT_CAPS, .permitted = INIT_CAPS, .inheritable = INIT_CAPS}, {0}};

	TRY((int)raw(capset, &header, data));
	for (unsigned long cap = 0; cap < 32; cap++)
		if (INIT_CAPS & 1u << cap)
			TRY((int)raw(prctl, PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, cap, 0, 0));
	return 0;
}

/* Runs in our memory while we wait, and shares our descriptors until it has its own. */
NEVER_RETURNS static int first_process(void *context)
{
	struct first_process *first = context;

	first->stage = "enter cgroups";
	for (size_t i = 0; i < CONTROLLERS; i++)
		if (first->tasks[i] >= 0 && write(first->tasks[i], "0", 1) < 0)
			return first->error = -errno;
	first->stage = "capabilities";
	first->error = keep_capabilities();
	if (first->error)
		return 1;
	first->stage = "execute pid 1";
	first->error = execute_self(INIT_NAME);
	return 1;
}

/*
 * What a user namespace takes of limits per user (inotify instances: 128) counts for its owner too.
 * Were that root, one sandbox could use up what the host and all others have: its own root is it.
 */
static long clone_owned(uint32_t owner, struct clone_args *args, struct first_process *first)
{
	long pid = -EAGAIN;

	/* Capabilities stay, see settle(). */
	if (syscall(SYS_setresuid, owner, owner, owner) == 0)
		pid = clone_onto_stack(args, first_process, first);
	if (syscall(SYS_setresuid, 0, 0, 0) < 0)
		fatal("become root again");
	prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
	return pid;
}

static int clone_first(struct sandbox *sandbox, int their_end, const char **stage)
{
	struct first_process first = {.tasks = {-1, -1, -1}};
	auto_close int cgroup = cgroup_open_init(sandbox);
	struct clone_args args = {
		.flags = CLONE_VM | CLONE_VFORK | CLONE_FILES | CLONE_PIDFD | CLONE_CGROUP |
			 CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC |
			 CLONE_NEWUTS,
		.pidfd = (uint64_t)(uintptr_t)&sandbox->pidfd,
		.stack = (uint64_t)(uintptr_t)clone_stack,
		.stack_size = sizeof(clone_stack),
		.cgroup = (uint64_t)(unsigned)cgroup,
	};
	long pid;

	TRY(cgroup);
	TRY(slot_put(their_end, SLOT_CHANNEL));
	TRY(slot_put(worker.program, SLOT_PROGRAM));
	pid = cgroup_open_v1(sandbox, first.tasks);
	if (!pid)
		pid = clone_owned(sandbox->id_base, &args, &first);
	for (size_t i = 0; i < CONTROLLERS; i++)
		close_quietly(&first.tasks[i]);
	slot_clear(SLOT_CHANNEL);
	slot_clear(SLOT_PROGRAM);
	if (pid < 0)
		return (int)pid;
	sandbox->pid = (pid_t)pid;
	if (first.error)
		*stage = first.stage;
	return first.error;
}

static int map_ids(const struct sandbox *sandbox)
{
	char path[48], map[48];

	snprintf(map, sizeof(map), "0 %u 65536", sandbox->id_base);
	snprintf(path, sizeof(path), "%d/uid_map", sandbox->pid);
	TRY(write_file_at(worker.proc, path, map));
	snprintf(path, sizeof(path), "%d/gid_map", sandbox->pid);
	return write_file_at(worker.proc, path, map);
}

static int open_userns(const struct sandbox *sandbox, int *userns)
{
	char path[48];

	snprintf(path, sizeof(path), "%d/ns/user", sandbox->pid);
	TRY(*userns = check(openat(worker.proc, path, O_RDONLY | O_CLOEXEC)));
	return 0;
}

static void note_namespaces(struct sandbox *sandbox)
{
	static const char *const kinds[NAMESPACE_KINDS] = {"user", "mnt", "pid",   "net",
							   "ipc",  "uts", "cgroup"};
	auto_close int directory = -1;
	char path[32];
	struct stat st;

	snprintf(path, sizeof(path), "%d/ns", sandbox->pid);
	directory = openat(worker.proc, path, O_PATH | O_DIRECTORY | O_CLOEXEC);
	for (size_t i = 0; i < NAMESPACE_KINDS && directory >= 0; i++)
		if (fstatat(directory, kinds[i], &st, 0) == 0)
			sandbox->namespaces[i] = st.st_ino;
}

/* --- the steps ----------------------------------------------------------------------- */

/* All that needs neither image nor limits, up to a pid 1 that waits for its configuration. */
static int make_blank(struct sandbox *sandbox, bool ahead, const char *inject, int *userns,
		      const char **stage)
{
	auto_close int their_end = -1, dev = -1;

	TRY(begin_step("cgroup", inject, stage));
	TRY(cgroup_create(sandbox));
	TRY(begin_step("channel", inject, stage));
	TRY(open_channel(sandbox, ahead, inject, &their_end));
	TRY(begin_step("clone", inject, stage));
	TRY(clone_first(sandbox, their_end, stage));
	/* Pid 1 starts meanwhile; with its ids it makes the mounts that need no root. */
	TRY(begin_step("map", inject, stage));
	TRY(map_ids(sandbox));
	TRY(open_userns(sandbox, userns));
	TRY(begin_step("devices", inject, stage));
	TRY(dev = rootfs_take_dev(*userns, sandbox->id_base));
	return tell(sandbox, "", 1, dev);
}

static int make_rest(struct sandbox *sandbox, const struct create_spec *spec, int userns,
		     const char **stage)
{
	const char *inject = spec->root.inject;

	TRY(tell_config(sandbox, spec));
	TRY(sandbox->root = rootfs_make(&spec->root, sandbox->id_base, userns, stage));
	TRY(begin_step("go", inject, stage));
	TRY(tell(sandbox, "", 1, sandbox->root));
	/* What can wait is done while pid 1 does its last steps. */
	TRY(begin_step("writable", inject, stage));
	TRY(rootfs_check(sandbox->root, sandbox->id_base));
	TRY(begin_step("limits", inject, stage));
	return cgroup_limit(sandbox, stage);
}

/* One of its own, or the rest of a blank. */
static int make_sandbox(struct sandbox *sandbox, const struct create_spec *spec, bool blank,
			const char **stage)
{
	auto_close int userns = -1;

	if (blank)
		TRY(open_userns(sandbox, &userns));
	else
		TRY(make_blank(sandbox, false, spec->root.inject, &userns, stage));
	return make_rest(sandbox, spec, userns, stage);
}

/* Pid 1 has the word, or what has been made goes again: either is answered later. */
static int go_on(struct sandbox *sandbox, int error, const char *stage)
{
	if (error)
		create_failed(sandbox, error, stage);
	else
		rootfs_release(false);
	return 0;
}

static struct sandbox *begin(const struct create_spec *spec)
{
	struct sandbox *sandbox = timers_reserve() < 0 ? NULL : calloc(1, sizeof(*sandbox));

	if (!sandbox)
		return NULL;
	snprintf(sandbox->id, sizeof(sandbox->id), "%s", spec->id);
	sandbox->pidfd = sandbox->channel = sandbox->root = sandbox->cgroup = sandbox->oom = -1;
	sandbox->id_base = spec->id_base;
	sandbox->create_request = spec->request;
	sandbox_list(sandbox);
	return sandbox;
}

int sandbox_prepare(struct request *r, const struct create_spec *spec)
{
	const char *stage = "";
	auto_close int userns = -1;
	struct sandbox *sandbox;
	int error;

	if (sandbox_find(spec->id))
		return fail(r, EEXIST, "sandbox", "this id is in use");
	sandbox = begin(spec);
	if (!sandbox)
		return fail(r, ENOMEM, "memory", "");
	error = make_blank(sandbox, true, spec->root.inject, &userns, &stage);
	return go_on(sandbox, error, stage);
}

void prepared(struct sandbox *sandbox)
{
	struct builder *b;

	note_namespaces(sandbox);
	sandbox->state = SANDBOX_BLANK;
	b = answer_begin(TYPE_OK, sandbox->create_request);
	build_u64(b, TAG_NUMBER, (uint64_t)sandbox->pid);
	build_u64(b, TAG_NUMBER, sandbox->namespaces[NAMESPACE_NET]);
	sandbox->create_request = 0;
	answer_send(b);
	if (sandbox->unwanted)
		sandbox_destroy(sandbox, REQUEST_NOBODYS);
}

int sandbox_create(struct request *r, const struct create_spec *spec)
{
	struct sandbox *sandbox = sandbox_find(spec->id);
	bool blank = sandbox && sandbox->state == SANDBOX_BLANK;
	const char *stage = "map";
	int error;

	if (sandbox && (!blank || sandbox->id_base != spec->id_base))
		return fail(r, EEXIST, "sandbox", "this id is in use");
	sandbox = blank ? sandbox : begin(spec);
	if (!sandbox)
		return fail(r, ENOMEM, "memory", "");
	sandbox->state = SANDBOX_STARTING;
	sandbox->create_request = spec->request;
	sandbox->expires_ns = spec->keep.expires_ns;
	sandbox->no_new_privs = spec->flags & CREATE_FLAG_NO_NEW_PRIVS;
	sandbox->limits = spec->limits;
	if (spec->keep.note && !keep(spec->id, KEPT_SANDBOX, &spec->keep, &error))
		stage = "keep";
	else
		error = make_sandbox(sandbox, spec, blank, &stage);
	return go_on(sandbox, error, stage);
}

void answer_created(struct sandbox *sandbox, uint64_t request)
{
	uint64_t numbers[NAMESPACE_KINDS + 1];
	struct builder *b = answer_begin(TYPE_CREATED, request);

	numbers[0] = (uint64_t)sandbox->pid;
	memcpy(numbers + 1, sandbox->namespaces, sizeof(sandbox->namespaces));
	build_text(b, TAG_SANDBOX, sandbox->id);
	build_u64s(b, TAG_CREATED_NUMBERS, numbers, ARRAY_LEN(numbers));
	build_fd(b, TAG_ROOT_FD, sandbox->root);
	build_fd(b, TAG_PIDFD, sandbox->pidfd);
	answer_send(b);
}

void created(struct sandbox *sandbox)
{
	uint64_t request = sandbox->create_request;

	/* Not before pid 1 has reported: it makes one of them itself. */
	if (!sandbox->namespaces[0])
		note_namespaces(sandbox);
	sandbox->state = SANDBOX_LIVE;
	sandbox->ooms_seen = cgroup_ooms(sandbox);
	sandbox->create_request = 0;
	answer_created(sandbox, request);
	if (sandbox->unwanted)
		sandbox_destroy(sandbox, REQUEST_NOBODYS);
}
