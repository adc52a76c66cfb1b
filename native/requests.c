/* What each request asks for, checked and handed on. */
#define _GNU_SOURCE
#include <sched.h>
#include <string.h>
#include <sys/socket.h>

#include "request.h"

#define NAME_LENGTH_MAX 255u
#define INJECT_MAX 22u
#define MEASURE_MAX 1000u
/* More than execve takes, as each costs it nine bytes of two MiB at least. */
#define STRINGS_MAX (1u << 18)

/* --- sandboxes ------------------------------------------------------------------------ */

/* The id base: never ids that the host itself may use. */
static int check_new(struct request *r, const char *id, uint64_t id_base)
{
	size_t len = id ? strspn(id, "0123456789abcdefghijklmnopqrstuvwxyz"
				     "ABCDEFGHIJKLMNOPQRSTUVWXYZ._-")
			: 0;

	if (len == 0 || len > ID_MAX || id[len] != '\0' || id[0] == '.')
		return refuse(r, EINVAL, "not an id of a sandbox");
	if (id_base < 65536 || id_base % 65536 || id_base > UINT32_MAX - 65536)
		return refuse(r, EINVAL, "the id base is not a multiple of 65536 above 0");
	return 0;
}

static int handle_create(struct request *r)
{
	struct create_spec spec = {.root.upper = -1, .request = r->frame->request};
	uint64_t numbers[7] = {0};

	TRY(TAKE_OTHERS(r, take_keep_field, &spec.keep, TEXT(TAG_SANDBOX, &spec.id, ID_MAX),
			TEXT(TAG_HOSTNAME, &spec.hostname, 64),
			NUMBERS(TAG_CREATE_NUMBERS, numbers, ARRAY_LEN(numbers)),
			TEXTS(TAG_LAYER, spec.root.layers, &spec.root.layer_count),
			DESCRIPTOR(TAG_UPPER_FD, &spec.root.upper),
			TEXT(TAG_INJECT, &spec.root.inject, INJECT_MAX)));
	if (!spec.hostname || !spec.root.layer_count)
		return refuse(r, EINVAL, "host name or layers are missing");
	TRY(check_new(r, spec.id, numbers[0]));
	spec.id_base = (uint32_t)numbers[0];
	memcpy(spec.limits.of, numbers + 1, sizeof(spec.limits));
	spec.shm_bytes = numbers[4];
	spec.root.tmpfs_bytes = numbers[5];
	spec.flags = numbers[6];
	if (spec.flags & ~(uint64_t)CREATE_FLAG_NO_NEW_PRIVS)
		return refuse(r, EPROTO, "an unknown flag");
	return sandbox_create(r, &spec);
}

static int handle_prepare(struct request *r)
{
	struct create_spec spec = {.root.upper = -1, .request = r->frame->request};
	uint64_t id_base = 0;

	TRY(TAKE(r, TEXT(TAG_SANDBOX, &spec.id, ID_MAX), NUMBERS(TAG_PREPARE_NUMBERS, &id_base, 1),
		 TEXT(TAG_INJECT, &spec.root.inject, INJECT_MAX)));
	TRY(check_new(r, spec.id, id_base));
	spec.id_base = (uint32_t)id_base;
	return sandbox_prepare(r, &spec);
}

static int find_sandbox(struct request *r, const char *id, struct sandbox **sandbox)
{
	if (!id)
		return refuse(r, EINVAL, "no sandbox is named");
	*sandbox = sandbox_find(id);
	return *sandbox ? 0 : fail(r, ENOENT, "sandbox", "it is not known");
}

/* Those that name a sandbox and say no more. */
static int handle_whole_sandbox(struct request *r)
{
	struct sandbox *sandbox;
	const char *id = NULL;

	TRY(TAKE(r, TEXT(TAG_SANDBOX, &id, ID_MAX)));
	TRY(find_sandbox(r, id, &sandbox));
	if (r->frame->type == TYPE_KILL_ALL)
		sandbox_kill_all(sandbox, r->frame->request);
	else if (r->frame->type == TYPE_DESTROY)
		sandbox_destroy(sandbox, r->frame->request);
	else
		inspect_processes(sandbox, r->frame->request);
	return 0;
}

static int open_socket_in(const struct sandbox *sandbox, int domain, int type)
{
	int fd;

	TRY(check(setns(sandbox->pidfd, CLONE_NEWNET)));
	fd = check(socket(domain, type | SOCK_CLOEXEC, 0));
	/* Only a full kernel memory can refuse this; nothing more may happen in there. */
	if (setns(worker.home_network, CLONE_NEWNET) < 0)
		fatal("leave a sandbox's network");
	return fd;
}

