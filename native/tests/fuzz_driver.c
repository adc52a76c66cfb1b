/*
 * A small coverage-guided fuzzer for where libFuzzer is not: gcc's trace-pc tells which ways were
 * taken, its trace-cmp what bytes were compared with.
 *
 *   fuzz SECONDS CORPUS [FOUND]   FOUND gets inputs that took new ways; `crash` what went wrong
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define SIZE_MAX_INPUT 1024u
#define INPUTS_MAX 4096u
#define WAYS (1u << 12)
#define PAIRS 1024u

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
void __sanitizer_set_death_callback(void (*callback)(void));
void __sanitizer_cov_trace_pc(void);

struct input {
	size_t size;
	uint8_t data[SIZE_MAX_INPUT];
};

static struct input inputs[INPUTS_MAX], now;
static size_t input_count, way_count;
static uint8_t taken[WAYS], seen[WAYS]; /* how often; how often so far, as bits of powers of two */
static uintptr_t last;
/* What was compared: where the input has the one, the other would be a way. */
static struct pair {
	size_t len;
	uint64_t had, wanted;
} pairs[PAIRS];

void __sanitizer_cov_trace_pc(void)
{
	uintptr_t at = (uintptr_t)__builtin_return_address(0);
	uint8_t *count = &taken[(at ^ last) % WAYS];

	*count = (uint8_t)(*count + (*count < 255));
	last = at >> 1;
}

/* The newest of each place. */
static void note(const void *place, size_t len, uint64_t had, uint64_t wanted)
{
	if (had != wanted)
		pairs[(uintptr_t)place % PAIRS] = (struct pair){len, had, wanted};
}

#define TRACE(bytes, type)                                                                         \
	void __sanitizer_cov_trace_cmp##bytes(type a, type b);                                     \
	void __sanitizer_cov_trace_cmp##bytes(type a, type b)                                      \
	{                                                                                          \
		const char *place = __builtin_return_address(0);                                   \
                                                                                                   \
		note(place, bytes, a, b);                                                          \
		note(place + 1, bytes, b, a);                                                      \
	}                                                                                          \
	void __sanitizer_cov_trace_const_cmp##bytes(type wanted, type had);                        \
	void __sanitizer_cov_trace_const_cmp##bytes(type wanted, type had)                         \
	{                                                                                          \
		note(__builtin_return_address(0), bytes, had, wanted);                             \
	}
TRACE(1, uint8_t)
TRACE(2, uint16_t)
TRACE(4, uint32_t)
TRACE(8, uint64_t)

/* How many cases, the width in bits, and they. */
void __sanitizer_cov_trace_switch(uint64_t value, void *cases);
void __sanitizer_cov_trace_switch(uint64_t value, void *cases)
{
	const uint64_t *words = cases;
	const char *place = __builtin_return_address(0);

	for (uint64_t i = 0; i < words[0]; i++)
		note(place + i, words[1] / 8, value, words[2 + i]);
}

static void save(int dir, const char *name)
{
	int fd = openat(dir, name, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);

	if (fd < 0 || write(fd, now.data, now.size) != (ssize_t)now.size)
		perror(name);
	close(fd);
}

static void save_crash(void)
{
	save(AT_FDCWD, "crash");
}

static void aborted(int signum)
{
	save_crash();
	signal(signum, SIG_DFL);
	raise(signum);
}

/* Run what is in `now`; true if it took a way that none has before, or took one far more often. */
static bool run(void)
{
	bool news = false;

	memset(taken, 0, sizeof(taken));
	last = 0;
	LLVMFuzzerTestOneInput(now.data, now.size);
	for (size_t i = 0; i < WAYS; i++) {
		unsigned bit = taken[i] ? 1u << (31 - __builtin_clz(taken[i])) : 0;

		if (!(bit & ~(unsigned)seen[i]))
			continue;
		way_count += !seen[i];
		seen[i] = (uint8_t)(seen[i] | bit);
		news = true;
	}
	return news;
}

