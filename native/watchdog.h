/*
 * While a command is launched the worker waits in the kernel. Between its joining the user
 * namespace and its execve the command can be stopped by others in the sandbox; then this
 * process kills the exec's cgroup, which lets the worker go on.
 */
#pragma once

#include <stdbool.h>

#define WATCHDOG_NAME "watchdog"
#define WATCHDOG_PAGE 3
#define WATCHDOG_CGROUPS 4

_Noreturn void watchdog_main(void);

/* Start it. Returns 0 or -errno. */
int watchdog_start(void);

/*
 * A launch begins in `cgroup`, a path below the base of the unified hierarchy. Whose launches had
 * to be ended before is `suspect`: it gets less time.
 */
void watchdog_begin(const char *cgroup, bool suspect);

/* It is over; true if the watchdog had to end it. */
bool watchdog_end(void);
