/* Take requests apart and hand them on. Nothing of a bad request is acted upon. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "init.h"
#include "request.h"

#define NAME_LENGTH_MAX 255u
#define MEASURE_MAX 1000u
/* More than execve takes, as each costs it nine bytes of two MiB at least. */
#define STRINGS_MAX (1u << 18)

static char *argv_strings[STRINGS_MAX + 1];
static char *env_strings[STRINGS_MAX + 1];

void refuse(struct request *r, int error, const char *why)
{
	if (!r->refusal) {
		r->refusal = why;
		r->error = error;
	}
}

const char *take_text(struct request *r, const struct field *field, size_t max)
{
	if (!field_is_text(field, max)) {
		refuse(r, EINVAL, "a text is too long or holds a NUL");
		return "";
	}
	if (r->texts.count == ARRAY_LEN(r->texts.end)) {
		refuse(r, EINVAL, "too many texts");
		return "";
	}
	r->texts.end[r->texts.count++] = field->data + field->len;
	return (const char *)field->data;
}

void terminate(struct request *r)
{
	for (size_t i = 0; i < r->texts.count; i++)
		*r->texts.end[i] = '\0';
}

void take_numbers(struct request *r, const struct field *field, uint64_t *values, size_t count)
{
	if (field->len != 8 * count) {
		refuse(r, EPROTO, "numbers of another length");
		return;
	}
	for (size_t i = 0; i < count; i++)
		values[i] = get_u64(field->data + 8 * i);
}

int take_fd(struct request *r, const struct field *field, size_t offset)
{
	uint32_t index;

	if (field->len != offset + 4) {
		refuse(r, EPROTO, "a descriptor of another length");
		return -1;
	}
	index = get_u32(field->data + offset);
	if (index >= r->frame->descriptors || r->fds[index] < 0) {
		refuse(r, EPROTO, "a descriptor that did not come");
		return -1;
	}
	return r->fds[index];
}

int keep_fd(struct request *r, int fd)
{
	for (unsigned i = 0; i < r->frame->descriptors; i++)
		if (r->fds[i] == fd)
			r->fds[i] = -1;
	return fd;
}

void unknown_tag(struct request *r)
{
	refuse(r, EPROTO, "a field that this request does not have");
}

bool refused(const struct request *r)
{
	if (r->refusal)
		answer_error(r->frame->request, r->error, "request", r->refusal);
	return r->refusal != NULL;
}

static bool valid_id(const char *id)
{
	size_t len = strspn(id, "0123456789abcdefghijklmnopqrstuvwxyz"
				"ABCDEFGHIJKLMNOPQRSTUVWXYZ._-");

	return len > 0 && len <= ID_MAX && id[len] == '\0' && id[0] != '.';
}

/* --- sandboxes ------------------------------------------------------------------------ */

/* Never ids that the host itself may use. */
static void refuse_host_ids(struct request *r, uint64_t id_base)
{
	if (id_base < 65536 || id_base % 65536 || id_base > UINT32_MAX - 65536)
		refuse(r, EINVAL, "the id base is not a multiple of 65536 above 0");
}

