/* The process that removes trees; the worker's side is in spawner.h. */
#pragma once

#include <stdint.h>

#define REMOVER_NAME "remover"
#define REMOVER_CHANNEL 3

_Noreturn void remover_main(void);

/*
 * Remove `name` in `dir` and everything below it. Counts what was removed; a name that is not
 * there is no error. Returns 0 or -errno.
 */
int remove_below(int dir, const char *name, uint64_t *removed);
