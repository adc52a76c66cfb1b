"""One command of a session, as whoever waits for it, reads it or ends it sees it."""

from __future__ import annotations

import asyncio
import signal as signals
import time
from typing import TYPE_CHECKING, Any

from coldframe.node import shellscript
from coldframe.node.operations import ExecOperation
from coldframe.protocol import wire
from coldframe.protocol.errors import InvalidRequestError
from coldframe.protocol.models import ExecResult, Output, OutputChunk, Reason, SignalScope, Stream
from coldframe.runtimes.base import CountsOoms

if TYPE_CHECKING:
    from coldframe.node.session import Session


_HEAR_S = 2.0
"""How long a shell has to report what it did while no process listened, however late that is."""

_STOOD_STILL_S = 0.2
"""Waiting that took so much longer than asked for was of a process that did not run meanwhile."""


async def heard(
    report: asyncio.Future[Any], *ends: asyncio.Future[Any], at_most_s: float | None
) -> bool:
    """Wait for a report of the shell's, or one of the ends, and return whether it is there.

    A process that was stopped, or had no turn, finds its time over and the report unread.
    """
    began, waits = time.monotonic(), {report, *ends}
    await asyncio.wait(waits, timeout=at_most_s, return_when=asyncio.FIRST_COMPLETED)
    if at_most_s is not None and time.monotonic() - began - at_most_s > _STOOD_STILL_S:
        await asyncio.wait(waits, timeout=_HEAR_S, return_when=asyncio.FIRST_COMPLETED)
    return report.done()


