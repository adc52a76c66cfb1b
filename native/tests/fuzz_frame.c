/*
 * Fuzz target: a byte stream as a worker would get it, cut into frames and fields. With -DDRIVER
 * (no libFuzzer) it feeds itself random and mutated streams for argv[1] seconds.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "frame.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Every byte that a parser says is there must be: the sanitizers watch. */
static unsigned touch(const uint8_t *data, size_t len)
{
	unsigned sum = 0;

	for (size_t i = 0; i < len; i++)
		sum += data[i];
	return sum;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	uint8_t *copy = malloc(size ? size : 1);
	volatile unsigned sum = 0;
	size_t at = 0;

	if (!copy)
		return 0;
	memcpy(copy, data, size);
	for (;;) {
		struct frame frame;
		ssize_t len = frame_parse(copy + at, size - at, &frame);
		struct reader reader;
		struct field field;
		int more;

		if (len <= 0)
			break;
		if ((size_t)len > size - at || frame.descriptors > MAX_DESCRIPTORS)
			abort();
		reader = (struct reader){frame.body, frame.body + frame.len};
		while ((more = field_next(&reader, &field)) > 0) {
			sum += touch(field.data, field.len);
			sum += field_is_text(&field, 100);
		}
		if (more != 0 && more != -71 /* EPROTO */)
			abort();
		at += (size_t)len;
	}
	free(copy);
	return 0;
}

#ifdef DRIVER
int main(int argc, char **argv)
{
	time_t until = time(NULL) + (argc > 1 ? atoi(argv[1]) : 5);
	unsigned long rounds = 0;
	static uint8_t stream[4096];

	srandom(1);
	while (time(NULL) < until) {
		size_t size = (size_t)random() % sizeof(stream);
		size_t at = 0;

		for (size_t i = 0; i < size; i++)
			stream[i] = (uint8_t)(random() % 4 ? 0 : random());
		/* Often a plausible header, so that the fields are reached. */
		while (random() % 8 && at + 32 < size) {
			size_t len = 12 + (size_t)random() % (size - at - 16);

			stream[at] = stream[at + 1] = 0;
			stream[at + 2] = (uint8_t)(len >> 8);
			stream[at + 3] = (uint8_t)len;
			stream[at + 6] = 0;
			stream[at + 7] = (uint8_t)(random() % 20);
			at += 4 + len;
			if (at >= size)
				break;
		}
		LLVMFuzzerTestOneInput(stream, size);
		rounds++;
	}
	printf("%lu streams\n", rounds);
	return 0;
}
#endif
