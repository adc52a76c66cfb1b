/* Take the fields of a request apart. */
#define _GNU_SOURCE
#include "request.h"

#include <string.h>

int fail(struct request *r, int error, const char *stage, const char *message)
{
	r->stage = stage;
	r->message = message;
	return -error;
}

int refuse(struct request *r, int error, const char *why)
{
	return fail(r, error, "request", why);
}

int take_numbers(struct request *r, const struct field *field, uint64_t *values, size_t count)
{
	if (field->len != 8 * count)
		return refuse(r, EPROTO, "numbers of another length");
	for (size_t i = 0; i < count; i++)
		values[i] = get_u64(field->data + 8 * i);
	return 0;
}

int take_fd(struct request *r, const struct field *field, int *fd)
{
	uint32_t index;

	if (field->len != 4)
		return refuse(r, EPROTO, "a descriptor of another length");
	index = get_u32(field->data);
	if (index >= r->frame->descriptors || r->fds[index] < 0)
		return refuse(r, EPROTO, "a descriptor that did not come");
	*fd = r->fds[index];
	return 0;
}

int keep_fd(struct request *r, int fd)
{
	for (unsigned i = 0; i < r->frame->descriptors; i++)
		if (r->fds[i] == fd) {
			r->fds[i] = -1;
			return fd;
		}
	return -1;
}

static int take_text(struct request *r, const struct field *field, const char **to, size_t max)
{
	if (!field_is_text(field, max))
		return refuse(r, EINVAL, "a text is too long or holds a NUL");
	*to = (const char *)field->data;
	return 0;
}

static int take_wanted(struct request *r, const struct field *field, const struct want *want)
{
	switch (want->kind) {
	case WANT_TEXT:
		return take_text(r, field, want->to, want->max);
	case WANT_TEXTS:
		if (*want->count == want->max)
			return refuse(r, EPROTO, "a field more often than this request has it");
		return take_text(r, field, (const char **)want->to + (*want->count)++, TEXT_MAX);
	case WANT_NUMBERS:
		return take_numbers(r, field, want->to, want->max);
	case WANT_FD:
		return take_fd(r, field, want->to);
	}
	return -EINVAL;
}

static int take_field(struct request *r, const struct field *field, const struct want *wants,
		      taker *other, void *context)
{
	int taken;

	for (const struct want *want = wants; want->tag; want++)
		if (want->tag == field->tag)
			return take_wanted(r, field, want);
	taken = other ? other(r, field, context) : 0;
	return taken ? taken : refuse(r, EPROTO, "a field that this request does not have");
}

int take(struct request *r, const struct want *wants, taker *other, void *context)
{
	struct reader reader = {r->frame->body, r->frame->body + r->frame->len};
	struct field field, next;
	int more = field_next(&reader, &field);

	for (; more > 0; field = next) {
		more = field_next(&reader, &next);
		TRY(take_field(r, &field, wants, other, context));
		/* Over the first byte of the next one, or of the next frame: that is always 0. */
		field.data[field.len] = '\0';
	}
	return 0;
}
