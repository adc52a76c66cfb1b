#pragma once

#include <stdbool.h>
#include <stddef.h>

#define OVERLAY_LOWERS_MAX 128u

/* What an overlay is made of: open directories, and the idmapped detached mounts they are in. */
struct overlay {
	int layers; /* mount */
	int upper; /* mount */
	int lower[OVERLAY_LOWERS_MAX]; /* top first */
	size_t lower_count;
	int upper_directory;
	int work_directory;
};

/*
 * Learn what this kernel's overlay takes. Once, in a mount namespace of our own in whose root we
 * may make directories. Returns 0 or -errno.
 */
int overlay_prepare(void);

/* Whether this kernel's overlay takes detached mounts by descriptor (Linux 6.15 and later). */
bool overlay_takes_descriptors(void);

/* A detached mount, made under the calling thread's file system identity; or -errno. */
int overlay_mount(const struct overlay *overlay);