static void keep(void)
{
	if (input_count < INPUTS_MAX)
		inputs[input_count++] = now;
}

static size_t below(size_t limit)
{
	return limit ? (size_t)random() % limit : 0;
}

static void resize(size_t at, size_t remove, size_t add)
{
	size_t rest = now.size - at - remove;

	if (at + add + rest > SIZE_MAX_INPUT)
		return;
	memmove(now.data + at + add, now.data + at + remove, rest);
	now.size = at + add + rest;
}

/* Big-endian, as the protocol is. */
static void put_word(size_t at, uint64_t word, size_t len)
{
	for (size_t i = 0; i < len && at + i < now.size; i++)
		now.data[at + i] = (uint8_t)(word >> 8 * (len - 1 - i));
}

/* Widened to an int, most are fewer bytes in the input. */
static void meet(const struct pair *pair, size_t from)
{
	size_t len = (size_t)1 << below(4);
	uint64_t had = 0;

	if (len > pair->len)
		return;
	for (size_t at = from; at < now.size; at++) {
		had = had << 8 | now.data[at];
		if (len < 8)
			had &= (1ull << 8 * len) - 1;
		if (at - from + 1 < len || had != pair->had)
			continue;
		put_word(at + 1 - len, pair->wanted, len);
		return;
	}
}

static void mutate(void)
{
	const struct input *other = &inputs[below(input_count)];
	size_t at = below(now.size), len = 1 + below(16);

	switch (below(8)) {
	case 0:
		if (now.size)
			now.data[at] ^= (uint8_t)(1u << below(8));
		return;
	case 1:
		meet(&pairs[below(PAIRS)], at);
		return;
	case 2: /* the length of a field */
		put_word(at, below(2) ? now.size - at - 4 : below(64), 4);
		return;
	case 6: /* and of a frame */
		put_word(0, now.size - 4, 4);
		return;
	case 3:
		resize(at, len < now.size - at ? len : now.size - at, 0);
		return;
	case 4:
		resize(at, 0, len);
		return;
	case 5:
		if (now.size)
			now.data[at] = (uint8_t)random();
		return;
	default:
		if (!other->size)
			return;
		len = 1 + below(other->size);
		if (at + len <= SIZE_MAX_INPUT)
			memcpy(now.data + at, other->data + other->size - len, len);
		if (at + len <= SIZE_MAX_INPUT && now.size < at + len)
			now.size = at + len;
	}
}

static void load(const char *path)
{
	DIR *dir = opendir(path);
	struct dirent *entry;

	while (dir && (entry = readdir(dir))) {
		int fd = openat(dirfd(dir), entry->d_name, O_RDONLY | O_CLOEXEC);
		ssize_t got = read(fd, now.data, SIZE_MAX_INPUT);

		close(fd);
		now.size = got > 0 ? (size_t)got : 0;
		if (got > 0 && run())
			keep();
	}
	if (dir)
		closedir(dir);
}

int main(int argc, char **argv)
{
	int found = argc > 3 ? open(argv[3], O_PATH | O_DIRECTORY | O_CLOEXEC) : -1;
	time_t until = time(NULL) + (argc > 1 ? atoi(argv[1]) : 5);
	unsigned long rounds = 0;
	char name[32];

	signal(SIGABRT, aborted);
	__sanitizer_set_death_callback(save_crash);
	if (argc > 2)
		load(argv[2]);
	now.size = 0;
	keep();
	for (; time(NULL) < until; rounds++) {
		now = inputs[below(input_count)];
		for (size_t i = 1 + below(8); i; i--)
			mutate();
		if (!run())
			continue;
		keep();
		snprintf(name, sizeof(name), "%zu", input_count);
		if (found >= 0)
			save(found, name);
	}
	printf("%lu inputs, %zu ways, %zu inputs that found one\n", rounds, way_count, input_count);
	return 0;
}
