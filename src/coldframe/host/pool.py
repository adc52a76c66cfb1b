"""A btrfs for uppers, in a sparse file that is unlinked at once.

It is mounted nowhere: it lives by its descriptors, so nothing is left by kill -9. Why:
docs/adr/0012-uppers-on-a-detached-btrfs.md
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import time
from pathlib import Path

from coldframe.host import btrfs, loopdev, syscalls
from coldframe.host.space import free_bytes, full_named
from coldframe.host.storage_base import DIRECTORY
from coldframe.protocol.errors import CapabilityError, StorageFullError

_RESERVE_BYTES = 16 << 20
_COMMIT_S = "10"
"""Between commits nothing of a dropped subvolume becomes free."""
_SWEEP_S = 5.0
_SWEEP_POLL_S = 0.05
_LEAST_BYTES = 256 << 20
_SHARE = 0.8
"""Of what is free; the file is sparse."""
_MIXED_BELOW = 1 << 30
_NOTHING_MORE = 1
"""A limit that no write is within."""
_CLOSE_BYTES = 16 << 20
"""A limit is not set anew for less than this."""


class Pool:
    """A subvolume per upper: made and dropped in O(1), with a limit where one is asked for."""

    def __init__(self, mount: int) -> None:
        """Go on with the file system of a mount, which is taken over. Raises OSError."""
        self.mount = mount
        self.root = os.open(".", DIRECTORY, dir_fd=mount)
        self._dropped = False
        self.lost_writes = False
        """Whether the disk had no room for some that had been taken."""
        try:
            self._group = btrfs.directory_of_all(self.root)
            if not self.broken:
                btrfs.enable_limits(self.root)
            self._most = btrfs.most_bytes(self._group)
            self.uppers = set(subdirectories(self.root))
            """By name; in one that is broken, those that have not been let go of."""
        except BaseException:
            os.close(self.root)
            raise

    @classmethod
    def make(cls, path: Path, size_bytes: int | None) -> Pool:
        """Make one in a new file, which is unlinked (about 30 ms).

        The space, and the loop device, go when the last user of the file system does.

        Raises:
            CapabilityError: this machine cannot.
        """
        mount = _mount_pool(path, size_bytes)
        try:
            return cls(mount)
        except OSError as error:
            os.close(mount)
            raise _unfit(error) from error

    @property
    def broken(self) -> bool:
        """Whether a write did not find the room on the disk that the sparse file is short of.

        btrfs is read-only from then on, and gives nothing back before its last user is gone.
        """
        return bool(os.fstatvfs(self.root).f_flag & os.ST_RDONLY)

    @property
    def held(self) -> bool:
        """Whether no write is taken, since the disk has no room for it."""
        return self._most == _NOTHING_MORE

    def hold(self) -> None:
        """Refuse all writes from now on, and write what was taken. Removals go on.

        Raises OSError.
        """
        self._limit(_NOTHING_MORE)
        try:
            syscalls.syncfs(self.root)
        except OSError:
            self.lost_writes = True

    def take(self, more_bytes: int) -> None:
        """Take so much and no more, whoever looks after the disk from now on. Raises OSError."""
        most = btrfs.held_bytes(self._group) + more_bytes
        if self.held or abs(most - self._most) > _CLOSE_BYTES:
            self._limit(most)
            self.lost_writes = False

    def _limit(self, most: int) -> None:
        btrfs.limit(self.root, btrfs.ALL, most)
        self._most = most

    def require_space(self) -> None:
        """Raise StorageFullError if there is hardly any."""
        # Not `f_bavail`: btrfs calls that 0 as soon as its metadata has to share.
        status = os.fstatvfs(self.root)
        if status.f_bfree * status.f_frsize < _RESERVE_BYTES:
            raise StorageFullError("the pool of uppers is full: end sandboxes, or remove files")

    def create(self, name: str, disk_bytes: int | None) -> None:
        """Make an upper; what was dropped lately may have to be swept first.

        Raises StorageFullError.
        """
        deadline = time.monotonic() + _SWEEP_S
        while True:
            try:
                self.require_space()
                with full_named("the pool of uppers"):
                    btrfs.create_subvolume(self.root, name, disk_bytes)
            except StorageFullError:
                if not self._dropped or time.monotonic() > deadline:
                    raise
                btrfs.sweep(self.root)
                time.sleep(_SWEEP_POLL_S)
            else:
                self._dropped = False
                self.uppers.add(name)
                return

    def open(self, name: str) -> int:
        """Open an upper. Raises FileNotFoundError."""
        return os.open(name, DIRECTORY, dir_fd=self.root)

    def widen(self, name: str, disk_bytes: int) -> None:
        """Change the limit of an upper. Raises OSError."""
        subvolume = self.open(name)
        try:
            btrfs.limit(self.root, btrfs.group_of(subvolume), disk_bytes)
        finally:
            os.close(subvolume)

    def drop(self, name: str) -> None:
        """Remove an upper with all it holds; what a broken pool holds goes with the pool.

        Raises OSError: EINVAL or ENOTDIR where it is no subvolume.
        """
        if not self.broken:
            btrfs.destroy_subvolume(self.root, name)
            self._dropped = True
        self.uppers.discard(name)

    def names(self) -> tuple[str, ...]:
        """What is there; of a broken pool nothing, since nothing of it can be removed."""
        return () if self.broken else subdirectories(self.root)

    def close(self) -> None:
        """Let go of it."""
        os.close(self.root)
        os.close(self.mount)


def _mount_pool(path: Path, size_bytes: int | None) -> int:
    """Make a btrfs in a new sparse file, mount it detached, unlink the file.

    Returns the mount, which can be cloned only as long as this descriptor of it is open.
    """
    program = shutil.which("mkfs.btrfs", path="/usr/sbin:/sbin:/usr/bin:/bin")
    if program is None:
        raise CapabilityError("mkfs.btrfs is missing: `apt-get install btrfs-progs`")
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        raise CapabilityError(
            f"{path} exists; `coldframe gc` removes it if it is nobody's"
        ) from error
    try:
        os.ftruncate(fd, size_bytes or _pool_size(fd))
        _make_file_system(program, path, os.fstat(fd).st_size)
        device, device_path = loopdev.attach(fd)
        try:
            options = {
                "source": device_path,
                "discard": "async",
                "nobarrier": None,
                "commit": _COMMIT_S,
            }
            mount = syscalls.mount_detached("btrfs", options, syscalls.MOUNT_ATTR_NOATIME)
        finally:
            os.close(device)
        try:
            require_clonable(mount)
        except BaseException:
            os.close(mount)
            raise
        return mount
    except OSError as error:
        raise _unfit(error) from error
    finally:
        path.unlink(missing_ok=True)
        os.close(fd)


def _unfit(error: OSError) -> CapabilityError:
    return CapabilityError(f"a loop-backed btrfs does not work here: {error}")


def _pool_size(fd: int) -> int:
    size = int(free_bytes(fd) * _SHARE) >> 20 << 20
    if size < _LEAST_BYTES:
        raise OSError(errno.ENOSPC, "too little space for a pool")
    return size


def _make_file_system(program: str, path: Path, size: int) -> None:
    command = [program, "-q", "-K", "-m", "single", "-d", "single"]
    if size < _MIXED_BELOW:
        # Else data takes every block, and not even a removal finds room for its metadata.
        command.append("--mixed")
    command.append(str(path))
    made = subprocess.run(command, capture_output=True, check=False)
    if made.returncode != 0:
        text = made.stderr.decode("utf-8", "replace").strip().splitlines()
        raise OSError(errno.EIO, f"mkfs.btrfs: {text[-1] if text else made.returncode}")


def subdirectories(root: int) -> tuple[str, ...]:
    """Return the names in an open directory, sorted."""
    # Opened anew: btrfs lists what was there when the descriptor was opened.
    fd = os.open(".", DIRECTORY, dir_fd=root)
    try:
        with os.scandir(fd) as entries:
            return tuple(sorted(entry.name for entry in entries))
    finally:
        os.close(fd)


def require_clonable(mount: int) -> None:
    """Whether the kernel clones what is mounted nowhere, as idmapping it needs.

    Raises OSError.
    """
    try:
        os.close(syscalls.open_tree(mount))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise OSError(
            errno.EINVAL, "this kernel cannot clone a detached mount, Linux 6.15 and later can"
        ) from error