static void handle_create(struct request *r)
{
	struct create_spec spec = {.root.upper = -1, .request = r->frame->request};
	uint64_t numbers[7] = {0};
	struct field field;

	EACH_FIELD(r, field)
	{
		if (field.tag == TAG_SANDBOX)
			spec.id = take_text(r, &field, ID_MAX);
		else if (field.tag == TAG_HOSTNAME)
			spec.hostname = take_text(r, &field, 64);
		else if (field.tag == TAG_CREATE_NUMBERS)
			take_numbers(r, &field, numbers, ARRAY_LEN(numbers));
		else if (field.tag == TAG_LAYER && spec.root.layer_count < LAYERS_MAX)
			spec.root.layers[spec.root.layer_count++] = take_text(r, &field, TEXT_MAX);
		else if (field.tag == TAG_UPPER_FD)
			spec.root.upper = take_fd(r, &field, 0);
		else if (field.tag == TAG_INJECT)
			spec.root.inject = take_text(r, &field, 22);
		else if (!take_keep_field(r, &field, &spec.keep))
			unknown_tag(r);
	}
	spec.limits = (struct limits){numbers[1], numbers[2], numbers[3]};
	spec.shm_bytes = numbers[4];
	spec.root.tmpfs_bytes = numbers[5];
	spec.flags = numbers[6];
	if (!spec.id || !spec.hostname || !spec.root.layer_count)
		refuse(r, EINVAL, "id, host name or layers are missing");
	refuse_host_ids(r, numbers[0]);
	if (spec.flags & ~(uint64_t)CREATE_FLAG_NO_NEW_PRIVS)
		refuse(r, EPROTO, "an unknown flag");
	if (refused(r))
		return;
	terminate(r);
	spec.id_base = (uint32_t)numbers[0];
	if (!valid_id(spec.id)) {
		answer_error(r->frame->request, EINVAL, "request", "not an id of a sandbox");
		return;
	}
	sandbox_create(&spec);
}

static void handle_prepare(struct request *r)
{
	struct create_spec spec = {.root.upper = -1, .request = r->frame->request};
	uint64_t id_base = 0;
	struct field field;

	EACH_FIELD(r, field)
	{
		if (field.tag == TAG_SANDBOX)
			spec.id = take_text(r, &field, ID_MAX);
		else if (field.tag == TAG_PREPARE_NUMBERS)
			take_numbers(r, &field, &id_base, 1);
		else if (field.tag == TAG_INJECT)
			spec.root.inject = take_text(r, &field, 22);
		else
			unknown_tag(r);
	}
	if (!spec.id)
		refuse(r, EINVAL, "no id is given");
	refuse_host_ids(r, id_base);
	if (refused(r))
		return;
	terminate(r);
	spec.id_base = (uint32_t)id_base;
	if (valid_id(spec.id))
		sandbox_prepare(&spec);
	else
		answer_error(r->frame->request, EINVAL, "request", "not an id of a sandbox");
}

/* The sandbox that a request with little else names, or NULL after an error was answered. */
static struct sandbox *named_sandbox(struct request *r, uint64_t *numbers, size_t count, uint16_t tag)
{
	struct sandbox *sandbox = NULL;
	const char *id = NULL;
	struct field field;

	EACH_FIELD(r, field)
	{
		if (field.tag == TAG_SANDBOX)
			id = take_text(r, &field, ID_MAX);
		else if (count && field.tag == tag)
			take_numbers(r, &field, numbers, count);
		else
			unknown_tag(r);
	}
	if (!id)
		refuse(r, EINVAL, "no sandbox is named");
	if (refused(r))
		return NULL;
	terminate(r);
	sandbox = sandbox_find(id);
	if (!sandbox)
		answer_error(r->frame->request, ENOENT, "sandbox", "it is not known");
	return sandbox;
}

static void handle_socket(struct request *r)
{
	uint64_t numbers[2] = {0};
	struct sandbox *sandbox = named_sandbox(r, numbers, 2, TAG_SOCKET_NUMBERS);
	auto_close int fd = -1;
	struct builder *b;
	int error = 0;

	if (!sandbox)
		return;
	if (sandbox->state != SANDBOX_LIVE) {
		answer_error(r->frame->request, ESRCH, "sandbox", "it is gone");
		return;
	}
	if (numbers[0] > INT16_MAX || numbers[1] > INT16_MAX) {
		answer_error(r->frame->request, EINVAL, "socket", "");
		return;
	}
	if (setns(sandbox->pidfd, CLONE_NEWNET) < 0)
		error = errno;
	if (!error) {
		fd = socket((int)numbers[0], (int)numbers[1] | SOCK_CLOEXEC, 0);
		error = fd < 0 ? errno : 0;
		/* Only a full kernel memory can refuse this; nothing more may happen in there. */
		if (setns(worker.home_network, CLONE_NEWNET) < 0)
			fatal("leave a sandbox's network");
	}
	if (error) {
		answer_error(r->frame->request, error, "socket", "");
		return;
	}
	b = answer_begin(TYPE_SOCKET_MADE, r->frame->request);
	build_fd(b, TAG_MADE_FD, fd);
	answer_send(b);
}

