"""Where the writable directories of sandboxes live: one small seam, three kinds.

`btrfs` (a subvolume each, in a sparse loop-backed file system of the node's own: `pools`),
`directory` (plain directories of the node's state), `tmpfs` (memory, one each). The btrfs mount and
the tmpfs ones are attached nowhere: they live by their descriptors, so nothing is left by kill -9.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from coldframe.host import forks, syscalls
from coldframe.host.pool import require_clonable, subdirectories
from coldframe.host.pools import BtrfsStorage
from coldframe.host.space import file_system_of, full_named, require_space
from coldframe.host.storage_base import DIRECTORY, RemoveTree, Storage
from coldframe.protocol.errors import CapabilityError, InvalidRequestError

_TMPFS_BYTES = 2 << 30
_NO_UPPERS = frozenset({"overlay", "nfs", "nfs4", "fuse", "9p", "vfat"})


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


def disk_refusal(storage: Storage) -> CapabilityError:
    """Say that a storage cannot hold `disk_bytes`, and what can where it lies."""
    said = f"storage {storage.name!r} cannot hold disk_bytes"
    if storage.fallback_from:
        return CapabilityError(
            f"{said}, and btrfs, which could, does not work here: {storage.fallback_from}; or set "
            "COLDFRAME_STORAGE=tmpfs, which holds it in memory"
        )
    return CapabilityError(
        f"{said}; set COLDFRAME_STORAGE to btrfs (`apt-get install btrfs-progs`) or tmpfs"
    )


def adopt(
    kind: str, state: Path, pools: Path, kept: Sequence[int], uppers: Mapping[str, Sequence[int]]
) -> Storage:
    """Go on with the storage of a process that is no more.

    Args:
        kept: what its `kept` gave; taken over.
        uppers: the same for each upper, by its name in the storage.
    """
    if kind == "btrfs":
        return BtrfsStorage(pools, state.name, mounts=kept)
    if kind == "directory":
        return DirectoryStorage(state / "uppers")
    storage = TmpfsStorage()
    storage.adopt({name: one[0] for name, one in uppers.items()})
    return storage


def _noting(storage: Storage, reasons: list[str]) -> Storage:
    storage.fallback_from = "; ".join(reasons)
    return storage


class DirectoryStorage(Storage):
    """Plain directories on whatever file system the node's state is on."""

    name = "directory"
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
        self._root = os.open(path, DIRECTORY)
        forks.own(self)

    def require_disk(self) -> None:
        """See `Storage.require_disk`."""
        require_space(self._root, str(self._path))

    def make(self, sandbox_id: str, disk_bytes: int | None) -> int:
        """See `Storage.make`."""
        if disk_bytes is not None:
            raise disk_refusal(self)
        self.require_disk()
        with full_named(str(self._path)):
            os.mkdir(sandbox_id, 0o700, dir_fd=self._root)
        return self.open(sandbox_id)

    def open(self, sandbox_id: str) -> int:
        """See `Storage.open`."""
        return os.open(sandbox_id, DIRECTORY, dir_fd=self._root)

    def widen(self, sandbox_id: str, disk_bytes: int) -> None:
        """See `Storage.widen`: there are no limits here."""

    async def remove(self, sandbox_id: str, remove_tree: RemoveTree) -> None:
        """See `Storage.remove`."""
        await remove_tree(self._root, sandbox_id)

    def names(self) -> tuple[str, ...]:
        """See `Storage.names`."""
        return subdirectories(self._root)

    def close(self) -> None:
        """See `Storage.close`."""
        if self._root >= 0:
            os.close(self._root)
            self._root = -1

    abandon = close
    """See `forks.Owner`."""


class TmpfsStorage(Storage):
    """Memory: one detached tmpfs per sandbox, charged to whoever writes."""

    name = "tmpfs"
    enforces_disk = True

    def __init__(self) -> None:
        """Raises CapabilityError."""
        self._mounts: dict[str, int] = {}
        try:
            trial = syscalls.mount_detached("tmpfs", {"size": "4k"})
            try:
                require_clonable(trial)
            finally:
                os.close(trial)
        except OSError as error:
            raise CapabilityError(
                f"storage tmpfs does not work here ({error.strerror}); use storage directory with "
                "COLDFRAME_HOME on ext4, xfs or btrfs"
            ) from error
        forks.own(self)

    def require_disk(self) -> None:
        """See `Storage.require_disk`: memory is charged to whoever writes."""

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
        return os.open(".", DIRECTORY, dir_fd=mount)

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
