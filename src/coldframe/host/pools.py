"""Uppers in a pool of the node's own, which a full disk neither spoils nor ends.

The pool's file is sparse, so what else fills the disk may leave it short. Before that, writes of
sandboxes are refused until there is room again: btrfs would take them, and lose them without a
word. What they may write at all is as much as there was room for at the latest look, so that it
holds while nobody looks. Where that came too late the pool is read-only for good: new uppers are
made in a new one, and the old one goes with its last upper.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Collection, Sequence
from pathlib import Path

from coldframe.host import btrfs, forks
from coldframe.host.pool import Pool
from coldframe.host.space import RESERVE_BYTES, free_bytes, require_space
from coldframe.host.storage_base import DIRECTORY, RemoveTree, Storage
from coldframe.protocol.errors import CapabilityError, StorageFullError

_MOST_POOLS = 5
"""As many as fit beside a lock in what spawners keep under one name."""
_SLACK_BYTES = 64 << 20
"""So much more than the reserve must be free before writes are taken again."""
_FASTEST = 4 << 30
"""Bytes a second that sandboxes can write."""
_SOONEST_S, _HELD_S, _LATEST_S = 0.02, 0.25, 1.0


class BtrfsStorage(Storage):
    """See `Storage`. The last pool is in use; those before it are broken, and not empty yet."""

    name = "btrfs"
    enforces_disk = True

    def __init__(
        self,
        pools: Path,
        node_id: str,
        *,
        size_bytes: int | None = None,
        mounts: Sequence[int] = (),
    ) -> None:
        """Make a pool, or go on with those of these mounts. Raises CapabilityError."""
        pools.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file, self._size_bytes = pools / f"{node_id}.img", size_bytes
        self._fresh: Pool | None = None
        """What takes the place of the last one."""
        self._told: list[str] = [""]
        self._host = os.open(pools, DIRECTORY)
        try:
            self._pools = [Pool(mount) for mount in mounts] or [Pool.make(self._file, size_bytes)]
            with contextlib.suppress(OSError):  # one that broke in this moment: later looks see it
                self.look()  # before anything is written, or written again
        except BaseException:
            os.close(self._host)
            raise
        forks.own(self)

    # --- uppers -----------------------------------------------------------------------

    def require_space(self) -> None:
        """See `Storage.require_space`."""
        self.require_disk()
        self._pools[-1].require_space()

    def require_disk(self) -> None:
        """See `Storage.require_disk`."""
        trouble = self._trouble(self._pools[-1])
        if trouble:
            raise StorageFullError(trouble)
        require_space(self._host, str(self._file.parent))

    def make(self, sandbox_id: str, disk_bytes: int | None) -> int:
        """See `Storage.make`."""
        self.require_disk()
        pool = self._pools[-1]
        pool.create(sandbox_id, disk_bytes)
        upper = pool.open(sandbox_id)
        try:
            os.fchmod(upper, 0o700)
        except BaseException:
            os.close(upper)
            pool.drop(sandbox_id)
            raise
        return upper

    def _of(self, name: str) -> Pool:
        return next((pool for pool in self._pools if name in pool.uppers), self._pools[-1])

    def open(self, sandbox_id: str) -> int:
        """See `Storage.open`."""
        return self._of(sandbox_id).open(sandbox_id)

    def widen(self, sandbox_id: str, disk_bytes: int) -> None:
        """See `Storage.widen`."""
        self._of(sandbox_id).widen(sandbox_id, disk_bytes)

    async def remove(self, sandbox_id: str, remove_tree: RemoveTree) -> None:
        """See `Storage.remove`."""
        pool = self._of(sandbox_id)
        try:
            pool.drop(sandbox_id)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno not in {errno.EINVAL, errno.ENOTDIR}:
                raise
            await remove_tree(pool.root, sandbox_id)  # not a subvolume: none of ours

    def names(self) -> tuple[str, ...]:
        """See `Storage.names`; of broken pools none."""
        return self._pools[-1].names()

    # --- room -------------------------------------------------------------------------

    def _trouble(self, pool: Pool) -> str:
        """Why a pool takes no writes; empty if it does."""
        disk = self._file.parent
        if pool.broken:
            return (
                f"the disk of {disk} was full, and what was written there can only be read since "
                "then; save what sandboxes hold and make new ones; if those are refused too, make "
                f"room there, at least {_least_free() >> 20} MiB"
            )
        if pool.held:
            lost = ", and what was written in the last moments before may be lost"
            return (
                f"the disk of {disk} is nearly full, so sandboxes cannot write"
                f"{lost if pool.lost_writes else ''}; make room there (the last "
                f"{RESERVE_BYTES >> 20} MiB are kept back)"
            )
        return ""

    def why_read_only(self, sandbox_id: str) -> str:
        """See `Storage.why_read_only`."""
        return self._trouble(self._of(sandbox_id))

    def look(self) -> float:
        """See `Storage.look`."""
        pool = self._pools[-1]
        free = free_bytes(self._host)
        room = free - btrfs.unwritten_bytes() - RESERVE_BYTES
        if pool.broken:
            if self._fresh is None and free >= _least_free() and len(self._pools) < _MOST_POOLS:
                with contextlib.suppress(CapabilityError):  # creates say what is wrong
                    self._fresh = Pool.make(self._file, self._size_bytes)
                    self._fresh.take(room)
            return _LATEST_S
        if room < 0 and not pool.held:
            pool.hold()
        elif room > (_SLACK_BYTES if pool.held else 0):
            pool.take(room)
        return _HELD_S if pool.held else min(max(_SOONEST_S, room / _FASTEST), _LATEST_S)

    def settle(self, used: Collection[str]) -> bool:
        """See `Storage.settle`."""
        if self._fresh is not None:
            self._pools.append(self._fresh)
            self._fresh = None
        *broken, last = self._pools
        drained = [pool for pool in broken if pool.uppers.isdisjoint(used)]
        self._pools = [*(pool for pool in broken if pool not in drained), last]
        for pool in drained:
            pool.close()
        told, self._told = self._told, [self._trouble(pool) for pool in self._pools]
        return told != self._told

    def kept(self, sandbox_id: str | None = None) -> tuple[int, ...]:
        """See `Storage.kept`."""
        return tuple(pool.mount for pool in self._pools) if sandbox_id is None else ()

    def close(self) -> None:
        """See `Storage.close`."""
        if self._host >= 0:
            for pool in (*self._pools, *filter(None, [self._fresh])):
                pool.close()
            os.close(self._host)
            self._host = -1

    abandon = close
    """See `forks.Owner`."""


def _least_free() -> int:
    """Below this no new pool is made, since nothing could be made in it."""
    return 2 * RESERVE_BYTES
