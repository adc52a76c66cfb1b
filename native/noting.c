/* What a node has noted: with a request, later, and no longer. */
#define _GNU_SOURCE
#include "request.h"

#define NOTE_MAX (256u << 10)

int take_keep_field(struct request *r, const struct field *field, void *context)
{
	struct keep_spec *spec = context;

	if (field->tag == TAG_NOTE) {
		if (field->len > NOTE_MAX)
			return refuse(r, EMSGSIZE, "a note of more than 256 KiB");
		spec->note = field->data;
		spec->note_len = field->len;
	} else if (field->tag == TAG_KEEP_FD) {
		spec->has_fds = true;
		if (!field->len)
			return 1; /* none, instead of those that are kept */
		if (spec->count == KEEP_FDS_MAX)
			return refuse(r, EINVAL, "too many descriptors to keep");
		TRY(take_fd(r, field, &spec->fds[spec->count++]));
	} else if (field->tag == TAG_EXPIRES) {
		TRY(take_numbers(r, field, &spec->expires_ns, 1));
		spec->expires = true;
	} else {
		return 0;
	}
	return 1;
}

int handle_keep(struct request *r)
{
	struct keep_spec spec = {0};
	struct sandbox *sandbox;
	struct exec *exec;
	const char *name = NULL;
	uint64_t id = 0;
	int error;

	TRY(TAKE_OTHERS(r, take_keep_field, &spec, TEXT(TAG_KEPT, &name, ID_MAX),
			NUMBERS(TAG_EXEC_ID, &id, 1)));
	if (!name || !*name)
		return refuse(r, EINVAL, "no name is given");
	if (!keep(name, KEPT_PLAIN, &spec, &error))
		return fail(r, -error, "keep", "");
	sandbox = sandbox_find(name);
	if (sandbox && spec.expires)
		sandbox->expires_ns = spec.expires_ns;
	exec = exec_find(id);
	if (exec && spec.expires)
		exec->expires_ns = spec.expires_ns;
	answer_ok(r->frame->request);
	return 0;
}

int handle_drop(struct request *r)
{
	const char *names[LAYERS_MAX];
	size_t count = 0;

	TRY(TAKE(r, TEXTS(TAG_KEPT, names, &count)));
	for (size_t i = 0; i < count; i++)
		keep_drop(names[i]);
	answer_ok(r->frame->request);
	return 0;
}
