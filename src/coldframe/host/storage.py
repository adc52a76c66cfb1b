"""Where the writable directories of sandboxes live: one small seam, three kinds.

`btrfs` (a subvolume each, in a sparse loop-backed file system of the node's own), `directory`
(plain directories of the node's state), `tmpfs` (memory, one each). The btrfs mount and the
tmpfs ones are attached nowhere: they live by their descriptors, so nothing is left by kill -9.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from coldframe.host import btrfs, forks, loopdev, syscalls
from coldframe.protocol.errors import CapabilityError, InvalidRequestError, StorageFullError

RemoveTree = Callable[[int, str], Awaitable[int]]
"""Removes a name below an open directory with all that it holds (`Spawner.remove_tree`)."""

_RESERVE_BYTES = 256 << 20
_POOL_RESERVE_BYTES = 16 << 20
_COMMIT_S = "10"
"""Between commits nothing of a dropped subvolume becomes free."""
_SWEEP_S = 5.0
_SWEEP_POLL_S = 0.05
_POOL_LEAST_BYTES = 256 << 20
_POOL_SHARE = 0.8
_MIXED_BELOW = 1 << 30
_TMPFS_BYTES = 2 << 30
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_UPPERS = frozenset({"overlay", "nfs", "nfs4", "fuse", "9p", "vfat"})


class Storage(Protocol):
    """Makes and removes the directory that holds a sandbox's upper and work directories."""

    name: str
    enforces_disk: bool
    """Whether `disk_bytes` is a limit that holds."""
    fallback_from: str
    """Why `auto` took this kind and not a better one; empty otherwise."""

    def require_space(self) -> None:
        """Raise StorageFullError if there is hardly room for another. Takes no time."""

    def make(self, sandbox_id: str, disk_bytes: int | None) -> int:
        """Make the directory; the descriptor belongs to the receiver. May take a moment.

        Raises CapabilityError (a limit that cannot be held), StorageFullError.
        """

    def open(self, sandbox_id: str) -> int:
        """Open it again. Raises FileNotFoundError."""

    def widen(self, sandbox_id: str, disk_bytes: int) -> None:
        """Change the limit of one that was made with a limit. Raises OSError."""

    async def remove(self, sandbox_id: str, remove_tree: RemoveTree) -> None:
        """Remove it with all it holds; one that is not there is fine."""

    def names(self) -> tuple[str, ...]:
        """What is there, by sandbox id."""

    def kept(self, sandbox_id: str | None = None) -> tuple[int, ...]:
        """Descriptors by which another process goes on with it, or with one upper: `adopt`."""

    def close(self) -> None:
        """Give everything back. Twice is fine."""


def open_storage(
    kind: str, *, node_id: str, state: Path, pools: Path, pool_bytes: int | None = None
) -> Storage:
    """Return the storage of that kind, or for `auto` the best one that works here.

    Args:
        kind: auto, btrfs, directory or tmpfs.
        state: the node's directory.
        pools: where a loop-backed file system's file is made (and at once unlinked).
        pool_bytes: its size; None: four fifths of what is free. Sparse: it takes what is written.
    Raises:
        InvalidRequestError: no such kind.
        CapabilityError: that kind does not work here; the message says what helps.
    """
    if kind == "btrfs":
        return BtrfsStorage(pools, node_id, size_bytes=pool_bytes)
    if kind == "directory":
        return DirectoryStorage(state / "uppers")
    if kind == "tmpfs":
        return TmpfsStorage()
    if kind != "auto":
        raise InvalidRequestError(f"storage {kind!r}: auto, btrfs, directory or tmpfs")
    reasons: list[str] = []
    makers: tuple[Callable[[], Storage], ...] = (
        lambda: BtrfsStorage(pools, node_id, size_bytes=pool_bytes),
        lambda: DirectoryStorage(state / "uppers"),
        TmpfsStorage,
    )
    for make in makers[:-1]:
        try:
            return _noting(make(), reasons)
        except CapabilityError as error:
            reasons.append(str(error))
    return _noting(makers[-1](), reasons)


