/* What the parts of a worker share. One thread, one loop, one connection. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "frame.h"
#include "sha256.h"
#include "util.h"

enum controller { MEMORY, CPU, PIDS, CONTROLLERS };

/*
 * The lowest descriptors. Helpers copy only those below SLOT_END of our table, so that an exec
 * costs the same however many sandboxes are open; what a helper needs is put there first.
 */
enum slot {
	SLOT_OUT = 3,
	SLOT_ERR,
	SLOT_IN,
	SLOT_STATUS,
	SLOT_CHANNEL,
	SLOT_PROGRAM,
	SLOT_CGROUP,
	/* Bases of the version 1 hierarchies; there all the time, where they are used. */
	SLOT_V1,
	/* Last: a command needs it when those before are closed. */
	SLOT_PIDFD = SLOT_V1 + CONTROLLERS,
	SLOT_END,
};

#define LAYERS_MAX 128u
#define GROUPS_MAX 256u
#define WATCHERS_MAX 8u
#define KILLERS_MAX 8u
#define SIGNALS_MAX 8u
#define SPARE_CGROUPS_MAX 8u
#define ID_MAX 64u
#define INLINE_MAX (1u << 20)
#define SPOOL_MIN 8192u
#define STREAM_READ_MAX (64u << 10)

/* Something epoll tells us about. */
struct source {
	void (*ready)(struct source *source, uint32_t events);
};

/* Calls `fire` once at `at` (CLOCK_MONOTONIC); `index` is its place in the heap, or 0. */
struct timer {
	uint64_t at;
	size_t index;
	void (*fire)(struct timer *timer);
};

/* Streams of one sandbox that have something to read, and take turns (turns.c). */
struct lane {
	struct link link; /* in the ring of lanes, unless it is empty or has to wait */
	struct link streams;
	struct timer timer; /* until when it has to wait */
	uint64_t tokens, counted_ns; /* of its bucket: bytes, and when they were counted */
};

/* 0: none. Bytes, thousandths of a processor, processes. */
struct limits {
	uint64_t of[CONTROLLERS];
};

/* Who waits until everything in a sandbox is dead. */
struct killer {
	uint64_t request;
	uint64_t killed;
};

enum sandbox_state {
	SANDBOX_STARTING,
	SANDBOX_BLANK, /* made by PREPARE, waits for its CREATE */
	SANDBOX_LIVE,
	SANDBOX_DYING,
	SANDBOX_CLEANING,
	SANDBOX_GONE,
};

#define NAMESPACE_KINDS 7u
#define NAMESPACE_NET 3u

struct sandbox {
	struct sandbox *next; /* in its hash chain */
	struct exec *execs;
	unsigned exec_count;
	char id[ID_MAX + 1];
	enum sandbox_state state;
	uint32_t id_base;
	bool no_new_privs;
	/* How many of its next launches are not waited for, since one was slow. */
	unsigned slow;
	unsigned launches; /* under way */
	bool hastened;
	uint64_t haste_ns, haste_counted_ns; /* how much longer it may be, and when that was counted */
	struct link queue; /* execs that wait for one of those to end */
	bool taking_turns;
	bool listed;
	bool unwanted; /* ends as soon as it is made: its daemon has gone, and noted nothing of it */
	bool channel_ended;
	pid_t pid;
	int pidfd;
	int channel; /* socket whose other end only pid 1 holds */
	int root;
	int cgroup; /* its directory in the unified hierarchy */
	/* Numbers of those that execs have left empty, for the next ones: to make one costs more. */
	uint64_t spare_cgroup[SPARE_CGROUPS_MAX];
	unsigned spare_cgroups;
	int oom; /* counts OOM kills; -1 without a memory limit */
	struct limits limits;
	uint64_t ooms_seen;
	uint64_t oom_ns; /* when it was seen last that there were more, CLOCK_MONOTONIC */
	uint64_t namespaces[NAMESPACE_KINDS]; /* inodes: user, mnt, pid, net, ipc, uts, cgroup */
	uint64_t expires_ns; /* CLOCK_REALTIME; 0: never. What runs then is killed if there is no daemon */
	uint64_t gone_cause, gone_code; /* once it has ended by itself */
	uint64_t create_request; /* or that of PREPARE */
	uint64_t destroy_request;
	unsigned killers;
	struct killer killer[KILLERS_MAX];
	int fault; /* errno of a failed create */
	char fault_stage[24];
	int exit_status;
	unsigned tries;
	struct source channel_source;
	struct source pidfd_source;
	struct timer timer;
	struct timer lease;
	struct lane running; /* streams of commands that run */
	struct lane bulk; /* those of them that have had much */
	struct lane leftover; /* streams of what ended commands have left */
};

