"""One command of a native sandbox: its output, stdin, signals, and how it ended."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import struct
import termios
import time
from collections.abc import Callable

from coldframe.host import forks, wire
from coldframe.host.descriptors import needing_room
from coldframe.host.outcome import Outcome, Undertaking
from coldframe.host.pipes import StatusStream, StdinFeed
from coldframe.host.spawner import ExecEnd, Execution, SpawnerFault, Started
from coldframe.protocol import errors
from coldframe.protocol.errors import (
    CapacityError,
    ColdframeError,
    InvalidRequestError,
    SpawnerLostError,
)
from coldframe.protocol.models import (
    ExecResult,
    Output,
    OutputChunk,
    ProcessInfo,
    Reason,
    Resources,
    SignalScope,
    Stream,
)
from coldframe.runtimes.native_faults import exec_error
from coldframe.runtimes.native_output import STDERR, STDOUT, NativeOutput, whole_window
from coldframe.runtimes.native_request import Plan

_REASONS = {reason: Reason[reason.name] for reason in wire.Reason}
_SCOPES = {scope: wire.Scope[scope.name] for scope in SignalScope}


class NativeExec:
    """See `RunningExec`."""

    def __init__(
        self,
        execution: Execution,
        plan: Plan,
        operation_id: str,
        *,
        feed: StdinFeed | None,
        status: StatusStream | None,
        ended: Callable[[NativeExec], None],
        kept_stdin: bool = False,
    ) -> None:
        """`kept_stdin`: the spawner holds the writing end of stdin, too."""
        self._kept_stdin = kept_stdin
        self.execution, self._plan = execution, plan
        self.operation_id = operation_id
        self._feed, self._status = feed, status
        self._output = NativeOutput(execution, plan.request.spool_bytes)
        self._started: Started | None = None
        self._pty = -1
        self._asked_at = time.time()
        self._dropped = False
        self._result: ExecResult | None = None
        self._building: Undertaking[ExecResult] | None = None
        self._launching: Undertaking[int] | None = None
        self._on_end = ended
        execution.ended.then(self._ended)

    # --- life -------------------------------------------------------------------------

    @property
    def pid(self) -> int | None:
        """See `RunningExec.pid`; told for terminals, open stdin and status pipes."""
        return None if self._started is None else self._started.pid

    @property
    def started(self) -> Started | None:
        """Its first process; told for what `pid` is told for, and for what is guarded."""
        return self._started

    @property
    def running(self) -> bool:
        """Whether its end is not known yet."""
        return not self.execution.ended.done()

    @property
    def left_processes(self) -> bool:
        """Whether it left processes behind when it ended."""
        ended = self.execution.ended
        return ended.done() and ended.exception() is None and bool(ended.result().leftovers)

    async def begin(self) -> None:
        """Where the start is to be known, wait for it. Raises what `wait` would."""
        if self.execution.started is None:
            return
        try:
            self._started = await self.execution.started
            if self._started.pty_fd is not None:
                self._take_terminal(self._started.pty_fd)
                if self._feed is not None and self._plan.request.stdin:
                    self._feed.give(self._plan.request.stdin)
        except (SpawnerFault, SpawnerLostError):
            await self.wait()  # raises the same, typed
            raise
        except CapacityError:
            # It runs, and nobody could ever reach it: it has no terminal of ours.
            self._close_input()
            await self.signal(signal.SIGKILL, SignalScope.TREE)
            raise
        finally:
            if not self.running:
                self._close_input()

    async def launched(self) -> None:
        """Return once it has a process, or never will: before, nobody could list it."""
        if self._launching is None:
            # No signal at all, but a question that is answered only then.
            self._launching = Undertaking(self.execution.signal(0, wire.Scope.LEADER))
        with contextlib.suppress(SpawnerFault, SpawnerLostError):  # `wait` tells it
            await self._launching

    def _take_terminal(self, master: int) -> None:
        self._pty = master
        forks.own(self)
        with needing_room("the terminal cannot be written to", execution=errors.Execution.EXECUTED):
            self._feed = StdinFeed(os.dup(master))

    def go_on(self) -> None:
        """Another process had it started."""
        assert self.execution.started is not None
        self._kept_stdin = self._feed is not None
        self.execution.started.then(self._found_running)

    def _found_running(self, started: Outcome[Started]) -> None:
        if started.exception() is None:
            self._started = started.result()
            if self._started.pty_fd is not None:
                self._take_terminal(self._started.pty_fd)

    def _ended(self, ended: Outcome[ExecEnd]) -> None:
        if ended.exception() is None and ended.result().spooled:
            forks.own(self)
        self._close_input()
        self._on_end(self)

    def _close_input(self) -> None:
        if self._feed is not None:
            self._feed.close()
        self._drop_stdin()
        if self._pty >= 0:
            os.close(self._pty)
            self._pty = -1

    def _drop_stdin(self) -> None:
        """Its end must not be held open by the spawner either."""
        kept, self._kept_stdin = self._kept_stdin, False
        if kept:
            self.execution.drop_stdin()

    async def wait(self) -> ExecResult:
        """See `RunningExec.wait`."""
        if self._result is not None:
            return self._result
        try:
            end = await self.execution.ended
        except SpawnerFault as fault:
            raise exec_error(fault, self._plan) from fault
        except SpawnerLostError:
            return self._lost_result()
        if self._result is None:
            if end.spooled:
                # One task for all who wait: each stream is read from its spool once.
                if self._building is None:
                    self._building = Undertaking(self._build_from_spools(end))
                return await self._building
            window = self._plan.request.window_bytes
            self._result = self._build(
                end, whole_window(end.stdout, window), whole_window(end.stderr, window)
            )
        return self._result

    async def forget(self) -> None:
        """See `RunningExec.forget`. The result stays; while it runs, nothing is dropped yet."""
        if self.running:
            return
        if self.left_processes:
            with contextlib.suppress(SpawnerFault, SpawnerLostError):  # not kept any more
                await self.execution.forget()
        with contextlib.suppress(ColdframeError):  # `wait` tells it to whoever asks
            await self.wait()
        self.drop()

    def drop(self) -> None:
        """Give the descriptors back; a result that was built stays."""
        self._output.close()
        if self._status is not None:
            self._status.close()
        ended = self.execution.ended
        if ended.done() and ended.exception() is None:
            if not self._dropped:
                ended.result().close()
            self._dropped = True

    def abandon(self) -> None:
        """See `forks.Owner`; what it reads and writes by is let go of by itself."""
        self._pty, pty = -1, self._pty
        if pty >= 0:
            os.close(pty)
        self.drop()

    def __del__(self) -> None:
        # Nobody can ask for the kept output any more, and it holds descriptors.
        self.drop()

    # --- the result -------------------------------------------------------------------

    async def _build_from_spools(self, end: ExecEnd) -> ExecResult:
        window = self._plan.request.window_bytes
        out = await self._output.window(end, end.stdout, window)
        err = await self._output.window(end, end.stderr, window)
        self._result = self._build(end, out, err)
        return self._result

    def _build(self, end: ExecEnd, out: Output, err: Output) -> ExecResult:
        return ExecResult.whole(
            operation_id=self.operation_id,
            sandbox_id=self.execution.sandbox_id,
            reason=_REASONS[end.reason],
            exit_code=None if end.signalled else end.code,
            signal=end.code if end.signalled else None,
            out=out,
            err=err,
            started_at=end.started_ns / 1e9,
            ended_at=end.ended_ns / 1e9,
            duration_s=end.duration_ns / 1e9,
            queued_s=0.0,
            resources=Resources.whole(
                cpu_user_s=end.user_us / 1e6,
                cpu_system_s=end.system_us / 1e6,
                memory_peak_bytes=end.memory_peak_bytes,
                read_bytes=end.read_bytes,
                write_bytes=end.write_bytes,
                oom_kills=end.oom_kills,
            ),
            leftovers=tuple(
                ProcessInfo.model_construct(
                    pid=left.pid,
                    name=left.name.decode("utf-8", "replace"),
                    operation_id=self.operation_id,
                )
                for left in end.leftovers
            ),
            request=self._plan.request,
            trace_id=None,
        )

    def _lost_result(self) -> ExecResult:
        """The spawner died: give the output that is known, or say that nothing is.

        Raises SpawnerLostError.
        """
        if not self._output.live:
            raise SpawnerLostError(
                f"the spawner died while {self.operation_id!r} ran; whether it ended is unknown"
            )
        now = time.time()
        window = self._plan.request.window_bytes
        self._result = ExecResult.model_construct(
            operation_id=self.operation_id,
            sandbox_id=self.execution.sandbox_id,
            reason=Reason.INFRASTRUCTURE,
            exit_code=None,
            signal=None,
            out=self._output.known(STDOUT, window),
            err=self._output.known(STDERR, window),
            started_at=self._asked_at,
            ended_at=now,
            duration_s=now - self._asked_at,
            resources=Resources(),
            leftovers=(),
            request=self._plan.request,
        )
        return self._result

    # --- output -----------------------------------------------------------------------

    async def read(
        self, stream: Stream, cursor: int, max_bytes: int, *, wait: bool = True
    ) -> OutputChunk:
        """See `RunningExec.read`."""
        if cursor < 0 or max_bytes < 1:
            raise InvalidRequestError("cursor must not be negative, max_bytes at least 1")
        if stream == "status":
            if self._status is None:
                raise InvalidRequestError("the command has no status pipe; ask with status_pipe")
            offset, data, eof = await self._status.read(cursor, max_bytes, wait=wait)
        else:
            index = STDOUT if stream == "stdout" else STDERR
            try:
                offset, data, eof = await self._output.read(index, cursor, max_bytes, wait=wait)
            except SpawnerFault as fault:
                raise exec_error(fault, self._plan) from fault
        return OutputChunk.model_construct(
            stream=stream,
            offset=offset,
            data=data,
            dropped_bytes=max(0, offset - cursor),
            eof=eof,
        )

    async def mark(self) -> tuple[int, int]:
        """See `RunningExec.mark`."""
        if self._status is not None:
            self._status.drain()
        try:
            return await self._output.mark()
        except SpawnerFault as fault:
            raise exec_error(fault, self._plan) from fault

    # --- input, signals ---------------------------------------------------------------

    async def write_stdin(self, data: bytes) -> None:
        """See `RunningExec.write_stdin`."""
        self._require_open_stdin()
        if self._feed is None or not self._feed.open:
            raise BrokenPipeError("the command's stdin is closed")
        await self._feed.write(data)

    async def close_stdin(self) -> None:
        """See `RunningExec.close_stdin`; on a terminal, the end-of-file character."""
        if self._feed is None or not self._feed.open:
            return
        if self._pty >= 0:
            self._feed.give(b"\x04")
        else:
            self._feed.end()
            self._drop_stdin()

    def _require_open_stdin(self) -> None:
        if not self._plan.request.stdin_open:
            raise InvalidRequestError("stdin was not asked to be open (stdin_open)")

    async def signal(self, signum: int, scope: SignalScope = SignalScope.GROUP) -> int:
        """See `RunningExec.signal`."""
        if not 1 <= signum <= 64:
            raise InvalidRequestError(f"signal {signum} is not in 1..64")
        try:
            return await self.execution.signal(signum, _SCOPES[scope])
        except SpawnerFault as fault:
            if fault.errno in {errno.ENOENT, errno.ESRCH}:
                return 0
            raise InvalidRequestError(f"signal {signum} was not sent: {fault}") from fault
        except SpawnerLostError:
            return 0

    async def resize(self, rows: int, cols: int) -> None:
        """See `RunningExec.resize`."""
        if self._plan.request.pty is None:
            raise InvalidRequestError("the command has no terminal")
        if not (1 <= rows <= 65535 and 1 <= cols <= 65535):
            raise InvalidRequestError("rows and cols are in 1..65535")
        if self._pty >= 0:
            with contextlib.suppress(OSError):  # it has just hung up
                fcntl.ioctl(self._pty, termios.TIOCSWINSZ, struct.pack("4H", rows, cols, 0, 0))
