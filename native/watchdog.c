#define _GNU_SOURCE
#include "watchdog.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>

#include "kernel.h"
#include "spawner.h"

#define TICK_MS 250
/* So long no launch takes on a machine that works; and so long a hostile sandbox can hold us. */
#define STUCK_TICKS 8u
#define SUSPECT_TICKS 2u
#define IDLE_TICKS 40u

struct page {
	_Atomic uint32_t launch; /* number of the launch under way, or 0 */
	_Atomic uint32_t ended; /* number of the last launch that was ended by force */
	_Atomic uint32_t asleep; /* futex: 1 while the watchdog waits to be woken */
	_Atomic uint32_t patience; /* in ticks */
	char cgroup[ID_MAX + 64];
};

static struct page *page;
static uint32_t number;
static uint8_t stack[16 << 10] __attribute__((aligned(16)));

/* --- the process ---------------------------------------------------------------------- */

static void sleep_until_needed(struct page *shared)
{
	atomic_store(&shared->asleep, 1);
	if (atomic_load(&shared->launch) == 0)
		syscall(SYS_futex, &shared->asleep, FUTEX_WAIT, 1, NULL, NULL, 0);
	atomic_store(&shared->asleep, 0);
}

static void end_launch(struct page *shared, uint32_t launch)
{
	char path[ID_MAX + 80];

	snprintf(path, sizeof(path), "%.*s/cgroup.kill", (int)sizeof(shared->cgroup), shared->cgroup);
	/* It may have ended by itself just now; then its cgroup is not that one any more. */
	if (atomic_load(&shared->launch) != launch)
		return;
	atomic_store(&shared->ended, launch);
	write_file_at(WATCHDOG_CGROUPS, path, "1");
}

_Noreturn void watchdog_main(void)
{
	const struct timespec tick = {.tv_nsec = TICK_MS * 1000000l};
	struct page *shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED,
				   WATCHDOG_PAGE, 0);
	uint32_t last = 0;
	unsigned same = 0, idle = 0;

	prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
	prctl(PR_SET_NAME, WATCHDOG_NAME, 0, 0, 0);
	if (shared == MAP_FAILED || getppid() == 1)
		_exit(1);
	for (;;) {
		uint32_t launch = atomic_load(&shared->launch);

		same = launch && launch == last ? same + 1 : 0;
		idle = launch || last ? 0 : idle + 1;
		last = launch;
		if (same >= atomic_load(&shared->patience))
			end_launch(shared, launch);
		if (idle >= IDLE_TICKS) {
			sleep_until_needed(shared);
			idle = 0;
		}
		clock_nanosleep(CLOCK_MONOTONIC, 0, &tick, NULL);
	}
}

/* --- in the worker -------------------------------------------------------------------- */

static NEVER_RETURNS int run_watchdog(void *context)
{
	char *const argv[] = {(char *)WATCHDOG_NAME, NULL};
	char *const env[] = {NULL};
	int *error = context;

	if (sys_close_range(SLOT_END, ~0u, CLOSE_UNSHARE) < 0 ||
	    dup2(SLOT_OUT, WATCHDOG_PAGE) < 0 || dup2(SLOT_ERR, WATCHDOG_CGROUPS) < 0 ||
	    fcntl(WATCHDOG_PAGE, F_SETFD, 0) < 0 || fcntl(WATCHDOG_CGROUPS, F_SETFD, 0) < 0 ||
	    syscall(SYS_execveat, SLOT_PROGRAM, "", argv, env, EMPTY_PATH) < 0)
		*error = -errno;
	return 1;
}

int watchdog_start(void)
{
	struct clone_args args = {
		.flags = CLONE_VM | CLONE_VFORK | CLONE_FILES,
		.stack = (uint64_t)(uintptr_t)stack,
		.stack_size = sizeof(stack),
	};
	auto_close int fd = memfd_create("watchdog", MFD_CLOEXEC);
	int error = 0;
	long pid;

	if (fd < 0 || ftruncate(fd, sizeof(*page)) < 0)
		return -errno;
	page = mmap(NULL, sizeof(*page), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (page == MAP_FAILED)
		return -errno;
	if (slot_put(fd, SLOT_OUT) < 0 || slot_put(worker.cgroups.unified, SLOT_ERR) < 0 ||
	    slot_put(worker.program, SLOT_PROGRAM) < 0)
		return -errno;
	pid = clone_onto_stack(&args, run_watchdog, &error);
	slot_clear(SLOT_OUT);
	slot_clear(SLOT_ERR);
	slot_clear(SLOT_PROGRAM);
	return pid < 0 ? (int)pid : error;
}

void watchdog_begin(const char *cgroup, bool suspect)
{
	snprintf(page->cgroup, sizeof(page->cgroup), "%s", cgroup);
	atomic_store(&page->patience, suspect ? SUSPECT_TICKS : STUCK_TICKS);
	number = number == UINT32_MAX ? 1 : number + 1;
	atomic_store(&page->launch, number);
	if (atomic_load(&page->asleep)) {
		atomic_store(&page->asleep, 0);
		syscall(SYS_futex, &page->asleep, FUTEX_WAKE, 1, NULL, NULL, 0);
	}
}

bool watchdog_end(void)
{
	atomic_store(&page->launch, 0);
	return atomic_load(&page->ended) == number;
}