def adopt(
    kind: str, state: Path, pools: Path, kept: Sequence[int], uppers: Mapping[str, Sequence[int]]
) -> Storage:
    """Go on with the storage of a process that is no more.

    Args:
        kept: what its `kept` gave; taken over.
        uppers: the same for each upper, by its name in the storage.
    """
    if kind == "btrfs":
        return BtrfsStorage(pools, state.name, mount=kept[0])
    if kind == "directory":
        return DirectoryStorage(state / "uppers")
    storage = TmpfsStorage()
    storage.adopt({name: one[0] for name, one in uppers.items()})
    return storage


def _noting(storage: Storage, reasons: list[str]) -> Storage:
    storage.fallback_from = "; ".join(reasons)
    return storage


class DirectoryStorage:
    """Plain directories on whatever file system the node's state is on."""

    name = "directory"
    fallback_from = ""
    enforces_disk = False

    def __init__(self, path: Path) -> None:
        """Raises CapabilityError if overlay cannot write to the file system of `path`."""
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        kind = file_system_of(path)
        if kind in _NO_UPPERS:
            raise CapabilityError(
                f"{path} is on {kind}, where overlay cannot write; "
                "set COLDFRAME_HOME to a directory on ext4, xfs or btrfs, or use storage tmpfs"
            )
        self._path = path
        self._root = os.open(path, _DIRECTORY)
        forks.own(self)

    def require_space(self) -> None:
        """See `Storage.require_space`."""
        require_space(self._root, str(self._path))

    def make(self, sandbox_id: str, disk_bytes: int | None) -> int:
        """See `Storage.make`."""
        if disk_bytes is not None:
            raise CapabilityError(
                "storage `directory` cannot hold disk_bytes; use storage btrfs "
                "(`apt-get install btrfs-progs`) or tmpfs"
            )
        self.require_space()
        with _full_named(str(self._path)):
            os.mkdir(sandbox_id, 0o700, dir_fd=self._root)
        return self.open(sandbox_id)

    def open(self, sandbox_id: str) -> int:
        """See `Storage.open`."""
        return os.open(sandbox_id, _DIRECTORY, dir_fd=self._root)

    def widen(self, sandbox_id: str, disk_bytes: int) -> None:
        """See `Storage.widen`: there are no limits here."""

    async def remove(self, sandbox_id: str, remove_tree: RemoveTree) -> None:
        """See `Storage.remove`."""
        await remove_tree(self._root, sandbox_id)

    def names(self) -> tuple[str, ...]:
        """See `Storage.names`."""
        return _names(self._root)

    def kept(self, sandbox_id: str | None = None) -> tuple[int, ...]:
        """See `Storage.kept`."""
        return ()

    def close(self) -> None:
        """See `Storage.close`."""
        if self._root >= 0:
            os.close(self._root)
            self._root = -1

    abandon = close
    """See `forks.Owner`."""


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
        self._host = os.open(pools, _DIRECTORY)
        try:
            if mount is None:
                mount = _mount_pool(pools / f"{node_id}.img", size_bytes)
            self._mount = mount
            self._root = os.open(".", _DIRECTORY, dir_fd=self._mount)
        except BaseException:
            os.close(self._host)
            raise
        forks.own(self)

    def require_space(self) -> None:
        """See `Storage.require_space`."""
        require_space(self._host, str(self._pools))
        self._require_pool_space()

    def make(self, sandbox_id: str, disk_bytes: int | None) -> int:
        """See `Storage.make`."""
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
                with _full_named("the pool of uppers"):
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
        if status.f_bfree * status.f_frsize < _POOL_RESERVE_BYTES:
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
        return os.open(sandbox_id, _DIRECTORY, dir_fd=self._root)

    def widen(self, sandbox_id: str, disk_bytes: int) -> None:
        """See `Storage.widen`."""
        subvolume = self.open(sandbox_id)
        try:
            btrfs.limit_subvolume(subvolume, disk_bytes)
        finally:
            os.close(subvolume)

    async def remove(self, sandbox_id: str, remove_tree: RemoveTree) -> None:
        """See `Storage.remove`."""
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
        """See `Storage.names`."""
        return _names(self._root)

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


