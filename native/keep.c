/*
 * What is kept for a node whose daemon may die: what it noted with its sandboxes and commands, descriptors
 * of its own, and how commands ended. Each stays until the node drops it, whatever becomes of
 * the sandbox or command. Notes are the node's: nothing here looks into them.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>

#include "request.h"

#define BUCKETS 4096u
#define PAGE_ENTRIES 256u
#define PAGE_BYTES (1u << 20)
#define NOTE_MAX (256u << 10)

struct kept {
	struct kept *prev, *later; /* in the order in which they came */
	struct kept *next; /* in its hash chain */
	uint64_t serial;
	char name[ID_MAX + 1];
	enum kept_kind kind;
	struct exec *exec; /* until it has ended */
	uint64_t ended_ns; /* CLOCK_REALTIME */
	uint16_t type; /* of its last answer, once there is one */
	size_t note_len, answer_len;
	uint8_t *note, *answer;
	unsigned count, answer_count;
	int fds[KEEP_FDS_MAX], answer_fds[2];
};

static struct kept *table[BUCKETS];
static struct kept *first, *last;
static uint64_t serials;

static struct kept **chain_of(const char *name)
{
	uint32_t hash = 2166136261u;

	for (; *name; name++)
		hash = (hash ^ (uint8_t)*name) * 16777619u;
	return &table[hash % BUCKETS];
}

static struct kept *find(const char *name)
{
	struct kept *kept = *chain_of(name);

	while (kept && strcmp(kept->name, name) != 0)
		kept = kept->next;
	return kept;
}

bool kept_has(const char *name)
{
	return find(name) != NULL;
}

/* --- entries ------------------------------------------------------------------------- */

static void close_all(int *fds, unsigned *count)
{
	while (*count) {
		close(fds[--*count]);
		worker.kept_files--;
	}
}

static int copy_all(int *to, unsigned *have, const int *fds, unsigned count)
{
	for (unsigned i = 0; i < count; i++) {
		to[i] = dup_cloexec(fds[i]);
		if (to[i] < 0) {
			int error = to[i];

			close_all(to, have);
			return error;
		}
		++*have;
		worker.kept_files++;
	}
	return 0;
}

/* Returns 0 or -errno, and then changes nothing. */
static int set(struct kept *kept, const struct keep_spec *spec)
{
	uint8_t *note = spec->note ? malloc(spec->note_len + 1) : NULL;
	int fds[KEEP_FDS_MAX];
	unsigned count = 0;
	int error = spec->note && !note ? -ENOMEM : copy_all(fds, &count, spec->fds, spec->count);

	if (error) {
		free(note);
		return error;
	}
	if (note) {
		memcpy(note, spec->note, spec->note_len);
		free(kept->note);
		kept->note = note;
		kept->note_len = spec->note_len;
	}
	if (spec->has_fds) {
		close_all(kept->fds, &kept->count);
		memcpy(kept->fds, fds, count * sizeof(*fds));
		kept->count = count;
	}
	return 0;
}

static void unlist(struct kept *kept)
{
	struct kept **link = chain_of(kept->name);

	while (*link != kept)
		link = &(*link)->next;
	*link = kept->next;
	*(kept->prev ? &kept->prev->later : &first) = kept->later;
	*(kept->later ? &kept->later->prev : &last) = kept->prev;
}

static void release(struct kept *kept)
{
	unlist(kept);
	close_all(kept->fds, &kept->count);
	close_all(kept->answer_fds, &kept->answer_count);
	free(kept->note);
	free(kept->answer);
	free(kept);
}

struct kept *keep(const char *name, enum kept_kind kind, const struct keep_spec *spec, int *error)
{
	struct kept *kept = find(name);

	if (kept) {
		*error = set(kept, spec);
		return *error ? NULL : kept;
	}
	kept = calloc(1, sizeof(*kept));
	*error = kept ? set(kept, spec) : -ENOMEM;
	if (*error) {
		free(kept);
		return NULL;
	}
	snprintf(kept->name, sizeof(kept->name), "%s", name);
	kept->kind = kind;
	kept->serial = ++serials;
	kept->next = *chain_of(name);
	*chain_of(name) = kept;
	kept->prev = last;
	*(last ? &last->later : &first) = kept;
	last = kept;
	return kept;
}

