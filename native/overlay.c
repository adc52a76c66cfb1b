/*
 * Stack directories that lie in detached mounts. Since Linux 6.15 overlay takes them as they are,
 * by descriptor; before, it takes paths, and only of mounts that are attached in the caller's
 * namespace, so there they are attached for as long as it looks at them.
 */
#define _GNU_SOURCE
#include "overlay.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>

#include "kernel.h"
#include "util.h"

#define LAYERS_PLACE "/.layers"
#define UPPER_PLACE "/.upper"
#define STACK_PLACE "/.stack"

static const char *const options[][2] = {
	{"redirect_dir", "nofollow"},
	{"index", "off"},
	{"metacopy", "off"},
	{"xino", "off"},
};

static bool takes_descriptors;

static int set_descriptor(int fs, const char *key, int fd)
{
	return sys_fsconfig(fs, FSCONFIG_SET_FD, key, NULL, fd);
}

static int set_layers(int fs, const struct overlay *overlay)
{
	for (size_t i = 0; i < overlay->lower_count; i++)
		TRY(set_descriptor(fs, "lowerdir+", overlay->lower[i]));
	if (overlay->upper_directory < 0)
		return 0;
	TRY(set_descriptor(fs, "upperdir", overlay->upper_directory));
	TRY(set_descriptor(fs, "workdir", overlay->work_directory));
	for (size_t i = 0; i < ARRAY_LEN(options); i++)
		TRY(sys_fsset(fs, options[i][0], options[i][1]));
	return sys_fsconfig(fs, FSCONFIG_SET_FLAG, "volatile", NULL, 0);
}

static int mount_by_descriptors(const struct overlay *overlay)
{
	auto_close int fs = sys_fsopen("overlay");

	TRY(fs);
	TRY(set_layers(fs, overlay));
	TRY(sys_fsset(fs, "source", "coldframe"));
	return sys_fsmount(fs, ATTR_NODEV);
}

/* --- before 6.15 --------------------------------------------------------------------- */

static int write_options(const struct overlay *overlay, char *text, size_t size)
{
	FILE *file = fmemopen(text, size, "w");

	if (!file)
		return -errno;
	for (size_t i = 0; i < overlay->lower_count; i++)
		fprintf(file, "%s/proc/self/fd/%d", i ? ":" : "volatile,lowerdir=", overlay->lower[i]);
	fprintf(file, ",upperdir=/proc/self/fd/%d,workdir=/proc/self/fd/%d",
		overlay->upper_directory, overlay->work_directory);
	for (size_t i = 0; i < ARRAY_LEN(options); i++)
		fprintf(file, ",%s=%s", options[i][0], options[i][1]);
	return fclose(file) ? -E2BIG : 0;
}

/* mount(2) takes a page of options; fsconfig would take 255 bytes for all layers. */
static int mount_by_paths(const struct overlay *overlay)
{
	char text[4096];
	int copy;

	TRY(write_options(overlay, text, sizeof(text)));
	TRY(check(mount("coldframe", STACK_PLACE, "overlay", MS_NODEV, text)));
	copy = sys_open_tree(AT_FDCWD, STACK_PLACE, CLONE_TREE | O_CLOEXEC);
	umount2(STACK_PLACE, MNT_DETACH);
	return copy;
}

static int mount_attached(const struct overlay *overlay)
{
	int error, made;

	TRY(sys_attach(overlay->layers, LAYERS_PLACE));
	error = sys_attach(overlay->upper, UPPER_PLACE);
	made = error ? error : mount_by_paths(overlay);
	if (!error)
		umount2(UPPER_PLACE, MNT_DETACH);
	umount2(LAYERS_PLACE, MNT_DETACH);
	return made;
}

int overlay_mount(const struct overlay *overlay)
{
	return takes_descriptors ? mount_by_descriptors(overlay) : mount_attached(overlay);
}

/* --- which of the two ---------------------------------------------------------------- */

bool overlay_takes_descriptors(void)
{
	return takes_descriptors;
}

int overlay_prepare(void)
{
	static const char *const places[] = {LAYERS_PLACE, UPPER_PLACE, STACK_PLACE};
	auto_close int one = new_mount("tmpfs", 0, NULL);
	auto_close int two = new_mount("tmpfs", 0, NULL);
	struct overlay trial = {
		.lower = {one, two}, .lower_count = 2, .upper_directory = -1, .work_directory = -1};
	auto_close int made = -1;

	TRY(one);
	TRY(two);
	made = mount_by_descriptors(&trial);
	takes_descriptors = made >= 0;
	for (size_t i = 0; i < ARRAY_LEN(places); i++)
		TRY(check(mkdir(places[i], 0755)));
	return 0;
}
