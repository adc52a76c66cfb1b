/*
 * The root of a sandbox: read-only layers below a writable upper, and a /dev of its own, both
 * as detached mounts that pid 1 moves into its namespace. The upper and the layers are seen
 * through idmapped clones, so what lies on disk are the sandbox's own ids.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/sysmacros.h>

#include "kernel.h"
#include "overlay.h"
#include "spawner.h"

static int own_mounts = -1; /* our small mount namespace */

static void keep_spare_dev(void);

static int mount_at(const char *type, const char *path)
{
	auto_close int mount = new_mount(type, ATTR_NOSUID | ATTR_NODEV | ATTR_NOEXEC, NULL);

	return mount < 0 ? mount : sys_attach(mount, path);
}

/*
 * Leave the host's mounts for a namespace with a handful: every sandbox starts from a copy of
 * it, and overlay takes uppers and layers only from mounts of the caller's own.
 */
int rootfs_prepare(int layers)
{
	/* The last ones are where pid 1 of a sandbox puts together what its root is to hold. */
	static const char *const directories[] = {"/proc",     "/sys",	   "/layers", "/mnt", "/new",
						  "/new/proc", "/new/sys", "/new/dev"};
	auto_close int tree = sys_open_tree(layers, "", CLONE_TREE | EMPTY_PATH | O_CLOEXEC);
	auto_close int root = -1;

	TRY(tree);
	TRY(check(unshare(CLONE_NEWNS)));
	TRY(check(mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL)));
	TRY(root = new_mount("tmpfs", ATTR_NOSUID | ATTR_NODEV, NULL));
	TRY(sys_attach(root, "/"));
	TRY(check(fchdir(root)));
	TRY(pivot_here());
	for (size_t i = 0; i < ARRAY_LEN(directories); i++)
		TRY(check(mkdir(directories[i], 0755)));
	TRY(mount_at("proc", "/proc"));
	TRY(mount_at("sysfs", "/sys"));
	TRY(overlay_prepare());
	TRY(sys_attach(tree, "/layers"));
	worker.layers = open("/layers", O_PATH | O_DIRECTORY | O_CLOEXEC);
	worker.proc = open("/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	own_mounts = open("/proc/self/ns/mnt", O_RDONLY | O_CLOEXEC);
	keep_spare_dev();
	return worker.layers < 0 || worker.proc < 0 || own_mounts < 0 ? -errno : 0;
}

void act_as(uint32_t uid, uint32_t gid)
{
	setfsgid(gid);
	setfsuid(uid);
	/* Changing identity may make us dumpable, as the host's fs.suid_dumpable says. */
	prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
}

static int idmap(int tree, int userns)
{
	struct mount_attributes map = {.attr_set = ATTR_IDMAP, .userns_fd = (uint64_t)userns};

	return sys_mount_setattr(tree, "", EMPTY_PATH, &map);
}

int rootfs_at_home(bool home)
{
	return check(setns(home ? worker.home_mounts : own_mounts, CLONE_NEWNS));
}

/* A detached copy of the mount that `upper` lies on, rooted there, whatever namespace it is of. */
static int clone_upper(int upper)
{
	int tree;

	TRY(rootfs_at_home(true));
	tree = sys_open_tree(upper, "", CLONE_TREE | EMPTY_PATH | O_CLOEXEC);
	if (rootfs_at_home(false) < 0)
		fatal("leave the host's mounts");
	return tree;
}

static int tmpfs_upper(uint64_t bytes)
{
	char size[24];
	/* Its root belongs to 0 of the sandbox, not to whom we act as: it is idmapped like others. */
	const mount_option options[] = {
		{"size", size}, {"mode", "755"}, {"uid", "0"}, {"gid", "0"}, {NULL, NULL}};

	snprintf(size, sizeof(size), "%llu", (unsigned long long)bytes);
	return new_mount("tmpfs", ATTR_NODEV, options);
}

static int make_directory(int dir, const char *name, mode_t mode)
{
	struct stat st;

	if (mkdirat(dir, name, mode) == 0)
		return mode & S_ISVTX ? check(fchmodat(dir, name, mode, 0)) : 0;
	if (errno != EEXIST)
		return -errno;
	TRY(check(fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW)));
	/* A link where we mount would lead the mount elsewhere in the image: refused later. */
	return S_ISDIR(st.st_mode) || S_ISLNK(st.st_mode) ? 0 : -ENOTDIR;
}

