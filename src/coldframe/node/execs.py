"""Commands of a node: each runs once, in its turn, and always ends.

A command is a task of the node's, not of whoever asked: a caller that goes away loses nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable
from functools import partial

from coldframe.host.outcome import Outcome, Undertaking
from coldframe.node.durations import Durations
from coldframe.node.legacy import read_exec
from coldframe.node.life import Sandbox
from coldframe.node.operations import ExecOperation, Operations, never_ran
from coldframe.node.outputs import Outputs, read_result
from coldframe.node.queueing import FairQueue
from coldframe.node.session_command import SessionCommand
from coldframe.node.settings import NodeSettings
from coldframe.node.shares import Shares
from coldframe.node.turns import Turn, Turns
from coldframe.protocol.errors import (
    CapacityError,
    ColdframeError,
    Execution,
    InvalidRequestError,
    SandboxGoneError,
    StdinClosedError,
)
from coldframe.protocol.ids import check_operation_id, new_operation_id
from coldframe.protocol.models import (
    MIB,
    ExecRequest,
    ExecResult,
    Output,
    OutputChunk,
    Reason,
    SignalScope,
    Stream,
)
from coldframe.runtimes.base import RunningExec
from coldframe.runtimes.outliving import FoundExec

_KILLED = 128 + 9
_SHARE = 3
"""An owner may have so many times the commands that may be begun beside those that there are."""
_LARGE_REQUEST = 64 << 10
"""Smaller ones, as many as may run, weigh nothing to speak of."""
_SETTLE_S = 5.0
"""How long a runtime may take to report the end of a command whose sandbox has ended."""


class Execs:
    """All commands of a node."""

    def __init__(self, settings: NodeSettings, operations: Operations) -> None:
        self._settings = settings
        self._operations = operations
        self._queue = FairQueue("commands", settings.exec_slots, settings.queue_limit)
        self._turns = Turns(self._queue, settings.exec_hold_s)
        self._running: set[ExecOperation] = set()
        self._of_owner: Counter[str] = Counter()
        """How many of these each owner has."""
        self.took = Durations()
        """Of commands that have ended, their wait included; shells of sessions are none."""
        self._outputs = Outputs(settings)
        self._windows = Shares(
            settings.owner_window_bytes, "windows and requests of running commands"
        )
        operations.on_expire = self._outputs.drop

    @property
    def running(self) -> int:
        """Commands that have not ended, those that wait for their turn included."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Commands that wait for their turn."""
        return self._queue.depth

    # --- life of one command ----------------------------------------------------------

    def begin(self, sandbox: Sandbox, request: ExecRequest) -> ExecOperation:
        """Return the operation of this request: a known one, or one that starts now.

        Raises:
            SandboxStateError, SandboxGoneError, ConflictError: the sandbox does not take it.
            OperationMismatchError, OperationExpiredError: the id was used before.
            CapacityError: too many run already.
        """
        operation_id = request.operation_id
        if operation_id is None:
            operation_id = new_operation_id()
        else:
            check_operation_id(operation_id)
            known = self._operations.find_exec(sandbox, request)
            if known is not None:
                return known
        sandbox.require_ready(request.expected_version)
        operation = ExecOperation(operation_id, sandbox, request)
        self.hold(operation)
        sandbox.execs[operation_id] = operation
        self._operations.add(operation)
        self._follow(operation, Undertaking(self._run(operation), at_once=True))
        return operation

    def hold(self, operation: ExecOperation) -> None:
        """Count a command, and a window and a request that are large, until it has ended.

        Raises:
            CapacityError: too many run already, or those of its owner hold too much.
        """
        owner, most = operation.owner, self._settings.max_running_execs
        free = most - len(self._running)
        if free <= 0:
            raise CapacityError(f"{most} commands are running on this node already")
        if owner is not None and self._of_owner[owner] >= _SHARE * free:
            raise CapacityError(
                f"owner {owner!r} runs {self._of_owner[owner]} commands already; no more of the "
                f"{most} that may run on this node are for one owner now"
            )
        window_bytes = operation.request.window_bytes
        held = 2 * window_bytes if window_bytes > MIB else 0
        held += operation.size if operation.size > _LARGE_REQUEST else 0
        if held:
            self._windows.take(owner, held)
            operation.held = held
        self._count(operation)

    def _count(self, operation: ExecOperation) -> None:
        self._running.add(operation)
        if operation.owner is not None:
            self._of_owner[operation.owner] += 1

    def let_go(self, operation: ExecOperation) -> None:
        """It counts no more. Twice is fine."""
        if operation not in self._running:
            return
        self._running.remove(operation)
        ended = operation.ended
        if ended.done() and ended.exception() is None and not operation.request.status_pipe:
            result = ended.result()
            self.took.add(result.queued_s + result.duration_s)
        owner = operation.owner
        if owner is not None:
            self._of_owner[owner] -= 1
            if not self._of_owner[owner]:
                del self._of_owner[owner]
        if operation.held:
            self._windows.give_back(owner, operation.held)
            operation.held = 0

    def _follow(self, operation: ExecOperation, ended: Undertaking[ExecResult]) -> None:
        operation.ended, operation.task = ended, ended.task
        ended.then(partial(self._on_end, operation))

    def go_on(self, found: FoundExec, sandbox: Sandbox) -> None:
        """Follow a command that another process had begun, and that may have ended."""
        note = read_exec(found)
        operation = ExecOperation(found.operation_id, sandbox, note.request)
        operation.trace_id, operation.queued_s = note.trace_id, note.queued_s
        operation.began_at = note.began_at
        operation.running, operation.ended_unix = found.running, found.ended_at
        operation.started.set_result(None)
        self._count(operation)
        sandbox.execs[operation.id] = operation
        self._operations.add(operation)
        self._outputs.go_on(operation, found.request.spool_bytes)
        self._follow(operation, Undertaking(self._go_on(operation, found.running)))

    async def _go_on(self, operation: ExecOperation, running: RunningExec) -> ExecResult:
        try:
            return _completed(operation, await running.wait())
        except asyncio.CancelledError:
            if not operation.abandoned:
                raise
            return await self._last_words(operation)

    async def _run(self, operation: ExecOperation) -> ExecResult:
        sandbox, queue = operation.sandbox, self._queue
        turn: Turn | None = None
        try:
            if not queue.try_acquire():
                operation.queued_s = await queue.acquire(sandbox.owner or "", sandbox.id)
            turn = self._turns.begin()
            handle = sandbox.require_ready(operation.request.expected_version)
            operation.began_at = time.time()
            request = self._outputs.grant(operation)
            running = await handle.start_exec(request, operation.id)
            operation.running = running
            operation.started.set_result(None)
            result = await running.wait()
        except asyncio.CancelledError:
            if operation.cancelled:
                return never_ran(operation)
            if not operation.abandoned:
                raise
            return await self._last_words(operation)
        finally:
            if turn is not None:
                turn.end()
        return _completed(operation, result)

    def _on_end(self, operation: ExecOperation, ended: Outcome[ExecResult]) -> None:
        operation.sandbox.execs.pop(operation.id, None)
        operation.ended, operation.task = ended.settled(), None
        self.let_go(operation)
        if not operation.started.done():
            operation.started.set_result(None)
        self._outputs.end(operation, ended.result() if ended.exception() is None else None)
        if operation.dispatched or operation.cancelled:
            self._operations.settle(operation, ended)
        else:
            self._operations.drop(operation)

    async def _last_words(self, operation: ExecOperation) -> ExecResult:
        """The result of a command that the runtime never reported the end of."""
        sandbox, running = operation.sandbox, operation.running
        if running is None:
            raise SandboxGoneError(
                f"sandbox {sandbox.id!r} ended before the command was known to run",
                execution=Execution.UNKNOWN if operation.dispatched else Execution.NOT_EXECUTED,
            )
        window = operation.request.window_bytes
        began, now = operation.began_at, time.time()
        return ExecResult(
            operation_id=operation.id,
            sandbox_id=sandbox.id,
            reason=Reason.SANDBOX_GONE,
            out=await _what_is_there(running, "stdout", window),
            err=await _what_is_there(running, "stderr", window),
            started_at=began,
            ended_at=now,
            duration_s=max(0.0, now - began),
            request=operation.request,
            trace_id=operation.trace_id,
        )

    # --- ends of sandboxes ------------------------------------------------------------

    def refuse_waiting(self, sandbox: Sandbox) -> None:
        """End the operations that wait for their turn in a sandbox that takes no more."""
        self._abandon(op for op in list(sandbox.execs.values()) if not op.dispatched)

    async def settle(self, sandbox: Sandbox) -> None:
        """Return when every operation of a sandbox that has ended has a result."""
        if tasks := _tasks(sandbox.execs.values()):
            await asyncio.wait(tasks, timeout=_SETTLE_S)
        left = _tasks(sandbox.execs.values())
        self._abandon(list(sandbox.execs.values()))
        if left:
            await asyncio.wait(left)
        await self._outputs.settle(sandbox)

    def _abandon(self, operations: Iterable[ExecOperation]) -> None:
        for operation in operations:
            operation.abandoned = True
            if operation.task is not None:
                operation.task.cancel()

    # --- output -----------------------------------------------------------------------

    async def close(self) -> None:
        """Drop every kept output."""
        await self._outputs.close()

    async def read(
        self, operation_id: str, stream: Stream, cursor: int, max_bytes: int, wait: bool
    ) -> OutputChunk:
        """See `Node.read_output`."""
        if cursor < 0 or max_bytes < 1:
            raise InvalidRequestError("cursor must not be negative, max_bytes must be at least 1")
        operation = self._operations.get(operation_id)
        if stream == "status" and not operation.request.status_pipe:
            raise InvalidRequestError("stream 'status' needs a request with status_pipe")
        if not operation.started.done():
            if not wait:
                return OutputChunk(stream=stream, offset=cursor, data=b"")
            await self.until_started(operation)
        if operation.running is not None:
            return await operation.running.read(stream, cursor, max_bytes, wait=wait)
        result = await operation.ended
        output = {"stdout": result.out, "stderr": result.err}.get(stream, Output())
        return read_result(operation, stream, output, cursor, max_bytes)

    # --- control ----------------------------------------------------------------------

    async def until_started(self, operation: ExecOperation) -> None:
        """Return when the command runs, or has run; raise what kept it from starting."""
        await operation.started
        if operation.running is None:
            await operation.ended

    async def _reach(self, operation_id: str) -> RunningExec | None:
        """The command if anything of it still runs."""
        operation = self._operations.get(operation_id)
        await self.until_started(operation)
        if operation.ended.done() and operation_id not in operation.sandbox.lingering:
            return None
        return operation.running

    async def write_stdin(self, operation_id: str, data: bytes) -> None:
        """See `Node.write_stdin`."""
        running = await self._reach(operation_id)
        if running is None:
            raise StdinClosedError("the command has ended; nobody reads its stdin")
        try:
            await running.write_stdin(data)
        except BrokenPipeError as error:
            raise StdinClosedError(str(error)) from error

    async def close_stdin(self, operation_id: str) -> None:
        """See `Node.close_stdin`."""
        running = await self._reach(operation_id)
        if running is not None:
            await running.close_stdin()

    async def signal(self, operation_id: str, signum: int, scope: SignalScope) -> int:
        """See `Node.signal`."""
        running = await self._reach(operation_id)
        return 0 if running is None else await running.signal(signum, scope)

    async def cancel(self, operation_id: str) -> None:
        """See `Node.cancel_exec`."""
        operation = self._operations.get(operation_id)
        if not operation.dispatched and operation.task is not None:
            operation.cancelled = True
            operation.task.cancel()
            self._operations.refuse(operation_id, operation.owner)  # by the next process
        await self.until_started(operation)
        if isinstance(operation.running, SessionCommand):
            await operation.running.cancel()
        elif operation.sandbox.refusal() is None:  # else all of it ends with the sandbox
            await operation.sandbox.require_ready().kill_processes(operation_id)

    async def resize(self, operation_id: str, rows: int, cols: int) -> None:
        """See `Node.resize`."""
        if self._operations.get(operation_id).request.pty is None:
            raise InvalidRequestError("the command has no terminal to resize")
        running = await self._reach(operation_id)
        if running is not None:
            await running.resize(rows, cols)

    async def mark(self, operation_id: str) -> tuple[int, int]:
        """See `Node.mark`."""
        running = await self._reach(operation_id)
        if running is not None:
            return await running.mark()
        result = await self._operations.get(operation_id).ended
        return result.out.total_bytes, result.err.total_bytes

    async def forget(self, operation_id: str) -> None:
        """See `Node.forget`."""
        operation = self._operations.get(operation_id)
        self._outputs.drop(operation)
        if operation.running is not None:
            await operation.running.forget()