void keep_exec(struct kept *kept, struct exec *exec)
{
	kept->exec = exec;
	exec->kept = kept;
}

void keep_drop(const char *name)
{
	struct kept *kept = find(name);

	if (kept && !kept->exec)
		release(kept);
}

/* The command must not seem to run for ever: at least that it has ended is kept. */
static void keep_failure(struct kept *kept, int error)
{
	static uint8_t buf[256];
	struct builder b;

	build_begin(&b, buf, sizeof(buf), TYPE_ERROR, 0);
	build_u64(&b, TAG_ERRNO, (uint64_t)-error);
	build_text(&b, TAG_STAGE, "kept");
	build_text(&b, TAG_MESSAGE, "there was no room to keep how it ended");
	kept->type = TYPE_ERROR;
	kept->answer_len = b.len - FRAME_HEADER;
	kept->answer = malloc(kept->answer_len);
	if (kept->answer)
		memcpy(kept->answer, buf + FRAME_HEADER, kept->answer_len);
	else
		kept->answer_len = 0;
}

void keep_answer(struct exec *exec, const struct builder *b)
{
	struct kept *kept = exec->kept;
	int error;

	if (!kept)
		return;
	exec->kept = NULL;
	kept->exec = NULL;
	kept->ended_ns = clock_ns(CLOCK_REALTIME);
	error = b->overflow ? -EMSGSIZE :
			      copy_all(kept->answer_fds, &kept->answer_count, b->fds, b->descriptors);
	if (!error) {
		kept->answer_len = b->len - FRAME_HEADER;
		kept->answer = malloc(kept->answer_len + 1);
		error = kept->answer ? 0 : -ENOMEM;
	}
	if (error) {
		close_all(kept->answer_fds, &kept->answer_count);
		keep_failure(kept, error);
		return;
	}
	memcpy(kept->answer, b->buf + FRAME_HEADER, kept->answer_len);
	kept->type = get_u16(b->buf + 4);
}

static void answer_again(const struct kept *kept, uint64_t request)
{
	struct builder *b = answer_begin(kept->type, request);

	if (kept->answer_len > b->cap - b->len) {
		b->overflow = true;
	} else {
		memcpy(b->buf + b->len, kept->answer, kept->answer_len);
		b->len += kept->answer_len;
	}
	for (unsigned i = 0; i < kept->answer_count; i++)
		b->fds[b->descriptors++] = kept->answer_fds[i];
	answer_send(b);
}

/* --- requests ------------------------------------------------------------------------ */

bool take_keep_field(struct request *r, const struct field *field, struct keep_spec *spec)
{
	if (field->tag == TAG_NOTE) {
		if (field->len > NOTE_MAX)
			refuse(r, EMSGSIZE, "a note of more than 256 KiB");
		spec->note = field->data;
		spec->note_len = field->len;
	} else if (field->tag == TAG_KEEP_FD) {
		spec->has_fds = true;
		if (!field->len)
			return true; /* none, instead of those that are kept */
		if (spec->count == KEEP_FDS_MAX)
			refuse(r, EINVAL, "too many descriptors to keep");
		else
			spec->fds[spec->count++] = take_fd(r, field, 0);
	} else if (field->tag == TAG_EXPIRES) {
		take_numbers(r, field, &spec->expires_ns, 1);
		spec->expires = true;
	} else {
		return false;
	}
	return true;
}

static void handle_keep(struct request *r)
{
	struct keep_spec spec = {0};
	struct sandbox *sandbox;
	const char *name = "";
	struct field field;
	int error;

	EACH_FIELD(r, field)
	{
		if (field.tag == TAG_KEPT)
			name = take_text(r, &field, ID_MAX);
		else if (!take_keep_field(r, &field, &spec))
			unknown_tag(r);
	}
	if (!*name)
		refuse(r, EINVAL, "no name is given");
	if (refused(r))
		return;
	terminate(r);
	if (!keep(name, KEPT_PLAIN, &spec, &error)) {
		answer_error(r->frame->request, -error, "keep", "");
		return;
	}
	sandbox = sandbox_find(name);
	if (sandbox && spec.expires)
		sandbox->expires_ns = spec.expires_ns;
	answer_ok(r->frame->request);
}

