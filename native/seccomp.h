/* The system calls that a sandbox may not make. */
#pragma once

/* Build the program once; later calls only install it. */
void seccomp_prepare(void);

/*
 * Install it on the caller. Needs CAP_SYS_ADMIN in its user namespace or no_new_privs.
 * Returns 0 or -errno.
 */
int seccomp_install(void);