static int open_directory(int dir, const char *name)
{
	return sys_openat2(dir, name, O_PATH | O_DIRECTORY | O_CLOEXEC,
			   RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS);
}

static int open_or_make(int dir, const char *name)
{
	int fd = open_directory(dir, name);

	if (fd != -ENOENT)
		return fd;
	TRY(make_directory(dir, name, 0755));
	return open_directory(dir, name);
}

_Static_assert(LAYERS_MAX <= OVERLAY_LOWERS_MAX, "every layer needs a place");

static int add_layers(struct overlay *overlay, const struct root_spec *spec, int userns)
{
	TRY(overlay->layers = sys_open_tree(worker.layers, "", CLONE_TREE | EMPTY_PATH | O_CLOEXEC));
	TRY(idmap(overlay->layers, userns));
	for (size_t i = 0; i < spec->layer_count; i++) {
		int fd = open_directory(overlay->layers, spec->layers[i]);

		TRY(fd);
		overlay->lower[overlay->lower_count++] = fd;
	}
	return 0;
}

static int add_upper(struct overlay *overlay, const struct root_spec *spec, int userns)
{
	int error;

	overlay->upper =
		spec->upper >= 0 ? clone_upper(spec->upper) : tmpfs_upper(spec->tmpfs_bytes);
	TRY(overlay->upper);
	error = idmap(overlay->upper, userns);
	/* Before Linux 6.3 tmpfs cannot be idmapped. Ours is seen by this sandbox alone and thrown
	 * away with it, so that the ids in it may be the host's. */
	if (error != -EINVAL || spec->upper >= 0)
		TRY(error);
	/* Left by an earlier sandbox on this upper: the machine has not crashed since, or it would
	 * not be used again. */
	if (unlinkat(overlay->upper, "work/work/incompat/volatile/dirty", 0) == 0)
		unlinkat(overlay->upper, "work/work/incompat/volatile", AT_REMOVEDIR);
	TRY(overlay->upper_directory = open_or_make(overlay->upper, "upper"));
	TRY(overlay->work_directory = open_or_make(overlay->upper, "work"));
	return 0;
}

/* Before Linux 6.3 overlay has no nameless files. */
static int make_and_remove(int root)
{
	const char *name = ".coldframe.writable";

	TRY(check(mkdirat(root, name, 0700)));
	return check(unlinkat(root, name, AT_REMOVEDIR));
}

/* Overlay falls back to read-only in silence when it cannot use its work directory. */
static int assert_writable(int root)
{
	auto_close int probe = -1;
	struct statvfs st;

	TRY(check(fstatvfs(root, &st)));
	if (st.f_flag & ST_RDONLY)
		return -EROFS;
	probe = openat(root, ".", O_TMPFILE | O_WRONLY | O_CLOEXEC, 0600);
	if (probe >= 0)
		return 0;
	return errno == EOPNOTSUPP ? make_and_remove(root) : -errno;
}

static int add_mount_points(int root)
{
	TRY(make_directory(root, "tmp", 01777));
	TRY(make_directory(root, "dev", 0755));
	TRY(make_directory(root, "proc", 0755));
	return make_directory(root, "sys", 0755);
}

static int fill_dev(int dev)
{
	static const struct {
		const char *name;
		unsigned minor;
		unsigned major;
	} nodes[] = {
		{"null", 3, 1}, {"zero", 5, 1},	   {"full", 7, 1},
		{"random", 8, 1}, {"urandom", 9, 1}, {"tty", 0, 5},
	};
	static const char *const links[][2] = {
		{"/proc/self/fd", "fd"},	{"/proc/self/fd/0", "stdin"},
		{"/proc/self/fd/1", "stdout"}, {"/proc/self/fd/2", "stderr"},
		{"pts/ptmx", "ptmx"},
	};
	static const char *const directories[] = {"pts", "shm", ".empty"};
	for (size_t i = 0; i < ARRAY_LEN(nodes); i++)
		TRY(check(mknodat(dev, nodes[i].name, S_IFCHR | 0666,
				  makedev(nodes[i].major, nodes[i].minor))));
	for (size_t i = 0; i < ARRAY_LEN(links); i++)
		TRY(check(symlinkat(links[i][0], dev, links[i][1])));
	for (size_t i = 0; i < ARRAY_LEN(directories); i++)
		TRY(check(mkdirat(dev, directories[i], 0755)));
	return 0;
}

