"""Uppers as subvolumes of a btrfs of the node's own, in a sparse file that is unlinked at once.

It is mounted nowhere: it lives by its descriptors, so nothing is left by kill -9. Why:
docs/adr/0012-uppers-on-a-detached-btrfs.md
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from coldframe.host import btrfs, forks, loopdev, syscalls
from coldframe.host.space import full_named, require_space
from coldframe.protocol.errors import CapabilityError, StorageFullError

RemoveTree = Callable[[int, str], Awaitable[int]]
"""Removes a name below an open directory with all that it holds (`Spawner.remove_tree`)."""

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_RESERVE_BYTES = 16 << 20
_COMMIT_S = "10"
"""Between commits nothing of a dropped subvolume becomes free."""
_SWEEP_S = 5.0
_SWEEP_POLL_S = 0.05
_LEAST_BYTES = 256 << 20
_SHARE = 0.8
"""Of what is free; the file is sparse."""
_MIXED_BELOW = 1 << 30


class BtrfsStorage:
    """A subvolume per sandbox: made and dropped in O(1), with a limit where one is asked for."""

    name = "btrfs"
    fallback_from = ""
    enforces_disk = True

    def __init__(
        self, pools: Path, node_id: str, *, size_bytes: int | None = None, mount: int | None = None
    ) -> None:
        """Make and mount the file system (about 30 ms), or go on with one by its mount.

        Raises CapabilityError.
        """
        self._quota = False
        self._dropped = False
        self._pools = pools
        pools.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._host = os.open(pools, DIRECTORY)
        try:
            if mount is None:
                mount = _mount_pool(pools / f"{node_id}.img", size_bytes)
            self._mount = mount
            self._root = os.open(".", DIRECTORY, dir_fd=self._mount)
        except BaseException:
            os.close(self._host)
            raise
        forks.own(self)

    @property
    def _broken(self) -> bool:
        """Whether a write did not find the room on the disk that the sparse file is short of.

        btrfs is read-only from then on, and gives nothing back before its last user is gone.
        """
        return bool(os.fstatvfs(self._root).f_flag & os.ST_RDONLY)

    def _require_whole(self) -> None:
        if self._broken:
            raise CapabilityError(
                f"the disk of {self._pools} was full, and the pool of uppers is read-only since "
                "then: save what sandboxes hold, make room, and end this node (`coldframe node "
                "stop`); the next one begins with a new pool"
            )

    def require_space(self) -> None:
        """See `Storage.require_space`."""
        self._require_whole()
        require_space(self._host, str(self._pools))
        self._require_pool_space()

    def make(self, sandbox_id: str, disk_bytes: int | None) -> int:
        """See `Storage.make`."""
        self._require_whole()
        require_space(self._host, str(self._pools))
        self._create(sandbox_id)
        subvolume = self.open(sandbox_id)
        try:
            os.fchmod(subvolume, 0o700)
            if disk_bytes is not None:
                self._limit(subvolume, disk_bytes)
        except BaseException:
            os.close(subvolume)
            btrfs.destroy_subvolume(self._root, sandbox_id)
            raise
        return subvolume

    def _create(self, sandbox_id: str) -> None:
        """Make the subvolume; what was dropped lately may have to be swept first.

        Raises StorageFullError.
        """
        deadline = time.monotonic() + _SWEEP_S
        while True:
            try:
                self._require_pool_space()
                with full_named("the pool of uppers"):
                    btrfs.create_subvolume(self._root, sandbox_id)
            except StorageFullError:
                if not self._dropped or time.monotonic() > deadline:
                    raise
                btrfs.sweep(self._root)
                time.sleep(_SWEEP_POLL_S)
            else:
                self._dropped = False
                return

    def _require_pool_space(self) -> None:
        # Not `f_bavail`: btrfs calls that 0 as soon as its metadata has to share.
        status = os.fstatvfs(self._root)
        if status.f_bfree * status.f_frsize < _RESERVE_BYTES:
            raise StorageFullError("the pool of uppers is full: end sandboxes, or remove files")

    def _limit(self, subvolume: int, disk_bytes: int) -> None:
        try:
            if not self._quota:
                btrfs.enable_simple_quota(self._root)
                self._quota = True
            btrfs.limit_subvolume(subvolume, disk_bytes)
        except OSError as error:
            raise CapabilityError(
                f"this kernel's btrfs cannot hold disk_bytes ({error.strerror}; simple quotas "
                "need Linux 6.7 or later); use storage tmpfs"
            ) from error

    def open(self, sandbox_id: str) -> int:
        """See `Storage.open`."""
        return os.open(sandbox_id, DIRECTORY, dir_fd=self._root)

    def widen(self, sandbox_id: str, disk_bytes: int) -> None:
        """See `Storage.widen`."""
        subvolume = self.open(sandbox_id)
        try:
            btrfs.limit_subvolume(subvolume, disk_bytes)
        finally:
            os.close(subvolume)

    async def remove(self, sandbox_id: str, remove_tree: RemoveTree) -> None:
        """See `Storage.remove`; what a broken pool holds goes with the pool."""
        if self._broken:
            return
        try:
            btrfs.destroy_subvolume(self._root, sandbox_id)
            self._dropped = True
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno not in {errno.EINVAL, errno.ENOTDIR}:
                raise
            await remove_tree(self._root, sandbox_id)  # not a subvolume: none of ours

    def names(self) -> tuple[str, ...]:
        """See `Storage.names`; of a broken pool none, since none can be removed."""
        return () if self._broken else subdirectories(self._root)

    def kept(self, sandbox_id: str | None = None) -> tuple[int, ...]:
        """See `Storage.kept`."""
        return (self._mount,) if sandbox_id is None else ()

    def close(self) -> None:
        """See `Storage.close`."""
        if self._root >= 0:
            for fd in (self._root, self._mount, self._host):
                os.close(fd)
            self._root = self._mount = self._host = -1

    abandon = close
    """See `forks.Owner`."""


def _mount_pool(path: Path, size_bytes: int | None) -> int:
    """Make a btrfs in a new sparse file, mount it detached, unlink the file.

    Returns the mount, which can be cloned only as long as this descriptor of it is open. The file
    system, the loop device and the space go when the last user of it does.
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
        raise CapabilityError(f"a loop-backed btrfs does not work here: {error}") from error
    finally:
        path.unlink(missing_ok=True)
        os.close(fd)


def _pool_size(fd: int) -> int:
    status = os.fstatvfs(fd)
    size = int(status.f_bavail * status.f_frsize * _SHARE) >> 20 << 20
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
