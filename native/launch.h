/* A launch, for its two parts: launch.c in the worker, and command.c on its way into a sandbox. */
#pragma once

#include "spawner.h"

enum gate { GATE_OPEN, GATE_PASSED, GATE_CLOSED };

/* Words that others write are read and written atomically. */
struct launch {
	struct launch *next; /* among those that have ended, or among the spare ones */
	struct exec *exec; /* NULL: nobody waits for it any more */
	struct source source;
	struct exec_spec spec;
	bool held; /* the descriptors of the spec are not closed yet */
	bool pty;
	bool no_new_privs;
	bool limited[CONTROLLERS]; /* by version 1 */
	char tasks[ID_MAX + 8]; /* below the base of each hierarchy */
	char *strings; /* of the spec; used again if they are small */
	size_t strings_room;
	const char *path; /* the exec's own PATH */
	uint8_t *stacks; /* of joiner and command */
	pid_t joiner; /* until it is reaped */
	int pidfd; /* the joiner's, if we are to be told of its end */
	int error;
	const char *stage;
	uint32_t alive; /* cleared by the kernel, when the joiner has left our memory */
	uint32_t apart; /* set when the joiner has descriptors of its own */
	uint32_t gate; /* who decides whether the command is executed */
	pid_t pid; /* written by the kernel, before the command runs */
	uint32_t running; /* cleared by the kernel, when the command has left our memory */
};

/* The file by which to enter the sandbox's cgroup of a version 1 controller; or -errno. */
int open_tasks(const struct launch *launch, enum controller controller);
/* Run in the second process, which shares the joiner's descriptors. Only returns if it fails. */
int command_run(void *launch);