static int make_dev(void)
{
	static const mount_option options[] = {{"mode", "755"}, {"size", "1m"}, {NULL, NULL}};
	auto_close int dev = new_mount("tmpfs", ATTR_NOSUID | ATTR_NOEXEC, options);

	TRY(dev);
	TRY(fill_dev(dev));
	return take_fd_from(&dev);
}

/*
 * One made ahead when there was nothing else to do. Its files belong to 0 of whoever it is
 * idmapped to. Older kernels cannot idmap tmpfs: there each is made when it is needed.
 */
static int spare_dev = -1;

static void keep_spare_dev(void)
{
	if (spare_dev < 0 && overlay_takes_descriptors())
		spare_dev = make_dev();
}

int rootfs_take_dev(int userns, uint32_t id_base)
{
	int dev = spare_dev;

	spare_dev = -1;
	if (dev >= 0) {
		if (idmap(dev, userns) == 0)
			return dev;
		close_quietly(&dev);
	}
	act_as(id_base, id_base);
	dev = make_dev();
	act_as(0, 0);
	return dev;
}

int begin_step(const char *step, const char *inject, const char **stage)
{
	*stage = step;
	return inject && strcmp(inject, step) == 0 ? -EIO : 0;
}

static int make_root(const struct root_spec *spec, int userns, struct overlay *overlay,
		     const char **stage)
{
	auto_close int root = -1;

	TRY(begin_step("layers", spec->inject, stage));
	TRY(add_layers(overlay, spec, userns));
	TRY(begin_step("upper", spec->inject, stage));
	TRY(add_upper(overlay, spec, userns));
	TRY(begin_step("overlay", spec->inject, stage));
	TRY(root = overlay_mount(overlay));
	TRY(begin_step("mount points", spec->inject, stage));
	TRY(add_mount_points(root));
	return take_fd_from(&root);
}

/* What the sandbox under way is made of; kept until it is no longer waited for. */
static struct overlay parts = {
	.layers = -1, .upper = -1, .upper_directory = -1, .work_directory = -1};

int rootfs_make(const struct root_spec *spec, uint32_t id_base, int userns, const char **stage)
{
	int root;

	/* Overlay works with the identity it was mounted under, for as long as it lives. */
	act_as(id_base, id_base);
	root = make_root(spec, userns, &parts, stage);
	act_as(0, 0);
	return root;
}

int rootfs_check(int root, uint32_t id_base)
{
	int error;

	act_as(id_base, id_base);
	error = assert_writable(root);
	act_as(0, 0);
	return error;
}

#define LATER_MAX 64u

/* Mounts to be closed once there is nothing better to do, oldest first. */
static int later[LATER_MAX];
static unsigned later_count;
static struct timer later_timer;

/* So long after a create, its first command is mostly over. */
#define LATER_NS (3 * NS_PER_MS)

static void close_mounts(unsigned keep)
{
	unsigned closed = 0;

	while (later_count - closed > keep)
		close(later[closed++]);
	later_count -= closed;
	memmove(later, later + closed, later_count * sizeof(later[0]));
}

static void later_fired(struct timer *)
{
	close_mounts(0);
	keep_spare_dev();
}

static void close_later(int *mount)
{
	if (*mount < 0)
		return;
	close_mounts(LATER_MAX - 1);
	later[later_count++] = *mount;
	*mount = -1;
}

void rootfs_release(bool at_once)
{
	while (parts.lower_count)
		close_quietly(&parts.lower[--parts.lower_count]);
	close_quietly(&parts.upper_directory);
	close_quietly(&parts.work_directory);
	close_later(&parts.upper);
	close_later(&parts.layers);
	later_timer.fire = later_fired;
	if (at_once) {
		close_mounts(0);
		keep_spare_dev();
	} else if (!later_timer.index) {
		timer_in(&later_timer, LATER_NS);
	}
}