struct stream {
	struct source source;
	struct exec *exec;
	struct link link; /* in its lane, while there is something to read */
	struct lane *lane;
	int fd;
	bool eof;
	uint64_t total;
	struct sha256 sha;
	uint8_t *held; /* the whole stream while it is short and nobody asked for the spool */
	uint32_t held_len;
	uint32_t held_cap;
	int spool;
	int spool_errno;
};

struct usage {
	uint64_t user_us;
	uint64_t system_us;
	uint64_t peak_bytes;
	uint64_t read_bytes;
	uint64_t write_bytes;
};

struct watcher {
	uint64_t request;
	uint64_t seen_out;
	uint64_t seen_err;
};

/* One that waits for its command to be launched. */
struct early_signal {
	uint64_t request;
	int signum;
	enum scope scope;
};

struct exec {
	struct exec *next; /* in its hash chain */
	struct exec *sibling; /* in its sandbox */
	struct sandbox *sandbox;
	uint64_t id;
	uint64_t cgroup; /* its number; 0: it has none yet */
	uint64_t request;
	struct kept *kept; /* until its last answer is there */
	struct launch *launch; /* until the command runs, or cannot */
	struct link queued; /* its launch has not begun */
	bool pty;
	pid_t pid; /* of the leader, in the sandbox */
	bool listed;
	bool leader_gone; /* its status and usage are known */
	bool ended; /* and the node has been told */
	bool killed; /* by us: its SIGKILL is no sign of the OOM killer */
	bool cgroup_gone;
	bool cgroup_killed; /* the kernel kills whoever is born in it later, too */
	bool forgotten; /* by the node: its output is kept no more */
	enum reason cause; /* of our kill */
	int status;
	struct usage usage;
	int watch; /* inotify descriptor of its cgroup's events, or -1 */
	uint64_t spool_bytes;
	uint64_t inline_bytes;
	uint64_t kill_bytes;
	uint64_t began_ns; /* CLOCK_MONOTONIC */
	uint64_t began_real_ns;
	uint64_t deadline; /* CLOCK_MONOTONIC, or 0 */
	uint64_t expires_ns; /* CLOCK_REALTIME; 0: never. Then it is killed if there is no daemon */
	uint64_t ooms_before;
	struct timer timer;
	unsigned tries;
	unsigned watchers;
	struct watcher watcher[WATCHERS_MAX];
	unsigned signals;
	struct early_signal signal[SIGNALS_MAX];
	struct stream out;
	struct stream err;
};

struct cgroup_bases {
	int unified;
	int v1[CONTROLLERS]; /* or -1 */
	bool v2[CONTROLLERS];
	bool split; /* controllers are delegated below a sandbox: pid 1 needs a leaf of its own */
};

struct request;

struct worker {
	int epoll;
	int inotify;
	int null;
	int proc;
	int layers; /* our attached copy */
	int spool;
	int program; /* the sealed memfd */
	int home_mounts;
	int home_network;
	int home_pids;
	uint64_t files; /* RLIMIT_NOFILE */
	bool greeted;
	bool ending;
	bool swollen; /* has given back memory since it was last forgotten how much it had */
	uint64_t sandboxes;
	uint64_t execs;
	uint64_t started_ns; /* when the command that came last began, CLOCK_MONOTONIC */
	uint64_t kept_files;
	struct cgroup_bases cgroups;
	struct source inotify_source;
};

