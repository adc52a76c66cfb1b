"""What a native node takes from the machine before its first sandbox, and gives back at its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import ParamSpec, TypeVar

from coldframe.host import gc
from coldframe.host.cgroups import NodeCgroups, make_node_cgroups
from coldframe.host.egress import steering
from coldframe.host.egress.resolver import Resolve
from coldframe.host.fsthreads import FileThreads
from coldframe.host.idranges import MACHINE_DIRECTORY, IdRanges
from coldframe.host.reaping import reap_cgroups
from coldframe.host.spares import SpareUppers
from coldframe.host.storage import adopt, open_storage
from coldframe.host.storage_base import Storage
from coldframe.protocol.errors import CapabilityError
from coldframe.runtimes import native_guard
from coldframe.runtimes.native_network import NodeNetwork
from coldframe.runtimes.native_takeover import Left

P = ParamSpec("P")
T = TypeVar("T")

_FILE_THREADS = 4
_STORAGE_THREADS = 2


class Ground:
    """Directories, cgroups, ranges of ids, threads and the storage of uppers."""

    def __init__(
        self,
        node_id: str,
        layers: Path,
        state: Path,
        *,
        storage: str,
        pools: Path | None,
        pool_bytes: int | None,
        resolve: Resolve | None,
    ) -> None:
        """Nothing is touched before `take`. Arguments: see `NativeRuntime`."""
        self.node_id, self.layers, self.state = node_id, layers, state
        self.home = state.parent.parent
        self._storage_kind, self._pool_bytes = storage, pool_bytes
        self._pools = pools or self.home / "pools"
        self.network = NodeNetwork(resolve)
        self.no_egress: str | None = None
        """Why no network policy can be enforced, if so."""
        self.no_guards: str | None = None
        """Why no directory can be guarded, if so."""
        self.cgroups: NodeCgroups
        self.ids: IdRanges
        self.storage: SpareUppers
        self.file_threads: FileThreads
        """Apart, so that long work on files never holds up a create."""
        self._lock: int | None = None
        self._threads: FileThreads
        self._undo = contextlib.ExitStack()

    @property
    def spool(self) -> Path:
        """Where output of commands lies."""
        return self.state / "spool"

    @property
    def workers(self) -> Path:
        """Where the sockets of workers lie that outlive this process."""
        return self.state / "workers"

    async def take(self, left: Left | None, *, locked: bool) -> None:
        """Take everything, or go on with what another process has `left`.

        With `locked` the node holds the lock itself and shares its life with us. If this fails,
        what it took is there for `give_back`.

        Raises:
            CapabilityError: the machine has not what is needed.
        """
        self._take_state(locked=locked)
        if not self.layers.is_dir():
            raise CapabilityError(f"{self.layers} is no directory: there is no image store")
        self.no_egress = steering.refusal()
        self.no_guards = native_guard.refusal()
        self._undo.callback(self.network.close)
        self.cgroups = make_node_cgroups(self.node_id) if left is None else left.cgroups
        self._undo.callback(self.cgroups.remove)
        self.ids = IdRanges(MACHINE_DIRECTORY)
        self._undo.callback(self.ids.close)
        self.file_threads = FileThreads(_FILE_THREADS)
        self._undo.callback(self.file_threads.close)
        self._threads = FileThreads(_STORAGE_THREADS)
        self._undo.callback(self._threads.close)
        self.storage = SpareUppers(await asyncio.to_thread(self._open_storage, left))
        self._undo.callback(self.storage.close)

    def _take_state(self, *, locked: bool) -> None:
        try:
            if not locked:
                self._lock = gc.hold_node(self.state)
                if self._lock is not None:
                    self._undo.callback(self.release_lock)
                    self._undo.callback(self._remove_state)
            for path in (self.spool, self.state / "uppers", self.workers):
                path.mkdir(mode=0o700, exist_ok=True)
                self._undo.callback(_remove_empty, path)
        except OSError as error:
            raise CapabilityError(
                f"cannot keep state in {self.state}: {error.strerror}; "
                "set COLDFRAME_HOME to a directory that can be written"
            ) from error

    def _remove_state(self) -> None:
        with contextlib.suppress(OSError):  # `coldframe gc` looks at what is left
            (self.state / "lock").unlink(missing_ok=True)
            self.state.rmdir()

    def _open_storage(self, left: Left | None) -> Storage:
        if left is None:
            return open_storage(
                self._storage_kind,
                node_id=self.node_id,
                state=self.state,
                pools=self._pools,
                pool_bytes=self._pool_bytes,
            )
        uppers = {one.note.upper: one.held for one in left.sandboxes if one.created is not None}
        storage = adopt(left.storage, self.state, self._pools, left.storage_held, uppers)
        storage.fallback_from = left.fallback
        return storage

    def give_back(self) -> None:
        """Give back what was taken, with all that is still in it; blocks."""
        self._undo.close()

    def keep_all(self) -> None:
        """Give nothing back: it is another's again."""
        self._undo.pop_all()

    def leave(self) -> None:
        """Let go of everything and take nothing down: another process goes on with it."""
        self.network.close()
        self.storage.close()
        self.ids.close()
        self.file_threads.close()
        self._threads.close()

    def release_lock(self) -> None:
        """Close our descriptor of the lock, if it is ours. Twice is fine."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    # --- for the work on storage ------------------------------------------------------

    async def in_thread(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run what blocks on the storage."""
        return await self._threads.run((0, 0), job, *args, **kwargs)

    @property
    def threads(self) -> FileThreads:
        """Those of `in_thread`."""
        return self._threads

    # --- cgroups ----------------------------------------------------------------------

    async def reap_cgroups(self, sandbox_id: str) -> None:
        """Take a sandbox's cgroups, and all in them, from the kernel."""
        left = [base / sandbox_id for base in self.cgroups.paths.values()]
        if any(path.exists() for path in left):
            await asyncio.to_thread(reap_cgroups, left)

    async def reap_others(self, wanted: Collection[str]) -> None:
        """Take from the kernel what belongs to no sandbox of these."""
        names = {path.name for base in self.cgroups.paths.values() for path in base.iterdir()}
        for name in names - set(wanted):
            await self.reap_cgroups(name)


def _remove_empty(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.rmdir()