class SessionCommand:
    """See `RunningExec`. Its streams are pieces of the shell's, known once it has begun."""

    pid = None

    def __init__(
        self, session: Session, operation: ExecOperation, *, adopted: bool = False
    ) -> None:
        """`adopted`: another process has begun it."""
        self.session, self.operation = session, operation
        self.request = operation.request
        self.nonce = shellscript.new_nonce()
        """What the shell reports its end under."""
        self.began = (0, 0)
        """Where its pieces of stdout and stderr begin."""
        self.ended = (0, 0)
        """Where they end, once it is over."""
        self._ooms_before = 0
        loop = asyncio.get_running_loop()
        self.stop: asyncio.Future[None] = loop.create_future()
        """Done when it is to be given up."""
        self.over: asyncio.Future[None] = loop.create_future()
        """Done when nothing is added to its output any more."""
        self.result: ExecResult | None = None
        self._late_at: float | None = None
        self._least_s = _HEAR_S if adopted else 0.0

    @property
    def due_at(self) -> float | None:
        """Unix seconds of its deadline, once it has begun; None: it has none."""
        deadline_s = self.request.deadline_s
        return None if deadline_s is None else self.operation.began_at + deadline_s

    # --- its life, told by the session ------------------------------------------------

    def begin(self, at: tuple[int, int]) -> None:
        """It is about to be written to the shell, whose output has come so far."""
        self.began = at
        self._ooms_before = self._ooms()
        self.operation.began_at = time.time()

    def go_on(self, told: dict[str, Any]) -> None:
        """Another process had begun it, and `noted` this."""
        self.nonce, self.began = told["nonce"].encode(), tuple(told["began"])
        self._ooms_before = told["ooms_before"]

    def reason(self, code: int) -> Reason:
        """Say why it ended with a code of its own, as of a command that is no session's."""
        killed = code == 128 + signals.SIGKILL  # it, or what it waited for
        return Reason.OOM if killed and self._ooms() > self._ooms_before else Reason.EXIT

    def _ooms(self) -> int:
        handle = self.operation.sandbox.handle
        return handle.oom_kills() if isinstance(handle, CountsOoms) else 0

    async def waits_for(self, status: asyncio.Task[Any], at_most_s: float | None = None) -> bool:
        """Wait for its status until its deadline, or until it is to be given up."""
        if self.due_at is not None:
            if self._late_at is None:
                left = max(self.due_at - time.time(), self._least_s)
                self._late_at = time.monotonic() + left
            left = max(0.0, self._late_at - time.monotonic())
            at_most_s = left if at_most_s is None else min(left, at_most_s)
        return await heard(status, self.stop, at_most_s=at_most_s)

    def end(self, at: tuple[int, int]) -> None:
        """What comes from here on is not its output."""
        self.ended = at
        self.over.set_result(None)

    def conclude(
        self,
        *,
        reason: Reason,
        exit_code: int | None,
        signal: int | None,
        out: Output,
        err: Output,
    ) -> ExecResult:
        """Return how it ended."""
        operation, now = self.operation, time.time()
        self.result = ExecResult(
            operation_id=operation.id,
            sandbox_id=operation.sandbox.id,
            reason=reason,
            exit_code=exit_code,
            signal=signal,
            out=out,
            err=err,
            started_at=operation.began_at,
            ended_at=now,
            duration_s=max(0.0, now - operation.began_at),
            queued_s=operation.queued_s,
            request=self.request,
            trace_id=operation.trace_id,
        )
        return self.result

    def noted(self) -> dict[str, Any]:
        """Return what the next process needs to know of it, as JSON values."""
        operation, result = self.operation, self.result
        if result is not None:  # what it wrote is in the shell's spool
            kept = {"out": _unread(result.out), "err": _unread(result.err)}
            result = result.model_copy(update=kept)
        return {
            "request": None if result is not None else wire.dump(self.request).decode(),
            "result": None if result is None else wire.dump(result).decode(),
            "nonce": self.nonce.decode(),
            "began": self.began,
            "ooms_before": self._ooms_before,
            "ended": self.ended,
            "began_at": operation.began_at,
            "queued_s": operation.queued_s,
            "trace_id": operation.trace_id,
        }

    # --- seen from outside ------------------------------------------------------------

    async def wait(self) -> ExecResult:
        """See `RunningExec.wait`."""
        return await self.operation.ended

    async def read(
        self, stream: Stream, cursor: int, max_bytes: int, *, wait: bool = True
    ) -> OutputChunk:
        """See `RunningExec.read`."""
        if stream == "status":
            raise InvalidRequestError("a command of a session has no stream 'status'")
        which = 0 if stream == "stdout" else 1
        begin, shell = self.began[which], self.session
        while True:
            if self.over.done():
                left = self.ended[which] - begin - cursor
                if left <= 0:
                    return OutputChunk(stream=stream, offset=cursor + left, data=b"", eof=True)
                max_bytes = min(max_bytes, left)
            chunk = await shell.read_output(shell.id, stream, begin + cursor, max_bytes, False)
            moved = chunk.next_cursor - begin > cursor
            if self.over.done():
                end = self.ended[which]
                if not moved or chunk.offset >= end:
                    dropped = end - begin - cursor
                    chunk = OutputChunk(stream=stream, offset=end, data=b"", dropped_bytes=dropped)
                return _shifted(chunk, begin, eof=chunk.next_cursor >= end)
            if moved or not wait:
                return _shifted(chunk, begin, eof=False)
            more = asyncio.ensure_future(
                shell.read_output(shell.id, stream, begin + cursor, 1, True)
            )
            try:
                waits: set[asyncio.Future[Any]] = {more, self.over}
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                if more.done() and not more.result().data and not self.over.done():
                    await asyncio.wait({self.over})  # the shell has ended, and so will this
            finally:
                more.cancel()

    async def write_stdin(self, data: bytes) -> None:
        """See `RunningExec.write_stdin`.

        Raises:
            InvalidRequestError: always; it reads end of file.
        """
        del data
        raise InvalidRequestError("a command of a session reads end of file; it has no stdin")

    async def close_stdin(self) -> None:
        """See `RunningExec.close_stdin`."""

    async def signal(self, signum: int, scope: SignalScope = SignalScope.GROUP) -> int:
        """Send a signal to what the shell runs; which of it is the command's is not known."""
        del scope
        return await self.session.signal(signum)

    async def cancel(self) -> None:
        """Give it up, and all background jobs of its session; return once it has ended."""
        if not self.stop.done():
            self.stop.set_result(None)
        if self.operation.task is not None:
            await asyncio.wait({self.operation.task})

    async def resize(self, rows: int, cols: int) -> None:
        """See `RunningExec.resize`."""
        del rows, cols
        raise InvalidRequestError("a command of a session has no terminal to resize")

    async def mark(self) -> tuple[int, int]:
        """See `RunningExec.mark`."""
        out, err = self.ended if self.over.done() else await self.session.mark()
        return out - self.began[0], err - self.began[1]

    async def forget(self) -> None:
        """Its output is the shell's, and is kept or dropped with that."""


def _unread(output: Output) -> Output:
    return output.model_copy(update={"head": b"", "tail": b""})


def _shifted(chunk: OutputChunk, begin: int, *, eof: bool) -> OutputChunk:
    return chunk.model_copy(update={"offset": chunk.offset - begin, "eof": eof})
