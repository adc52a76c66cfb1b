"""Output that is kept beyond results: within a share per sandbox and on the node, newest first.

A command that runs, or left something running, may fill its whole spool and counts for that much;
one that has ended counts for what it wrote.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

from coldframe.host.patience import wait_while_any_end
from coldframe.node.life import LINGERING_LOOK, Sandbox
from coldframe.node.operations import ExecOperation
from coldframe.node.pool import Pool
from coldframe.node.settings import NodeSettings
from coldframe.protocol.errors import ColdframeError, OutputNotKeptError
from coldframe.protocol.models import ExecRequest, ExecResult, Output, OutputChunk, Stream

_SMALL_BYTES = 64 << 10
"""A runtime holds nothing for an ended command with less output than this."""
_LEAST_SPOOL = 8192
_DROP_S = 5.0
"""How long a runtime may take to drop what it keeps; it all goes with the runtime."""
_MOST_AT_ONCE = 1024
"""Commands of one sandbox that each get a spool, however full its share is."""


class Outputs:
    """The spools of a node's commands."""

    def __init__(self, settings: NodeSettings) -> None:
        self._settings = settings
        self._kept: Pool[ExecOperation] = Pool(settings.spool_count, settings.spool_bytes)
        """Ended operations whose whole output can still be read."""
        self._background: set[asyncio.Task[Any]] = set()

    # --- room -------------------------------------------------------------------------

    def grant(self, operation: ExecOperation) -> ExecRequest:
        """Set room aside; return the request with a spool of the size that there is room for.

        Half of a sandbox's share is for spools as large as was asked for, each stream at most a
        quarter of what is left; the other half for many small ones.
        """
        request, sandbox = operation.request, operation.sandbox
        share = self._settings.sandbox_spool_bytes // 2
        wanted = min(request.spool_bytes, share // 4, self._settings.spool_bytes // 2)
        while share - sandbox.spool_bytes < 4 * wanted and self._drop_oldest_of(sandbox):
            pass
        granted = min(wanted, (share - sandbox.spool_bytes) // 4)
        least = max(_LEAST_SPOOL, share // (2 * _MOST_AT_ONCE))
        granted = max(granted, min(request.spool_bytes, least))
        self._weigh(operation, 2 * granted)
        if granted == request.spool_bytes:
            return request
        return request.model_copy(update={"spool_bytes": granted})

    def go_on(self, operation: ExecOperation, spool_bytes: int) -> None:
        """Count the room that another process had granted."""
        self._weigh(operation, 2 * spool_bytes)

    def _weigh(self, operation: ExecOperation, size: int) -> None:
        """Let an operation count for so many bytes of its sandbox's share."""
        operation.sandbox.spool_bytes += size - operation.spool_bytes
        operation.spool_bytes = size

    def _drop_oldest_of(self, sandbox: Sandbox) -> bool:
        for operation in self._kept:
            if operation.sandbox is sandbox:
                self.drop(operation)
                return True
        return False

    # --- keeping ----------------------------------------------------------------------

    def end(self, operation: ExecOperation, result: ExecResult | None) -> None:
        """Keep what the runtime holds only while there is more in it than in the result."""
        sandbox = operation.sandbox
        if result is None:
            self._weigh(operation, 0)
        elif result.leftovers and not sandbox.ended:
            sandbox.lingering[operation.id] = operation
            if len(sandbox.lingering) >= sandbox.look_at:
                sandbox.look_at *= 2
                self._spawn(self._look(sandbox))
        else:
            self._settle(operation, result, (result.out.total_bytes, result.err.total_bytes))

    async def _look(self, sandbox: Sandbox) -> None:
        """Settle the commands whose leftovers have ended meanwhile."""
        lingering = list(sandbox.lingering.values())
        if sandbox.handle is not None:
            alive = {process.operation_id for process in await sandbox.handle.processes()}
            await self._last_words(one for one in lingering if one.id not in alive)
        sandbox.look_at = max(LINGERING_LOOK, 2 * len(sandbox.lingering))

    async def settle(self, sandbox: Sandbox) -> None:
        """Nothing of an ended sandbox writes any more: keep what its leftovers wrote."""
        await self._last_words(list(sandbox.lingering.values()))

    async def _last_words(self, operations: Iterable[ExecOperation]) -> None:
        """What these left running has ended: keep what it wrote."""
        for operation in operations:
            totals = (0, 0)
            if operation.running is not None:
                try:
                    totals = await operation.running.mark()
                except ColdframeError:  # nobody can tell: it counts for its whole spool
                    totals = (operation.spool_bytes, operation.spool_bytes)
            lingering = operation.sandbox.lingering.pop(operation.id, None)
            if lingering is not None and operation.running is not None:
                self._settle(operation, operation.ended.result(), totals)

    def _settle(
        self, operation: ExecOperation, result: ExecResult, totals: tuple[int, int]
    ) -> None:
        """Nothing is added to its output any more."""
        operation.totals = totals
        whole = (result.out.total_bytes, result.err.total_bytes)
        if totals != whole or result.out.omitted_bytes or result.err.omitted_bytes:
            self._keep(operation)
            return
        self._weigh(operation, 0)
        running, operation.running = operation.running, None
        if running is not None and sum(totals) > _SMALL_BYTES:
            self._spawn(running.forget())

    def _keep(self, operation: ExecOperation) -> None:
        spool = operation.spool_bytes // 2
        self._weigh(operation, sum(min(total, spool) for total in operation.totals))
        self._kept.add(operation, operation.spool_bytes)
        while surplus := self._kept.surplus():
            self.drop(surplus)

    def drop(self, operation: ExecOperation) -> None:
        """Keep the output of an operation that has ended no longer. Twice is fine."""
        if not self._kept.remove(operation):
            return
        self._weigh(operation, 0)
        running, operation.running = operation.running, None
        if running is not None:
            self._spawn(running.forget())

    async def close(self) -> None:
        """Drop every kept output."""
        for operation in list(self._kept):
            self.drop(operation)
        await wait_while_any_end(self._background, _DROP_S)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._reap)

    def _reap(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and isinstance(task.exception(), ColdframeError):
            return  # what was to be dropped went with its sandbox
        task.result()


def read_result(
    operation: ExecOperation, stream: Stream, output: Output, cursor: int, max_bytes: int
) -> OutputChunk:
    """Read from a result's window as if it were the spool.

    Raises OutputNotKeptError if what lies at `cursor` is not in it, but was there once.
    """
    total, tail_start = output.total_bytes, output.total_bytes - len(output.tail)
    written = {"stdout": operation.totals[0], "stderr": operation.totals[1]}.get(stream, 0)
    if len(output.head) <= cursor < tail_start:
        raise _not_kept(operation, stream, cursor, tail_start)
    if total <= cursor < written:
        raise _not_kept(operation, stream, cursor, written)
    offset = min(cursor, total)
    if offset < len(output.head):
        data = output.head[offset : offset + max_bytes]
    else:
        offset = max(offset, tail_start)
        data = output.tail[offset - tail_start :][:max_bytes]
    return OutputChunk(
        stream=stream,
        offset=offset,
        data=data,
        dropped_bytes=max(0, offset - cursor),
        eof=offset + len(data) >= max(total, written),
    )


def _not_kept(operation: ExecOperation, stream: Stream, begin: int, end: int) -> OutputNotKeptError:
    return OutputNotKeptError(
        f"operation {operation.id!r}: bytes {begin} to {end} of its {stream} are no "
        "longer kept; read on behind them, or raise COLDFRAME_SPOOL_BYTES, "
        "COLDFRAME_SANDBOX_SPOOL_BYTES or COLDFRAME_SPOOL_COUNT of the node"
    )
