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
	return sys_fsconfig(fs, FSCONFIG_SET_FD, key, NULL, fd) < 0 ? -errno : 0;
}

static int set_layers(int fs, const struct overlay *overlay)
{
	int error = 0;

	for (size_t i = 0; i < overlay->lower_count && !error; i++)
		error = set_descriptor(fs, "lowerdir+", overlay->lower[i]);
	if (!error && overlay->upper_directory >= 0)
		error = set_descriptor(fs, "upperdir", overlay->upper_directory);
	if (!error && overlay->work_directory >= 0)
		error = set_descriptor(fs, "workdir", overlay->work_directory);
	return error;
}

static int set_options(int fs)
{
	for (size_t i = 0; i < ARRAY_LEN(options); i++)
		if (sys_fsconfig(fs, FSCONFIG_SET_STRING, options[i][0], options[i][1], 0) < 0)
			return -errno;
	return sys_fsconfig(fs, FSCONFIG_SET_FLAG, "volatile", NULL, 0) < 0 ? -errno : 0;
}

static int mount_by_descriptors(const struct overlay *overlay)
{
	auto_close int fs = sys_fsopen("overlay");
	int mount, error;

	if (fs < 0)
		return -errno;
	error = set_layers(fs, overlay);
	error = error || overlay->upper_directory < 0 ? error : set_options(fs);
	if (error)
		return error;
	if (sys_fsconfig(fs, FSCONFIG_SET_STRING, "source", "coldframe", 0) < 0 ||
	    sys_fsconfig(fs, FSCONFIG_CMD_CREATE, NULL, NULL, 0) < 0)
		return -errno;
	mount = sys_fsmount(fs, ATTR_NODEV);
	return mount < 0 ? -errno : mount;
}

/* --- before 6.15 --------------------------------------------------------------------- */

static int attach(int mount, const char *place)
{
	return sys_move_mount(mount, "", AT_FDCWD, place, MOVE_EMPTY_PATH) < 0 ? -errno : 0;
}

/* Append to `text`; its end moves to `size` when there is no room. */
static void append(char *text, size_t size, size_t *len, const char *key, int fd)
{
	int put = snprintf(text + *len, size - *len, "%s/proc/self/fd/%d", key, fd);

	*len = put < 0 || (size_t)put >= size - *len ? size : *len + (size_t)put;
}

static int write_options(const struct overlay *overlay, char *text, size_t size)
{
	size_t len = 0;

	for (size_t i = 0; i < overlay->lower_count && len < size; i++)
		append(text, size, &len, i ? ":" : "volatile,lowerdir=", overlay->lower[i]);
	if (len < size)
		append(text, size, &len, ",upperdir=", overlay->upper_directory);
	if (len < size)
		append(text, size, &len, ",workdir=", overlay->work_directory);
	for (size_t i = 0; i < ARRAY_LEN(options) && len < size; i++) {
		int put = snprintf(text + len, size - len, ",%s=%s", options[i][0], options[i][1]);

		len = put < 0 || (size_t)put >= size - len ? size : len + (size_t)put;
	}
	return len < size ? 0 : -E2BIG;
}

/* mount(2) takes a page of options; fsconfig would take 255 bytes for all layers. */
static int mount_by_paths(const struct overlay *overlay)
{
	char text[4096];
	int error = write_options(overlay, text, sizeof(text));
	int copy;

	if (error)
		return error;
	if (mount("coldframe", STACK_PLACE, "overlay", MS_NODEV, text) < 0)
		return -errno;
	copy = sys_open_tree(AT_FDCWD, STACK_PLACE, CLONE_TREE | O_CLOEXEC);
	error = copy < 0 ? -errno : 0;
	umount2(STACK_PLACE, MNT_DETACH);
	return error ? error : copy;
}

static int mount_attached(const struct overlay *overlay)
{
	int error = attach(overlay->layers, LAYERS_PLACE);
	int made;

	if (error)
		return error;
	error = attach(overlay->upper, UPPER_PLACE);
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

static int detached_directory(void)
{
	auto_close int fs = sys_fsopen("tmpfs");
	int mount;

	if (fs < 0 || sys_fsconfig(fs, FSCONFIG_CMD_CREATE, NULL, NULL, 0) < 0)
		return -errno;
	mount = sys_fsmount(fs, 0);
	return mount < 0 ? -errno : mount;
}

bool overlay_takes_descriptors(void)
{
	return takes_descriptors;
}

int overlay_prepare(void)
{
	static const char *const places[] = {LAYERS_PLACE, UPPER_PLACE, STACK_PLACE};
	auto_close int one = detached_directory();
	auto_close int two = detached_directory();
	struct overlay trial = {
		.lower = {one, two}, .lower_count = 2, .upper_directory = -1, .work_directory = -1};
	auto_close int made = -1;

	if (one < 0 || two < 0)
		return one < 0 ? one : two;
	made = mount_by_descriptors(&trial);
	takes_descriptors = made >= 0;
	for (size_t i = 0; i < ARRAY_LEN(places); i++)
		if (mkdir(places[i], 0755) < 0)
			return -errno;
	return 0;
}
