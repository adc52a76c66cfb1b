/* Pid 1 of a sandbox: sets it up, gives up every privilege, then only reaps. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#define INIT_NAME "pid1"

/* Until it is told what for: then INIT_NAME. */
#define BLANK_NAME "blank"
#define INJECT_SIZE 23

/* The first message. */
struct init_order {
	uint8_t ahead; /* report when all is done that needs no configuration */
	char inject[INJECT_SIZE];
};

/* The third. */
struct init_config {
	uint64_t shm_bytes;
	char hostname[65];
	char inject[INJECT_SIZE];
};

enum report_kind {
	REPORT_READY = 1,
	REPORT_FAILED = 2,
	REPORT_REAPED = 3,
	REPORT_PREPARED = 4,
};

struct report {
	uint32_t kind;
	int32_t pid;
	int32_t status; /* of a process, or errno */
	uint32_t stage; /* number of a step */
	uint64_t user_us;
	uint64_t system_us;
	uint64_t peak_kib;
	uint64_t blocks_in;
	uint64_t blocks_out;
};

/* NULL behind the last. */
const char *init_step_name(size_t index);

/* Never returns. */
_Noreturn void init_main(void);