def _tasks(operations: Iterable[ExecOperation]) -> list[asyncio.Task[None]]:
    return [operation.task for operation in operations if operation.task is not None]


def _was_killed(result: ExecResult) -> bool:
    """Whether a command, or what its shell waited for, was killed."""
    return result.reason is Reason.SIGNAL or result.exit_code == _KILLED


def _completed(operation: ExecOperation, result: ExecResult) -> ExecResult:
    """A result with what the node knows of it."""
    told: dict[str, object] = {"queued_s": operation.queued_s} if operation.queued_s else {}
    if operation.trace_id is not None:
        told["trace_id"] = operation.trace_id
    lapse = operation.sandbox.expires_at
    lapsed = operation.sandbox.expired or (lapse is not None and result.ended_at >= lapse)
    if lapsed and _was_killed(result):
        told["reason"] = Reason.SANDBOX_GONE
    return result.model_copy(update=told) if told else result


async def _what_is_there(running: RunningExec, stream: Stream, window: int) -> Output:
    """What can be read of a stream at once; its length and digest are not known."""
    try:
        chunk = await asyncio.wait_for(running.read(stream, 0, max(1, window), wait=False), 1.0)
    except (ColdframeError, OSError, TimeoutError):
        return Output(sha256="")
    return Output(total_bytes=len(chunk.data), sha256="", head=chunk.data[:window])