extern struct worker worker;

/* --- loop.c --- */
int loop_add(int fd, struct source *source, uint32_t events);
/* Ask again after an event of a source that was added with EPOLLONESHOT. */
int loop_again(int fd, struct source *source, uint32_t events);
void loop_remove(int fd);
/* The same, and close it: others may hold the same open file, whose watch closing would not end. */
void loop_close(int *fd);
/* Room for the timers of one sandbox or exec more. Returns 0 or -ENOMEM. */
int timers_reserve(void);
void timer_set(struct timer *timer, uint64_t at);
void timer_in(struct timer *timer, uint64_t ns);
void timer_cancel(struct timer *timer);
/* Milliseconds until the next timer, for epoll; fires those that are due. */
int timers_run(void);
/* Free it when no event of this turn can point to it any more. Its first word is used for that. */
void free_later(void *block);
void free_blocks(void);
int slot_put(int fd, enum slot slot);
void slot_clear(enum slot slot);
/* A copy above the slots, or -errno. */
int dup_cloexec(int fd);

/* --- connection.c --- */
void connection_open(int fd);
bool connection_alive(void);
/* Its peer is a daemon of ours: it gets events, too. */
void connection_greeted(void);
bool connection_is_greeted(void);
/*
 * Whether whoever made this request waits for its answer: numbers of a daemon's requests begin above those
 * of the daemons before it. 0: an event.
 */
bool request_is_current(uint64_t request);
/* The connection ends with this process, whoever else holds its socket. Takes the pidfd. */
int connection_watch(int pidfd);
/* Begin an answer in the shared buffer. Only one is built at a time. */
struct builder *answer_begin(enum type type, uint64_t request);
void answer_send(struct builder *b);
/* As `answer_error`, to be sent by the caller. */
struct builder *error_begin(uint64_t request, int error, const char *stage, const char *message);
void answer_error(uint64_t request, int error, const char *stage, const char *message);
void answer_ok(uint64_t request);
void answer_number(uint64_t request, uint64_t value);

/* --- keep.c --- */
#define KEEP_FDS_MAX 6u
struct kept;
enum kept_kind {
	KEPT_PLAIN,
	KEPT_SANDBOX,
	KEPT_EXEC,
};
struct keep_spec {
	const uint8_t *note; /* NULL: nothing is to be kept */
	size_t note_len;
	bool has_fds; /* whether descriptors are said, even if none */
	unsigned count;
	int fds[KEEP_FDS_MAX];
	bool expires; /* whether the next is said */
	uint64_t expires_ns; /* CLOCK_REALTIME; 0: never */
};
/* Keep copies under a name, or replace those. Returns NULL with -errno. */
struct kept *keep(const char *name, enum kept_kind kind, const struct keep_spec *spec, int *error);
bool kept_has(const char *name);
/* It is that of a command, whose last answer will be kept, too. */
void keep_exec(struct kept *kept, struct exec *exec);
/* Whether something has come through a pipe that is kept with it, which nobody has read. */
bool kept_waits(const struct kept *kept);
void keep_answer(struct exec *exec, const struct builder *b);
/* Keep it no longer, unless it is of a command that runs. */
void keep_drop(const char *name);

/* --- attach.c --- */
/* Outlive the connection: the next one comes here. Takes the descriptor. Returns 0 or -errno. */
int attach_listen(int fd, uint64_t grace_ns);
/* Whether another connection may come. */
bool attach_possible(void);
/* A daemon is there. */
void attach_done(void);
/* See to it that what needs one does without, if there is none. */
void attach_tend(void);

/* --- requests.c --- */
/* What a handler returns to have its request answered so. */
int fail(struct request *r, int error, const char *stage, const char *message);
/* Handle one frame; takes what it uses of `fds` (sets it to -1). -errno: the peer is broken. */
int request_handle(struct frame *frame, int *fds);