/* --- execs ----------------------------------------------------------------------------- */

static char *take_string(struct request *r, const struct field *field)
{
	if (memchr(field->data, '\0', field->len))
		refuse(r, EINVAL, "an argument or variable holds a NUL");
	return (char *)field->data;
}

static void add_string(struct request *r, const struct field *field, char **strings, size_t *count)
{
	if (*count < STRINGS_MAX)
		strings[(*count)++] = take_string(r, field);
	else
		refuse(r, E2BIG, "too many arguments or variables");
}

/* As terminate, for the strings that are too many to be noted: each walk reads ahead. */
static void terminate_strings(struct request *r)
{
	struct reader reader = {r->frame->body, r->frame->body + r->frame->len};
	struct field field, next;
	int more = field_next(&reader, &field);

	while (more > 0) {
		more = field_next(&reader, &next);
		if (field.tag == TAG_ARG || field.tag == TAG_ENV)
			field.data[field.len] = '\0';
		field = next;
	}
}

static void take_extra(struct request *r, const struct field *field, struct exec_spec *spec)
{
	uint32_t target;

	if (field->len != 8 || spec->extra_count == EXTRA_MAX) {
		refuse(r, EINVAL, "too many extra descriptors");
		return;
	}
	target = get_u32(field->data);
	if (target < 3 || target > EXTRA_TARGET_MAX)
		refuse(r, EINVAL, "an extra descriptor's number is not within 3 to 47");
	spec->extra[spec->extra_count].target = (int)target;
	spec->extra[spec->extra_count].fd = take_fd(r, field, 4);
	spec->extra_count++;
}

static void take_exec_numbers(struct request *r, const struct field *field, struct exec_spec *spec)
{
	uint64_t n[11] = {0};

	take_numbers(r, field, n, ARRAY_LEN(n));
	if (n[1] >= UINT32_MAX || n[2] >= UINT32_MAX || n[3] > 0777 || n[8] > UINT16_MAX ||
	    n[9] > UINT16_MAX || n[10] > 31 || n[4] > INT64_MAX / 2 || n[5] > INT64_MAX / 2)
		refuse(r, EINVAL, "a number is out of range");
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
}

static void handle_exec(struct request *r)
{
	static struct exec_spec spec;
	size_t argc = 0, envc = 0;
	const char *id = NULL;
	struct field field;
	uint64_t group;

	spec = (struct exec_spec){.in = -1, .request = r->frame->request, .cwd = NULL};
	EACH_FIELD(r, field)
	{
		if (field.tag == TAG_SANDBOX)
			id = take_text(r, &field, ID_MAX);
		else if (field.tag == TAG_EXEC_NUMBERS)
			take_exec_numbers(r, &field, &spec);
		else if (field.tag == TAG_CWD)
			spec.cwd = take_text(r, &field, TEXT_MAX);
		else if (field.tag == TAG_ARG)
			add_string(r, &field, argv_strings, &argc);
		else if (field.tag == TAG_ENV)
			add_string(r, &field, env_strings, &envc);
		else if (field.tag == TAG_GROUP && spec.group_count < GROUPS_MAX) {
			group = 0;
			take_numbers(r, &field, &group, 1);
			spec.groups[spec.group_count++] = (uint32_t)group;
		} else if (field.tag == TAG_STDIN_FD)
			spec.in = take_fd(r, &field, 0);
		else if (field.tag == TAG_EXTRA_FD)
			take_extra(r, &field, &spec);
		else if (!take_keep_field(r, &field, &spec.keep))
			unknown_tag(r);
	}
	if (!id || !spec.cwd || !argc || !spec.id)
		refuse(r, EINVAL, "sandbox, id, arguments or working directory are missing");
	if (refused(r))
		return;
	terminate_strings(r);
	terminate(r);
	argv_strings[argc] = env_strings[envc] = NULL;
	spec.argv = argv_strings;
	spec.env = env_strings;
	spec.sandbox = sandbox_find(id);
	if (!spec.sandbox)
		answer_error(r->frame->request, ENOENT, "sandbox", "it is not known");
	else
		exec_start(&spec);
}