static int handle_socket(struct request *r)
{
	uint64_t numbers[2] = {0};
	struct sandbox *sandbox;
	const char *id = NULL;
	auto_close int fd = -1;
	struct builder *b;

	TRY(TAKE(r, TEXT(TAG_SANDBOX, &id, ID_MAX), NUMBERS(TAG_SOCKET_NUMBERS, numbers, 2)));
	TRY(find_sandbox(r, id, &sandbox));
	if (sandbox->state != SANDBOX_LIVE)
		return fail(r, ESRCH, "sandbox", "it is gone");
	if (numbers[0] > INT16_MAX || numbers[1] > INT16_MAX)
		return fail(r, EINVAL, "socket", "");
	r->stage = "socket";
	TRY(fd = open_socket_in(sandbox, (int)numbers[0], (int)numbers[1]));
	b = answer_begin(TYPE_SOCKET_MADE, r->frame->request);
	build_fd(b, TAG_MADE_FD, fd);
	answer_send(b);
	return 0;
}

/* --- execs ----------------------------------------------------------------------------- */

struct strings {
	size_t count;
	char *at[STRINGS_MAX + 1];
};

static struct strings arguments, variables;

static int take_string(struct request *r, const struct field *field, struct strings *strings)
{
	if (memchr(field->data, '\0', field->len))
		return refuse(r, EINVAL, "an argument or variable holds a NUL");
	if (strings->count == STRINGS_MAX)
		return refuse(r, E2BIG, "too many arguments or variables");
	strings->at[strings->count++] = (char *)field->data;
	return 0;
}

static int take_group(struct request *r, const struct field *field, struct exec_spec *spec)
{
	uint64_t group;

	if (spec->group_count == GROUPS_MAX)
		return refuse(r, EINVAL, "too many groups");
	TRY(take_numbers(r, field, &group, 1));
	spec->groups[spec->group_count++] = (uint32_t)group;
	return 0;
}

static int take_exec_field(struct request *r, const struct field *field, void *context)
{
	struct exec_spec *spec = context;

	if (field->tag == TAG_ARG)
		TRY(take_string(r, field, &arguments));
	else if (field->tag == TAG_ENV)
		TRY(take_string(r, field, &variables));
	else if (field->tag == TAG_GROUP)
		TRY(take_group(r, field, spec));
	else
		return take_keep_field(r, field, &spec->keep);
	return 1;
}

static int set_exec_numbers(struct request *r, const uint64_t n[11], struct exec_spec *spec)
{
	if (n[1] >= UINT32_MAX || n[2] >= UINT32_MAX || n[3] > 0777 || n[8] > UINT16_MAX ||
	    n[9] > UINT16_MAX || n[10] > 15 || n[4] > INT64_MAX / 2 || n[5] > INT64_MAX / 2)
		return refuse(r, EINVAL, "a number is out of range");
	spec->id = n[0];
	spec->uid = (uint32_t)n[1];
	spec->gid = (uint32_t)n[2];
	spec->mask = (uint32_t)n[3];
	spec->deadline_ns = n[4];
	spec->spool_bytes = n[5];
	spec->inline_bytes = n[6];
	spec->kill_bytes = n[7];
	spec->rows = (uint16_t)n[8];
	spec->cols = (uint16_t)n[9];
	spec->flags = n[10];
	return 0;
}

static int handle_exec(struct request *r)
{
	static struct exec_spec spec;
	uint64_t numbers[11] = {0};
	const char *id = NULL;

	spec = (struct exec_spec){.in = -1, .status = -1, .request = r->frame->request};
	arguments.count = variables.count = 0;
	TRY(TAKE_OTHERS(r, take_exec_field, &spec, TEXT(TAG_SANDBOX, &id, ID_MAX),
			NUMBERS(TAG_EXEC_NUMBERS, numbers, ARRAY_LEN(numbers)),
			TEXT(TAG_CWD, &spec.cwd, TEXT_MAX), DESCRIPTOR(TAG_STDIN_FD, &spec.in),
			DESCRIPTOR(TAG_STATUS_FD, &spec.status)));
	TRY(set_exec_numbers(r, numbers, &spec));
	if (!spec.cwd || !arguments.count || !spec.id)
		return refuse(r, EINVAL, "id, arguments or working directory are missing");
	TRY(find_sandbox(r, id, &spec.sandbox));
	arguments.at[arguments.count] = variables.at[variables.count] = NULL;
	spec.argv = arguments.at;
	spec.env = variables.at;
	return exec_start(r, &spec);
}

static int handle_exec_request(struct request *r)
{
	uint64_t id = 0, numbers[2] = {0}, request = r->frame->request;
	enum type type = (enum type)r->frame->type;
	struct exec *exec;

	if (type == TYPE_SIGNAL)
		TRY(TAKE(r, NUMBERS(TAG_EXEC_ID, &id, 1), NUMBERS(TAG_SIGNAL_NUMBERS, numbers, 2)));
	else if (type == TYPE_EXEC_WATCH)
		TRY(TAKE(r, NUMBERS(TAG_EXEC_ID, &id, 1), NUMBERS(TAG_SEEN, numbers, 2)));
	else
		TRY(TAKE(r, NUMBERS(TAG_EXEC_ID, &id, 1)));
	exec = exec_find(id);
	if (!exec || exec->forgotten)
		return fail(r, ENOENT, "exec", "it is not known, or kept no more");
	if (type == TYPE_EXEC_OUTPUT)
		return exec_output(r, exec);
	if (type == TYPE_EXEC_WATCH)
		return exec_watch(r, exec, numbers);
	if (type == TYPE_EXEC_FORGET)
		return exec_forget(r, exec);
	if (type == TYPE_EXEC_MARK)
		exec_mark(exec, request);
	else if (numbers[0] > 64 || numbers[1] < SCOPE_LEADER || numbers[1] > SCOPE_CHILDREN)
		return fail(r, EINVAL, "signal", "no such signal or scope");
	else
		exec_signal(exec, request, (int)numbers[0], (enum scope)numbers[1]);
	return 0;
}