/* --- cgroup.c --- */
/* NAME=PATH of a hierarchy. */
int cgroups_use(const char *named);
int cgroups_finish(void);
int cgroup_create(struct sandbox *sandbox);
int cgroup_limit(struct sandbox *sandbox, const char **stage);
/* While something of it is killed, its limit of processor time is a higher one. */
void cgroup_hasten(struct sandbox *sandbox);
/* Whether that has been going on for as long as it may. */
bool cgroup_haste_spent(struct sandbox *sandbox);
void cgroup_slow_down(struct sandbox *sandbox);
/* A descriptor of the cgroup that pid 1 is cloned into. */
int cgroup_open_init(struct sandbox *sandbox);
/* 0 when nothing is left, -EBUSY while something is. */
int cgroup_remove(struct sandbox *sandbox);
/* Where pid 1 to be enters by writing "0": a file that root opened lets anybody. -1: not there. */
int cgroup_open_v1(const struct sandbox *sandbox, int tasks[CONTROLLERS]);
/* What the limit of processes counts: threads, and the dead that nobody waited for; 0: unknown. */
uint64_t cgroup_tasks(const struct sandbox *sandbox);
uint64_t cgroup_ooms(const struct sandbox *sandbox);
/* A descriptor of its cgroup, which is the sandbox's spare one or a new one; or -errno. */
int cgroup_exec_create(struct exec *exec);
/*
 * When nothing is left in it: gone, or kept as the sandbox's spare one, as to make and to remove one
 * is a twentieth of an exec. Never one that was killed, or that controllers have counted for.
 * -EBUSY: something is.
 */
int cgroup_exec_remove(const struct exec *exec);
int cgroup_exec_kill(struct exec *exec);
bool cgroup_exec_populated(const struct exec *exec);
void cgroup_exec_usage(const struct exec *exec, struct usage *usage);
int cgroup_exec_watch(const struct exec *exec);
void inotify_forget(int watch);
void inotify_prepare(void);
/* Call `each`, if there is one, for every pid in its cgroup; returns how many there were. */
unsigned cgroup_exec_pids(const struct exec *exec, void (*each)(pid_t pid, void *context),
			  void *context);
void cgroup_exec_name(const struct exec *exec, const char *file, char *buf, size_t size);

/* --- rootfs.c --- */
struct root_spec {
	int upper;
	uint64_t tmpfs_bytes;
	const char *layers[LAYERS_MAX];
	size_t layer_count;
	const char *inject;
};

/*
 * Make the root of a sandbox as a detached mount, owned by its ids. Returns it, or -errno with
 * `stage` set.
 */
int rootfs_make(const struct root_spec *spec, uint32_t id_base, int userns, const char **stage);
/* Whether what is written into it is kept. Returns 0 or -errno. */
int rootfs_check(int root, uint32_t id_base);
/* A /dev for a sandbox, as a detached mount, or -errno. */
int rootfs_take_dev(int userns, uint32_t id_base);
/*
 * Close what rootfs_make left open. Each mount that goes waits for a grace period of the kernel's, in
 * which neither we nor pid 1 could go on: unless `at_once`, that is done a little later.
 */
void rootfs_release(bool at_once);
int rootfs_prepare(int layers);
/* Make files as these ids, until it is 0 again. */
void act_as(uint32_t uid, uint32_t gid);
/* Say that this step of a create comes next. -EIO if the tests want it to fail. */
int begin_step(const char *step, const char *inject, const char **stage);
/* Go to the host's mounts, or back to ours. */
int rootfs_at_home(bool home);