/* The exec that a request names, or NULL after an error was answered. */
static struct exec *named_exec(struct request *r, uint64_t *numbers, uint16_t tag)
{
	struct exec *exec;
	uint64_t id = 0;
	struct field field;

	EACH_FIELD(r, field)
	{
		if (field.tag == TAG_EXEC_ID)
			take_numbers(r, &field, &id, 1);
		else if (numbers && field.tag == tag)
			take_numbers(r, &field, numbers, 2);
		else
			unknown_tag(r);
	}
	if (refused(r))
		return NULL;
	exec = exec_find(id);
	if (!exec || exec->forgotten) {
		answer_error(r->frame->request, ENOENT, "exec", "it is not known, or kept no more");
		return NULL;
	}
	return exec;
}

static void handle_exec_request(struct request *r)
{
	uint64_t numbers[2] = {0, 0};
	uint16_t tag = r->frame->type == TYPE_SIGNAL ? TAG_SIGNAL_NUMBERS : TAG_SEEN;
	bool has_numbers = r->frame->type == TYPE_SIGNAL || r->frame->type == TYPE_EXEC_WATCH;
	struct exec *exec = named_exec(r, has_numbers ? numbers : NULL, tag);
	uint64_t request = r->frame->request;

	if (!exec)
		return;
	if (r->frame->type == TYPE_EXEC_OUTPUT)
		exec_output(exec, request);
	else if (r->frame->type == TYPE_EXEC_WATCH)
		exec_watch(exec, request, numbers[0], numbers[1]);
	else if (r->frame->type == TYPE_EXEC_MARK)
		exec_mark(exec, request);
	else if (r->frame->type == TYPE_EXEC_FORGET)
		exec_forget(exec, request);
	else if (numbers[0] > 64 || numbers[1] < SCOPE_LEADER || numbers[1] > SCOPE_CHILDREN)
		answer_error(request, EINVAL, "signal", "no such signal or scope");
	else
		exec_signal(exec, request, (int)numbers[0], (enum scope)numbers[1]);
}

/* --- the machine ------------------------------------------------------------------------ */

static void handle_remove_tree(struct request *r)
{
	const char *name = NULL;
	struct field field;
	int dir = -1;

	EACH_FIELD(r, field)
	{
		if (field.tag == TAG_DIRECTORY_FD)
			dir = take_fd(r, &field, 0);
		else if (field.tag == TAG_NAME)
			name = take_text(r, &field, NAME_LENGTH_MAX);
		else
			unknown_tag(r);
	}
	if (dir < 0 || !name)
		refuse(r, EINVAL, "directory or name are missing");
	if (refused(r))
		return;
	terminate(r);
	if (!*name || strchr(name, '/') || strcmp(name, ".") == 0 || strcmp(name, "..") == 0) {
		answer_error(r->frame->request, EINVAL, "request", "not a name in a directory");
		return;
	}
	keep_fd(r, dir);
	remove_tree(&dir, name, r->frame->request);
	close_quietly(&dir);
}

