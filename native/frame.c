#define _GNU_SOURCE
#include "frame.h"

#include <errno.h>
#include <string.h>

#include "util.h"

ssize_t frame_parse(uint8_t *buf, size_t have, struct frame *frame)
{
	uint32_t length;

	if (have < 4)
		return 0;
	length = get_u32(buf);
	if (length < FRAME_MIN || length > MAX_FRAME)
		return -EMSGSIZE;
	if (have < FRAME_HEADER)
		return 0;
	frame->type = get_u16(buf + 4);
	frame->descriptors = get_u16(buf + 6);
	if (frame->descriptors > MAX_DESCRIPTORS)
		return -EPROTO;
	if (have < 4 + (size_t)length)
		return 0;
	frame->request = get_u64(buf + 8);
	frame->body = buf + FRAME_HEADER;
	frame->len = length - FRAME_MIN;
	return 4 + (ssize_t)length;
}

int field_next(struct reader *reader, struct field *field)
{
	size_t left = (size_t)(reader->end - reader->at);

	if (left == 0)
		return 0;
	if (left < FIELD_HEADER)
		return -EPROTO;
	field->tag = get_u16(reader->at);
	field->len = get_u32(reader->at + 2);
	if (field->len > left - FIELD_HEADER)
		return -EPROTO;
	field->data = reader->at + FIELD_HEADER;
	reader->at = field->data + field->len;
	return 1;
}

bool field_is_text(const struct field *field, size_t max)
{
	return field->len <= max && !memchr(field->data, '\0', field->len);
}

void build_begin(struct builder *b, uint8_t *buf, size_t cap, uint16_t type, uint64_t request)
{
	b->buf = buf;
	b->cap = cap < 4 + (size_t)MAX_FRAME ? cap : 4 + (size_t)MAX_FRAME;
	b->len = FRAME_HEADER;
	b->overflow = false;
	b->descriptors = 0;
	put_u16(buf + 4, type);
	put_u64(buf + 8, request);
}

uint8_t *build_space(struct builder *b, uint16_t tag, size_t len)
{
	uint8_t *at = b->buf + b->len;

	if (b->overflow || len > b->cap || b->len + FIELD_HEADER > b->cap - len) {
		b->overflow = true;
		return NULL;
	}
	put_u16(at, tag);
	put_u32(at + 2, (uint32_t)len);
	b->len += FIELD_HEADER + len;
	return at + FIELD_HEADER;
}

void build_bytes(struct builder *b, uint16_t tag, const void *data, size_t len)
{
	uint8_t *at = build_space(b, tag, len);

	if (at && len)
		memcpy(at, data, len);
}

void build_text(struct builder *b, uint16_t tag, const char *text)
{
	build_bytes(b, tag, text, strlen(text));
}

void build_u64(struct builder *b, uint16_t tag, uint64_t value)
{
	build_u64s(b, tag, &value, 1);
}

void build_u64s(struct builder *b, uint16_t tag, const uint64_t *values, size_t count)
{
	uint8_t *at = build_space(b, tag, 8 * count);

	for (size_t i = 0; at && i < count; i++)
		put_u64(at + 8 * i, values[i]);
}

void build_fd(struct builder *b, uint16_t tag, int fd)
{
	uint8_t *at;

	if (b->descriptors == MAX_DESCRIPTORS) {
		b->overflow = true;
		return;
	}
	at = build_space(b, tag, 4);
	if (!at)
		return;
	put_u32(at, b->descriptors);
	b->fds[b->descriptors++] = fd;
}

ssize_t build_end(struct builder *b)
{
	if (b->overflow)
		return -EMSGSIZE;
	put_u32(b->buf, (uint32_t)(b->len - 4));
	put_u16(b->buf + 6, (uint16_t)b->descriptors);
	return (ssize_t)b->len;
}