/* --- create.c --- */
/* The steps of a create, pid 1's behind the worker's; NULL behind the last. */
const char *step_name(size_t index);
struct create_spec {
	const char *id;
	const char *hostname;
	uint64_t flags;
	uint64_t shm_bytes;
	uint32_t id_base;
	struct limits limits;
	struct root_spec root;
	struct keep_spec keep;
	uint64_t request;
};
/* Make a blank under an id: of `spec`, what is not said here is not looked at. */
int sandbox_prepare(struct request *r, const struct create_spec *spec);
/* Go on with the blank of this id, or make all of a sandbox at once. */
int sandbox_create(struct request *r, const struct create_spec *spec);
/* Pid 1 waits for its configuration. */
void prepared(struct sandbox *sandbox);
/* Pid 1 has done the last step. */
void created(struct sandbox *sandbox);
void answer_created(struct sandbox *sandbox, uint64_t request);

/* --- sandbox.c --- */
/* Of what we do by ourselves: lower than any that is answered, once there may be several daemons. */
#define REQUEST_NOBODYS 1u
void sandbox_list(struct sandbox *sandbox);
/* Hear what its pid 1 reports. */
int sandbox_listen(struct sandbox *sandbox);
/* A step failed: clear up, then answer so. */
void create_failed(struct sandbox *sandbox, int error, const char *stage);
struct sandbox *sandbox_find(const char *id);
void sandbox_destroy(struct sandbox *sandbox, uint64_t request);
void sandbox_kill_all(struct sandbox *sandbox, uint64_t request);
void sandbox_kill_progress(struct sandbox *sandbox);
void sandboxes_end(void);
void sandboxes_each(void (*each)(struct sandbox *sandbox));
/* Without a daemon its lease is held here, and what nobody would find again ends. */
void sandbox_lease_on(struct sandbox *sandbox);
void sandbox_lease_off(struct sandbox *sandbox);
/* Answer as to its CREATE, once it is made. */
void sandbox_await(struct sandbox *sandbox, uint64_t request);

/* --- exec.c --- */
struct exec_spec {
	struct sandbox *sandbox;
	uint64_t request;
	uint64_t id;
	uint32_t uid, gid;
	uint32_t mask;
	uint64_t deadline_ns;
	uint64_t spool_bytes, inline_bytes, kill_bytes;
	uint16_t rows, cols;
	uint64_t flags;
	const char *cwd;
	char **argv, **env;
	size_t group_count;
	uint32_t groups[GROUPS_MAX];
	int in, status; /* or -1 */
	struct keep_spec keep;
};
struct exec *exec_find(uint64_t id);
/* There is no daemon, or one again. */
void exec_lease_on(struct exec *exec);
void exec_lease_off(struct exec *exec);
static inline bool is_queued(const struct exec *exec)
{
	return exec->queued.next;
}
struct exec *exec_of_pid(struct sandbox *sandbox, pid_t pid);
/* Make it known; its timer runs. Returns NULL without memory. */
struct exec *exec_new(struct request *r, const struct exec_spec *spec);
/* Its launch has ended: the command runs, or has. */
void exec_started(struct exec *exec, pid_t pid, bool tell);
/* Nothing of it was executed. */
void exec_failed(struct exec *exec, int error, const char *stage, const char *message);
void exec_leader_ended(struct exec *exec, int status, const struct usage *usage);
/* The sandbox is no more: end it if it runs, and forget it. */
void exec_sandbox_gone(struct exec *exec);
void exec_kill(struct exec *exec, enum reason cause);
void exec_check_cgroup(struct exec *exec);
/* Whoever watched them has gone. */
void execs_unwatch(void);
void exec_cgroup_event(int watch);

/* --- news.c --- */
void exec_answer_progress(const struct exec *exec, uint64_t request);
void exec_tell_watchers(struct exec *exec);
/* The command runs: what has been asked for is told. */
void exec_tell_started(const struct exec *exec);
/* A stream has moved on: tell watchers, enforce the kill limit. */
void exec_progress(struct exec *exec);
int exec_output(struct request *r, struct exec *exec);
int exec_watch(struct request *r, struct exec *exec, const uint64_t seen[2]);
void exec_mark(struct exec *exec, uint64_t request);
/* This request is answered from now on as its EXEC would be. */
void exec_await(struct exec *exec, uint64_t request);
int exec_forget(struct request *r, struct exec *exec);
void exec_signal(struct exec *exec, uint64_t request, int signum, enum scope scope);