static uint64_t count_descriptors(void)
{
	int fd = openat(worker.proc, "self/fd", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	DIR *dir = fd < 0 ? NULL : fdopendir(fd);
	uint64_t count = 0;

	if (!dir)
		return 0;
	while (readdir(dir))
		count++;
	closedir(dir);
	return count - 3; /* ".", ".." and the directory itself */
}

static void handle_stat(struct request *r)
{
	uint64_t descriptors = count_descriptors();
	struct builder *b;

	if (r->frame->len)
		unknown_tag(r);
	if (refused(r))
		return;
	b = answer_begin(TYPE_OK, r->frame->request);
	build_u64(b, TAG_NUMBER, (uint64_t)getpid());
	build_u64(b, TAG_NUMBER, worker.sandboxes);
	build_u64(b, TAG_NUMBER, worker.execs);
	build_u64(b, TAG_NUMBER, descriptors);
	answer_send(b);
}

static void handle_measure(struct request *r)
{
	static uint64_t durations[MEASURE_MAX];
	const char *path = NULL;
	uint64_t count = 0;
	struct field field;
	struct builder *b;
	int error;

	EACH_FIELD(r, field)
	{
		if (field.tag == TAG_COUNT)
			take_numbers(r, &field, &count, 1);
		else if (field.tag == TAG_PATH)
			path = take_text(r, &field, TEXT_MAX);
		else
			unknown_tag(r);
	}
	if (!path || count < 1 || count > MEASURE_MAX)
		refuse(r, EINVAL, "path, or a count within 1 to 1000, is missing");
	if (refused(r))
		return;
	terminate(r);
	error = rootfs_at_home(true);
	error = error ? error : launch_measure(path, durations, count);
	if (rootfs_at_home(false) < 0)
		fatal("leave the host's mounts");
	if (error) {
		answer_error(r->frame->request, -error, "measure", "");
		return;
	}
	b = answer_begin(TYPE_OK, r->frame->request);
	build_u64s(b, TAG_DURATIONS, durations, count);
	answer_send(b);
}

/* Every field can be walked? */
static bool well_formed(const struct frame *frame)
{
	struct reader reader = {frame->body, frame->body + frame->len};
	struct field field;
	int more;

	while ((more = field_next(&reader, &field)) > 0)
		;
	return more == 0;
}

int request_handle(struct frame *frame, int *fds)
{
	struct request request = {.frame = frame, .fds = fds};
	struct sandbox *sandbox;

	if (!well_formed(frame) || frame->request == 0)
		return -EPROTO;
	if (!connection_is_greeted() && frame->type != TYPE_HELLO && frame->type != TYPE_ATTACH) {
		answer_error(frame->request, EPROTO, "request", "HELLO comes first");
		return 0;
	}
	switch (frame->type) {
	case TYPE_HELLO:
		greet_hello(&request);
		return 0;
	case TYPE_ATTACH:
		greet_attach(&request);
		return 0;
	case TYPE_END:
		worker.ending = true;
		answer_ok(frame->request);
		return 0;
	case TYPE_CREATE:
		handle_create(&request);
		return 0;
	case TYPE_PREPARE:
		handle_prepare(&request);
		return 0;
	case TYPE_EXEC:
		handle_exec(&request);
		return 0;
	case TYPE_EXEC_OUTPUT:
	case TYPE_EXEC_WATCH:
	case TYPE_EXEC_MARK:
	case TYPE_EXEC_FORGET:
	case TYPE_SIGNAL:
		handle_exec_request(&request);
		return 0;
	case TYPE_KILL_ALL:
		sandbox = named_sandbox(&request, NULL, 0, 0);
		if (sandbox)
			sandbox_kill_all(sandbox, frame->request);
		return 0;
	case TYPE_DESTROY:
		sandbox = named_sandbox(&request, NULL, 0, 0);
		if (sandbox)
			sandbox_destroy(sandbox, frame->request);
		return 0;
	case TYPE_PROCESSES:
		sandbox = named_sandbox(&request, NULL, 0, 0);
		if (sandbox)
			inspect_processes(sandbox, frame->request);
		return 0;
	case TYPE_REMOVE_TREE:
		handle_remove_tree(&request);
		return 0;
	case TYPE_SOCKET:
		handle_socket(&request);
		return 0;
	case TYPE_STAT:
		handle_stat(&request);
		return 0;
	case TYPE_MEASURE:
		handle_measure(&request);
		return 0;
	default:
		if (!keep_request(&request))
			answer_error(frame->request, EPROTO, "request", "an unknown type");
		return 0;
	}
}
