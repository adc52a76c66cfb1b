/*
 * What is kept for a node whose daemon may die: what it noted with its sandboxes and commands, descriptors
 * of its own, and how commands ended. Each stays until the node drops it, whatever becomes of
 * the sandbox or command. Notes are the node's: nothing here looks into them.
 */
#define _GNU_SOURCE
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>

#include "request.h"

#define BUCKETS 4096u
#define PAGE_ENTRIES 256u
#define PAGE_BYTES (1u << 20)

struct kept {
	struct link order; /* in which they came */
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
static struct link all = RING(all);
static uint64_t serials;

static struct kept **chain_of(const char *name)
{
	return &table[hash_of(name) % BUCKETS];
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

/* The analyser of gcc 12 loses sight of what is in the table. */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wanalyzer-malloc-leak"
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

#pragma GCC diagnostic pop

static void unlist(struct kept *kept)
{
	struct kept **link = chain_of(kept->name);

	while (*link != kept)
		link = &(*link)->next;
	*link = kept->next;
	unlink_one(&kept->order);
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
	link_last(&all, &kept->order);
	return kept;
}

bool kept_waits(const struct kept *kept)
{
	for (unsigned i = 0; kept && i < kept->count; i++) {
		struct pollfd one = {.fd = kept->fds[i], .events = POLLIN};
		struct stat st;

		if (fstat(one.fd, &st) == 0 && S_ISFIFO(st.st_mode) && poll(&one, 1, 0) == 1 &&
		    one.revents & POLLIN)
			return true;
	}
	return false;
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

void keep_answer(struct exec *exec, const struct builder *b)
{
	struct kept *kept = exec->kept;
	size_t len = b->len - FRAME_HEADER;

	if (!kept)
		return;
	exec->kept = NULL;
	kept->exec = NULL;
	kept->ended_ns = clock_ns(CLOCK_REALTIME);
	kept->type = get_u16(b->buf + 4);
	kept->answer = b->overflow ? NULL : malloc(len + 1);
	/* The command must not seem to run for ever: that it has ended is kept at least. */
	if (!kept->answer || copy_all(kept->answer_fds, &kept->answer_count, b->fds, b->descriptors) < 0) {
		free(kept->answer);
		kept->answer = NULL;
		return;
	}
	memcpy(kept->answer, b->buf + FRAME_HEADER, len);
	kept->answer_len = len;
}

static int answer_again(struct request *r, const struct kept *kept)
{
	struct builder *b;

	if (!kept->answer)
		return fail(r, ENOMEM, "kept", "there was no room to keep how it ended");
	b = answer_begin(kept->type, r->frame->request);
	b->overflow = kept->answer_len > b->cap - b->len;
	if (!b->overflow) {
		memcpy(b->buf + b->len, kept->answer, kept->answer_len);
		b->len += kept->answer_len;
	}
	for (unsigned i = 0; i < kept->answer_count; i++)
		b->fds[b->descriptors++] = kept->answer_fds[i];
	answer_send(b);
	return 0;
}

/* --- requests ------------------------------------------------------------------------ */

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
int handle_kept_list(struct request *r)
{
	uint64_t after = 0;
	unsigned entries = 0;
	struct builder *b;

	TRY(TAKE(r, NUMBERS(TAG_AFTER, &after, 1)));
	b = answer_begin(TYPE_KEPT_PAGE, r->frame->request);
	for (struct link *link = all.next; link != &all && entries < PAGE_ENTRIES; link = link->next) {
		const struct kept *kept = container_of(link, struct kept, order);

		if (kept->serial <= after)
			continue;
		if (b->len + kept->note_len >= PAGE_BYTES ||
		    b->descriptors + kept->count > MAX_DESCRIPTORS)
			break;
		build_kept(b, kept);
		entries++;
	}
	answer_send(b);
	return 0;
}

int handle_await(struct request *r)
{
	const char *name = "";
	struct sandbox *sandbox;
	struct kept *kept;

	TRY(TAKE(r, TEXT(TAG_KEPT, &name, ID_MAX)));
	kept = find(name);
	sandbox = sandbox_find(name);
	if (kept && kept->exec)
		exec_await(kept->exec, r->frame->request);
	else if (kept && kept->type)
		return answer_again(r, kept);
	else if (sandbox)
		sandbox_await(sandbox, r->frame->request);
	else
		return fail(r, ENOENT, "kept", "nothing of this name is there");
	return 0;
}
