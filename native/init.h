/* Pid 1 of a sandbox: sets it up, gives up every privilege, then only reaps. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#define INIT_NAME "pid1"
#define INIT_CHANNEL 3

struct init_config {
	uint64_t shm_bytes;
	uint32_t no_new_privs;
	char hostname[65];
	char inject[23];
};

enum report_kind {
	REPORT_READY = 1,
	REPORT_FAILED = 2,
	REPORT_REAPED = 3,
};

struct report {
	uint32_t kind;
	int32_t pid;
	int32_t status; /* of a process, or errno */
	uint32_t stage; /* index into init_steps */
	uint64_t user_us;
	uint64_t system_us;
	uint64_t peak_kib;
	uint64_t blocks_in;
	uint64_t blocks_out;
};

extern const char *const init_steps[];
extern const size_t init_step_count;

/* Never returns. */
_Noreturn void init_main(void);