/* --- launch.c --- */
/* A launch with a copy of what `spec` points to, and its descriptors, which it takes; or NULL. */
struct launch *launch_new(struct request *r, const struct exec_spec *spec, struct exec *exec);
const struct exec_spec *launch_spec(const struct launch *launch);
/*
 * Begin it with what is in the slots, which are free again then, and wait a little for its end.
 * Returns false if it goes on: exec_launched follows.
 */
bool launch_begin(struct launch *launch, uint64_t patience_ns);
/* The command's pid in the sandbox; 0 while there is none. */
pid_t launch_pid(const struct launch *launch);
/* From now on the command is not executed; false if that has begun. */
bool launch_close(struct launch *launch);
/* Once it has ended: the command's pid, or -errno with `stage` set if nothing was executed. */
pid_t launch_result(const struct launch *launch, const char **stage);
/* Nobody waits for it any more; its memory is used again when nothing runs in it. */
void launch_release(struct launch *launch);
/* Whether some are left that have to be reaped soon: until then their sandbox's pid 1 cannot end. */
bool launches_reap(void);
int launch_measure(const char *path, uint64_t *durations, size_t count);

/* --- start.c --- */
int exec_start(struct request *r, const struct exec_spec *spec);
void exec_launched(struct exec *exec);
/* Its launch has not ended at its deadline, at the limit for launches, or after it was killed. */
void exec_overdue(struct exec *exec);
/* It shall not begin, or nobody waits for it any more. */
void exec_unlaunch(struct exec *exec);

/* --- output.c --- */
void stream_open(struct stream *stream, struct exec *exec, int fd);
/* Be told when there is something to read, for the first time. */
void stream_watch(struct stream *stream);
/* Read what is in it now and no more, however much is written meanwhile. */
void stream_drain(struct stream *stream);
int stream_spool(struct stream *stream);
/* Who holds the command's end gets what is written after it too: in the spool. */
void stream_keep(struct stream *stream);
/* All of it has come: say in the spool's size how much that was, where the ring does not. */
void stream_state_total(const struct stream *stream);
void stream_close(struct stream *stream);
/* From now on it is drained and counted, but kept no more. */
void stream_forget(struct stream *stream);
/* Read once, STREAM_READ_MAX at most. Returns how much that was; 0 at the end, or if nothing is there. */
size_t stream_read(struct stream *stream, size_t most);
/* Nothing is there: wait until there is. */
void stream_await(struct stream *stream);

/* --- turns.c --- */
/* A new one: it is watched a moment later. */
void turns_begin(struct stream *stream);
/* It has something to read: put it in line, behind the others. */
void turns_join(struct stream *stream);
void turns_leave(struct stream *stream);
/* Whether it is time to read one. */
bool turns_due(void);
/* Read a little of those whose time it is. */
void turns_run(void);

/* --- inspect.c --- */
struct process {
	pid_t pid; /* in the sandbox */
	char name[16];
	size_t name_len;
};
/* -ESRCH for what is not, or not any more, of this exec; NULL: whoever has the pid. */
int process_read(const struct exec *exec, pid_t host_pid, struct process *process);
/* Whether pid 1 exits, or has: the first to know, and at a price. */
bool sandbox_ends(const struct sandbox *sandbox);
/* A field of numbers and the name. */
void build_process(struct builder *b, uint16_t tag, const struct process *process,
		   const uint64_t *numbers, size_t count);
/* Host pid of the leader, or 0. */
pid_t inspect_host_pid(const struct exec *exec);
/* Signal processes of a running exec; returns how many were reached. */
unsigned inspect_signal(const struct exec *exec, int signum, enum scope scope);
void inspect_processes(struct sandbox *sandbox, uint64_t request);

/* --- remove.c --- */
/* Takes the descriptor. Returns 0, and answers later, or -errno. */
int remove_tree(int dir, const char *name, uint64_t request);
