/* What needs no kernel: numbers, frames, fields, digests. Exits with 1 at the first failure. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "frame.h"
#include "sha256.h"
#include "util.h"

#define CHECK(what)                                                                                \
	do {                                                                                       \
		if (!(what)) {                                                                     \
			fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #what);                 \
			exit(1);                                                                   \
		}                                                                                  \
	} while (0)

static uint8_t buf[8192];

static void test_frame_built_is_frame_parsed(void)
{
	struct builder b;
	struct frame frame;
	struct reader reader;
	struct field field;
	ssize_t len;

	build_begin(&b, buf, sizeof(buf), TYPE_OK, 0x0102030405060708);
	build_text(&b, TAG_STAGE, "clone");
	build_u64(&b, TAG_NUMBER, UINT64_MAX);
	build_bytes(&b, TAG_STDOUT_DATA, NULL, 0);
	build_fd(&b, TAG_MADE_FD, 5);
	len = build_end(&b);
	CHECK(len == 16 + 11 + 14 + 6 + 10);
	for (ssize_t cut = 0; cut < len; cut++)
		CHECK(frame_parse(buf, (size_t)cut, &frame) == 0);
	CHECK(frame_parse(buf, (size_t)len, &frame) == len);
	CHECK(frame.type == TYPE_OK && frame.request == 0x0102030405060708);
	CHECK(frame.descriptors == 1 && b.fds[0] == 5);
	reader = (struct reader){frame.body, frame.body + frame.len};
	CHECK(field_next(&reader, &field) == 1 && field.tag == TAG_STAGE && field.len == 5);
	CHECK(field_is_text(&field, 5) && !field_is_text(&field, 4));
	CHECK(field_next(&reader, &field) == 1 && get_u64(field.data) == UINT64_MAX);
	CHECK(field_next(&reader, &field) == 1 && field.len == 0);
	CHECK(field_next(&reader, &field) == 1 && get_u32(field.data) == 0);
	CHECK(field_next(&reader, &field) == 0);
}

static void test_bad_frames_are_refused(void)
{
	struct frame frame;
	struct reader reader;
	struct field field;

	memset(buf, 0, sizeof(buf));
	CHECK(frame_parse(buf, 4, &frame) == -EMSGSIZE);
	put_u32(buf, MAX_FRAME + 1);
	CHECK(frame_parse(buf, 16, &frame) == -EMSGSIZE);
	put_u32(buf, 12);
	put_u16(buf + 6, MAX_DESCRIPTORS + 1);
	CHECK(frame_parse(buf, 16, &frame) == -EPROTO);
	put_u16(buf, 1);
	put_u32(buf + 2, 3);
	reader = (struct reader){buf, buf + 8};
	CHECK(field_next(&reader, &field) == -EPROTO);
	reader = (struct reader){buf, buf + 5};
	CHECK(field_next(&reader, &field) == -EPROTO);
	put_u32(buf + 2, UINT32_MAX);
	reader = (struct reader){buf, buf + 8};
	CHECK(field_next(&reader, &field) == -EPROTO);
}

static void test_builder_overflow_sticks(void)
{
	struct builder b;

	build_begin(&b, buf, 64, TYPE_OK, 1);
	build_bytes(&b, TAG_NAME, buf, 43);
	CHECK(b.overflow && build_end(&b) == -EMSGSIZE);
	build_begin(&b, buf, 64, TYPE_OK, 1);
	build_bytes(&b, TAG_NAME, buf + 100, 42);
	CHECK(build_end(&b) == 64);
	build_u64(&b, TAG_NUMBER, 1);
	CHECK(build_end(&b) == -EMSGSIZE);
	build_begin(&b, buf, sizeof(buf), TYPE_OK, 1);
	for (unsigned i = 0; i <= MAX_DESCRIPTORS; i++)
		build_fd(&b, TAG_MADE_FD, 0);
	CHECK(build_end(&b) == -EMSGSIZE);
}

static void test_numbers_are_found_in_text(void)
{
	const char *text = "oom_kill_disable 0\nunder_oom 1\noom_kill 42\n";
	uint64_t value = 7;

	CHECK(number_after(text, "oom_kill") == 42);
	CHECK(number_after(text, "under_oom") == 1);
	CHECK(number_after(text, "oom") == 0);
	CHECK(number_after("", "oom_kill") == 0);
	CHECK(!parse_number("x1", &value));
	CHECK(*parse_number("12x", &value) == 'x' && value == 12);
	parse_number("999999999999999999999999999999", &value);
	CHECK(value > 1000000000000000000u / 10);
}

/* FIPS 180-4 examples, and every way to cut a message. */
static void test_sha256_is_that_of_the_standard(void)
{
	static const uint8_t abc[32] = {
		0xba, 0x78, 0x16, 0xbf, 0x8f, 0x01, 0xcf, 0xea, 0x41, 0x41, 0x40,
		0xde, 0x5d, 0xae, 0x22, 0x23, 0xb0, 0x03, 0x61, 0xa3, 0x96, 0x17,
		0x7a, 0x9c, 0xb4, 0x10, 0xff, 0x61, 0xf2, 0x00, 0x15, 0xad,
	};
	struct sha256 s, t;
	uint8_t one[32], other[32];

	sha256_init(&s);
	sha256_update(&s, "abc", 3);
	sha256_digest(&s, one);
	CHECK(memcmp(one, abc, 32) == 0);
	for (size_t i = 0; i < sizeof(buf); i++)
		buf[i] = (uint8_t)(i * 7);
	for (size_t len = 0; len < 300; len++) {
		sha256_init(&s);
		sha256_update(&s, buf, len);
		sha256_digest(&s, one);
		for (size_t cut = 1; cut <= 130; cut++) {
			sha256_init(&t);
			for (size_t at = 0; at < len; at += cut)
				sha256_update(&t, buf + at, len - at < cut ? len - at : cut);
			sha256_digest(&t, other);
			CHECK(memcmp(one, other, 32) == 0);
		}
	}
}

static void add_up(uint64_t value, void *context)
{
	*(uint64_t *)context += value;
}

static void test_each_line_of_a_long_file_is_a_whole_number(void)
{
	FILE *file = tmpfile();
	uint64_t sum = 0, wanted = 0;

	CHECK(file);
	for (uint64_t i = 1; i <= 40000; i++) {
		fprintf(file, "%llu\n", (unsigned long long)(i * 7919));
		wanted += i * 7919;
	}
	rewind(file);
	CHECK(each_number(fileno(file), add_up, &sum) == 40000);
	CHECK(sum == wanted);
	fclose(file);
}

int main(void)
{
	test_frame_built_is_frame_parsed();
	test_bad_frames_are_refused();
	test_builder_overflow_sticks();
	test_numbers_are_found_in_text();
	test_each_line_of_a_long_file_is_a_whole_number();
	test_sha256_is_that_of_the_standard();
	puts("ok");
	return 0;
}