/* --- the machine ------------------------------------------------------------------------ */

static int handle_end(struct request *r)
{
	worker.ending = true;
	answer_ok(r->frame->request);
	return 0;
}

static int handle_remove_tree(struct request *r)
{
	const char *name = NULL;
	int dir = -1;

	TRY(TAKE(r, DESCRIPTOR(TAG_DIRECTORY_FD, &dir), TEXT(TAG_NAME, &name, NAME_LENGTH_MAX)));
	if (dir < 0 || !name)
		return refuse(r, EINVAL, "directory or name are missing");
	if (!*name || strchr(name, '/') || strcmp(name, ".") == 0 || strcmp(name, "..") == 0)
		return refuse(r, EINVAL, "not a name in a directory");
	r->stage = "remover";
	return remove_tree(keep_fd(r, dir), name, r->frame->request);
}

static int handle_stat(struct request *r)
{
	struct builder *b;

	TRY(TAKE(r, {0}));
	b = answer_begin(TYPE_OK, r->frame->request);
	build_u64(b, TAG_NUMBER, (uint64_t)getpid());
	build_u64(b, TAG_NUMBER, worker.sandboxes);
	build_u64(b, TAG_NUMBER, worker.execs);
	answer_send(b);
	return 0;
}

static int handle_measure(struct request *r)
{
	static uint64_t durations[MEASURE_MAX];
	const char *path = NULL;
	uint64_t count = 0;
	struct builder *b;
	int error;

	TRY(TAKE(r, NUMBERS(TAG_COUNT, &count, 1), TEXT(TAG_PATH, &path, TEXT_MAX)));
	if (!path || count < 1 || count > MEASURE_MAX)
		return refuse(r, EINVAL, "path, or a count within 1 to 1000, is missing");
	r->stage = "measure";
	TRY(rootfs_at_home(true));
	error = launch_measure(path, durations, count);
	if (rootfs_at_home(false) < 0)
		fatal("leave the host's mounts");
	TRY(error);
	b = answer_begin(TYPE_OK, r->frame->request);
	build_u64s(b, TAG_DURATIONS, durations, count);
	answer_send(b);
	return 0;
}

/* --- all of them ------------------------------------------------------------------------ */

static int (*const handlers[])(struct request *r) = {
	[TYPE_HELLO] = handle_hello,
	[TYPE_ATTACH] = handle_attach,
	[TYPE_END] = handle_end,
	[TYPE_CREATE] = handle_create,
	[TYPE_PREPARE] = handle_prepare,
	[TYPE_KILL_ALL] = handle_whole_sandbox,
	[TYPE_DESTROY] = handle_whole_sandbox,
	[TYPE_PROCESSES] = handle_whole_sandbox,
	[TYPE_SOCKET] = handle_socket,
	[TYPE_EXEC] = handle_exec,
	[TYPE_EXEC_OUTPUT] = handle_exec_request,
	[TYPE_EXEC_WATCH] = handle_exec_request,
	[TYPE_EXEC_MARK] = handle_exec_request,
	[TYPE_EXEC_FORGET] = handle_exec_request,
	[TYPE_SIGNAL] = handle_exec_request,
	[TYPE_REMOVE_TREE] = handle_remove_tree,
	[TYPE_STAT] = handle_stat,
	[TYPE_MEASURE] = handle_measure,
	[TYPE_KEEP] = handle_keep,
	[TYPE_DROP] = handle_drop,
	[TYPE_KEPT_LIST] = handle_kept_list,
	[TYPE_AWAIT] = handle_await,
};

static int handle(struct request *r)
{
	unsigned type = r->frame->type;

	if (!connection_is_greeted() && type != TYPE_HELLO && type != TYPE_ATTACH)
		return refuse(r, EPROTO, "HELLO comes first");
	if (type >= ARRAY_LEN(handlers) || !handlers[type])
		return refuse(r, EPROTO, "an unknown type");
	return handlers[type](r);
}

int request_handle(struct frame *frame, int *fds)
{
	struct request request = {.frame = frame, .fds = fds, .stage = "request", .message = ""};
	struct reader reader = {frame->body, frame->body + frame->len};
	struct field field;
	int more, error;

	while ((more = field_next(&reader, &field)) > 0)
		;
	if (more < 0 || frame->request == 0)
		return -EPROTO;
	error = handle(&request);
	if (error)
		answer_error(frame->request, -error, request.stage, request.message);
	return 0;
}
