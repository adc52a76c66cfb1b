/*
 * Fuzz target: a byte stream as a worker would get it, cut into frames, and each frame taken apart
 * as requests are. With -DPLANTED there is a fault for the fuzzer itself to be tested by.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "request.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Every byte that a parser says is there must be: the sanitizers watch. */
static unsigned touch(const uint8_t *data, size_t len)
{
	unsigned sum = 0;

	for (size_t i = 0; i < len; i++)
		sum += data[i];
	return sum;
}

/* What was read, built again, is the same. */
static void check_fields(const struct frame *frame, size_t whole)
{
	uint8_t *again = malloc(whole);
	struct reader reader = {frame->body, frame->body + frame->len};
	struct field field;
	struct builder b;
	int more;

	if (!again)
		return;
	build_begin(&b, again, whole, frame->type, frame->request);
	while ((more = field_next(&reader, &field)) > 0)
		build_bytes(&b, field.tag, field.data, field.len);
	if (more && more != -EPROTO)
		abort();
	if (!more && (b.overflow || b.len != whole ||
		      memcmp(again + FRAME_HEADER, frame->body, frame->len) != 0))
		abort();
	free(again);
}

static int take_other(struct request *r, const struct field *field, void *context)
{
	unsigned *sum = context;

#ifdef PLANTED
	if (r->frame->type == TYPE_EXEC && field->tag == TAG_ARG && field->len == 2 &&
	    field->data[0] == '.')
		abort();
#endif
	*sum += touch(field->data, field->len) + r->frame->type;
	return field->tag < TAG_GONE_NUMBERS;
}

/* In place: ends are written over what follows. */
static void take_fields(struct frame *frame)
{
	int fds[MAX_DESCRIPTORS] = {100, -1, 102}, fd = -1;
	struct request r = {.frame = frame, .fds = fds};
	const char *text = "", *texts[4];
	uint64_t numbers[2] = {0};
	size_t count = 0;
	volatile unsigned sum = 0;
	unsigned others = 0;

	if (TAKE_OTHERS(&r, take_other, &others, TEXT(TAG_SANDBOX, &text, ID_MAX),
			TEXTS(TAG_LAYER, texts, &count), NUMBERS(TAG_SEEN, numbers, 2),
			DESCRIPTOR(TAG_STDIN_FD, &fd)) < 0)
		return;
	sum += (unsigned)strlen(text) + others;
	for (size_t i = 0; i < count; i++)
		sum += (unsigned)strlen(texts[i]);
	if (fd != -1 && fd != 100 && fd != 102 && fd != 0)
		abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	/* Behind the last frame lies the next one's first byte. */
	uint8_t *copy = calloc(1, size + 1);
	struct frame frame;
	size_t at = 0;
	ssize_t len;

	if (!copy)
		return 0;
	memcpy(copy, data, size);
	for (; (len = frame_parse(copy + at, size - at, &frame)) > 0; at += (size_t)len) {
		if ((size_t)len > size - at || frame.descriptors > MAX_DESCRIPTORS)
			abort();
		check_fields(&frame, (size_t)len);
		take_fields(&frame);
	}
	free(copy);
	return 0;
}
