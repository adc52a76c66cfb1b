"""Watch the disk below a native node's uppers, and tell sandboxes when they cannot write."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping

from coldframe.host.fsthreads import run_to_its_end
from coldframe.host.spares import SpareUppers
from coldframe.runtimes.native_sandbox import NativeSandbox

_AGAIN_S = 1.0


class DiskWatch:
    """See `Storage.look`. Belongs to one event loop."""

    def __init__(
        self,
        storage: SpareUppers,
        sandboxes: Mapping[str, NativeSandbox],
        changed: Callable[[], None],
    ) -> None:
        """Begin; `changed` is told when what the storage `kept` may be something else."""
        self._storage, self._sandboxes, self._changed = storage, sandboxes, changed
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        wait_s: float | None = 0.0
        while wait_s is not None:
            await asyncio.sleep(wait_s)
            try:
                wait_s = await run_to_its_end(self._storage.look)
            except OSError:  # a pool that broke in this moment: the next look sees that
                wait_s = _AGAIN_S
            if self._storage.settle():
                self._changed()
                for sandbox in self._sandboxes.values():
                    sandbox.note_storage(self._storage.why_read_only(sandbox.id))

    async def stop(self) -> None:
        """Look no more."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