static void handle_drop(struct request *r)
{
	const char *names[LAYERS_MAX];
	size_t count = 0;
	struct field field;

	EACH_FIELD(r, field)
	{
		if (field.tag == TAG_KEPT && count < ARRAY_LEN(names))
			names[count++] = take_text(r, &field, ID_MAX);
		else
			unknown_tag(r);
	}
	if (refused(r))
		return;
	terminate(r);
	for (size_t i = 0; i < count; i++)
		keep_drop(names[i]);
	answer_ok(r->frame->request);
}

static enum kept_state state_of(const struct kept *kept, const struct sandbox *sandbox)
{
	if (kept->kind == KEPT_EXEC)
		return kept->exec ? KEPT_STATE_RUNNING : KEPT_STATE_ENDED;
	if (kept->kind == KEPT_PLAIN)
		return KEPT_STATE_PLAIN;
	if (!sandbox)
		return KEPT_STATE_ABSENT;
	if (sandbox->state == SANDBOX_STARTING)
		return KEPT_STATE_STARTING;
	return sandbox->state <= SANDBOX_DYING ? KEPT_STATE_LIVE : KEPT_STATE_GONE;
}

static void build_kept(struct builder *b, const struct kept *kept)
{
	const struct sandbox *sandbox = kept->kind == KEPT_SANDBOX ? sandbox_find(kept->name) : NULL;
	uint64_t numbers[] = {
		kept->serial,
		state_of(kept, sandbox),
		sandbox ? sandbox->gone_cause : 0u,
		sandbox ? sandbox->gone_code : 0u,
		kept->ended_ns,
	};

	build_text(b, TAG_KEPT, kept->name);
	build_u64s(b, TAG_KEPT_NUMBERS, numbers, ARRAY_LEN(numbers));
	build_bytes(b, TAG_NOTE, kept->note, kept->note_len);
	for (unsigned i = 0; i < kept->count; i++)
		build_fd(b, TAG_KEEP_FD, kept->fds[i]);
}

/* Those behind a serial number, as many as a frame has room for; none: that were all. */
static void handle_kept_list(struct request *r)
{
	uint64_t after = 0;
	unsigned entries = 0;
	struct builder *b;
	struct field field;
	struct kept *kept = first;

	EACH_FIELD(r, field)
	{
		if (field.tag == TAG_AFTER)
			take_numbers(r, &field, &after, 1);
		else
			unknown_tag(r);
	}
	if (refused(r))
		return;
	while (kept && kept->serial <= after)
		kept = kept->later;
	b = answer_begin(TYPE_KEPT_PAGE, r->frame->request);
	for (; kept && entries < PAGE_ENTRIES && b->len + kept->note_len < PAGE_BYTES &&
	       b->descriptors + kept->count <= MAX_DESCRIPTORS;
	     kept = kept->later, entries++)
		build_kept(b, kept);
	answer_send(b);
}

static void handle_await(struct request *r)
{
	const char *name = "";
	struct sandbox *sandbox;
	struct field field;
	struct kept *kept;

	EACH_FIELD(r, field)
	{
		if (field.tag == TAG_KEPT)
			name = take_text(r, &field, ID_MAX);
		else
			unknown_tag(r);
	}
	if (!*name)
		refuse(r, EINVAL, "no name is given");
	if (refused(r))
		return;
	terminate(r);
	kept = find(name);
	sandbox = sandbox_find(name);
	if (kept && kept->exec)
		exec_await(kept->exec, r->frame->request);
	else if (kept && kept->type)
		answer_again(kept, r->frame->request);
	else if (sandbox)
		sandbox_await(sandbox, r->frame->request);
	else
		answer_error(r->frame->request, ENOENT, "kept", "nothing of this name is there");
}

bool keep_request(struct request *r)
{
	switch (r->frame->type) {
	case TYPE_KEEP:
		handle_keep(r);
		return true;
	case TYPE_DROP:
		handle_drop(r);
		return true;
	case TYPE_KEPT_LIST:
		handle_kept_list(r);
		return true;
	case TYPE_AWAIT:
		handle_await(r);
		return true;
	default:
		return false;
	}
}