class TmpfsStorage:
    """Memory: one detached tmpfs per sandbox, charged to whoever writes."""

    name = "tmpfs"
    fallback_from = ""
    enforces_disk = True

    def __init__(self) -> None:
        """Raises CapabilityError."""
        self._mounts: dict[str, int] = {}
        try:
            trial = syscalls.mount_detached("tmpfs", {"size": "4k"})
            try:
                _require_clonable(trial)
            finally:
                os.close(trial)
        except OSError as error:
            raise CapabilityError(
                f"storage tmpfs does not work here ({error.strerror}); use storage directory with "
                "COLDFRAME_HOME on ext4, xfs or btrfs"
            ) from error
        forks.own(self)

    def require_space(self) -> None:
        """See `Storage.require_space`: memory is charged to whoever writes."""

    def make(self, sandbox_id: str, disk_bytes: int | None) -> int:
        """See `Storage.make`."""
        options = {"size": str(disk_bytes or _TMPFS_BYTES), "mode": "0700"}
        try:
            mount = syscalls.mount_detached("tmpfs", options)
        except OSError as error:
            raise CapabilityError(f"a tmpfs cannot be mounted: {error.strerror}") from error
        self._mounts[sandbox_id] = mount
        return self.open(sandbox_id)

    def open(self, sandbox_id: str) -> int:
        """See `Storage.open`."""
        mount = self._mounts.get(sandbox_id)
        if mount is None:
            raise FileNotFoundError(errno.ENOENT, "no such upper", sandbox_id)
        return os.open(".", _DIRECTORY, dir_fd=mount)

    def widen(self, sandbox_id: str, disk_bytes: int) -> None:
        """See `Storage.widen`."""
        syscalls.reconfigure(self._mounts[sandbox_id], {"size": str(disk_bytes)})

    async def remove(self, sandbox_id: str, remove_tree: RemoveTree) -> None:
        """See `Storage.remove`."""
        mount = self._mounts.pop(sandbox_id, None)
        if mount is not None:
            os.close(mount)

    def names(self) -> tuple[str, ...]:
        """See `Storage.names`."""
        return tuple(sorted(self._mounts))

    def kept(self, sandbox_id: str | None = None) -> tuple[int, ...]:
        """See `Storage.kept`."""
        return () if sandbox_id is None else (self._mounts[sandbox_id],)

    def adopt(self, mounts: Mapping[str, int]) -> None:
        """Go on with those of a process that is no more."""
        self._mounts.update(mounts)

    def close(self) -> None:
        """See `Storage.close`."""
        while self._mounts:
            os.close(self._mounts.popitem()[1])

    abandon = close
    """See `forks.Owner`."""


def require_space(directory: int, shown: str) -> None:
    """Refuse to begin anything on a file system that is nearly full.

    Raises StorageFullError below 256 MiB or without free inodes.
    """
    _require_space(os.fstatvfs(directory), shown)


def require_space_at(path: Path) -> None:
    """As `require_space`, by path."""
    _require_space(os.statvfs(path), str(path))


def _require_space(status: os.statvfs_result, shown: str) -> None:
    free = status.f_bavail * status.f_frsize
    if free < _RESERVE_BYTES:
        raise StorageFullError(
            f"{shown}: only {free >> 20} MiB are free; make room there, or set COLDFRAME_HOME to a "
            f"larger file system (the last {_RESERVE_BYTES >> 20} MiB are kept back)"
        )
    if status.f_files and status.f_favail == 0:
        raise StorageFullError(f"{shown}: no inodes are free; remove files there")


def file_system_of(path: Path) -> str:
    """Return the type of the file system that a path is on, as mountinfo names it."""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        if left.split(" ")[2] == wanted:
            return right.split(" ", 1)[0]
    return "btrfs" if os.major(device) == 0 else "unknown"


@contextlib.contextmanager
def _full_named(shown: str) -> Iterator[None]:
    """Turn a full disk inside the block into StorageFullError."""
    try:
        yield
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise StorageFullError(f"{shown}: {error.strerror}") from error
        raise


def _names(root: int) -> tuple[str, ...]:
    # Opened anew: btrfs lists what was there when the descriptor was opened.
    fd = os.open(".", _DIRECTORY, dir_fd=root)
    try:
        with os.scandir(fd) as entries:
            return tuple(sorted(entry.name for entry in entries))
    finally:
        os.close(fd)


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
            _require_clonable(mount)
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
    size = int(status.f_bavail * status.f_frsize * _POOL_SHARE) >> 20 << 20
    if size < _POOL_LEAST_BYTES:
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


def _require_clonable(mount: int) -> None:
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
