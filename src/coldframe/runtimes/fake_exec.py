"""One command of the fake runtime: pipes, status, deadline and the end of its process tree."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from coldframe.protocol.errors import InvalidRequestError
from coldframe.protocol.models import (
    ExecRequest,
    ExecResult,
    OutputChunk,
    ProcessInfo,
    Reason,
    Resources,
    SignalScope,
    Stream,
)
from coldframe.runtimes.fake_output import FakeOutput
from coldframe.runtimes.fake_streams import Stdin, Streams
from coldframe.runtimes.fake_zygote import ENDED, FAILED, REPORT, STARTED, descendants, kill_below


def process_name(pid: int) -> str | None:
    """Return the name of a live process, None when it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    name, _, rest = stat.partition(b"(")[2].rpartition(b")")
    return None if rest.split()[0] in (b"Z", b"X") else name.decode("utf-8", "replace")


def _group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return -1


class FakeExec:
    """See `RunningExec`."""

    def __init__(
        self,
        request: ExecRequest,
        operation_id: str,
        sandbox_id: str,
        *,
        ended: Callable[[FakeExec], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._request = request
        self._operation_id = operation_id
        self._sandbox_id = sandbox_id
        self._ended = ended
        self._output = FakeOutput(request, self._check_kill_bytes)
        self._stdin: Stdin | None = None
        self._status: socket.socket | None = None
        self._leader: int | None = None
        self._supervisor: int | None = None
        self._started: asyncio.Future[tuple[int, int] | None] = self._loop.create_future()
        self._finished: asyncio.Future[ExecResult] = self._loop.create_future()
        self._gone = asyncio.Event()
        """Set when nothing of the command's tree is left."""
        self._reason: Reason | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._began = (time.time(), time.monotonic())

    @property
    def operation_id(self) -> str:
        """The operation that this command is."""
        return self._operation_id

    @property
    def pid(self) -> int | None:
        """The leader's pid; the host's, since there is no pid namespace."""
        return self._leader

    @property
    def supervisor(self) -> int | None:
        """The pid of the process that the whole tree stays below."""
        return self._supervisor

    # --- start ------------------------------------------------------------------------

    async def begin(self, status: socket.socket, streams: Streams) -> tuple[int, int] | None:
        """Watch a command that was handed to the zygote.

        Returns None once it runs, else the stage that failed and its errno.
        """
        self._status = status
        self._stdin = None if streams.stdin is None else Stdin(streams.stdin, self._gone)
        self._output.watch(streams.outputs)
        status.setblocking(False)
        self._loop.add_reader(status.fileno(), self._on_status)
        failure = await asyncio.shield(self._started)
        if failure is not None:
            self._close()
        elif self._request.stdin is not None and self._stdin is not None:
            self._stdin.feed(self._request.stdin, close=not self._request.stdin_open)
        return failure

    def _spawn(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _on_status(self) -> None:
        assert self._status is not None
        try:
            data = self._status.recv(REPORT.size)
        except BlockingIOError:
            return
        if not data:
            self._on_supervisor_end()
            return
        kind, first, second, third, fourth = REPORT.unpack(data)
        if kind == STARTED:
            self._on_started(first, second)
        elif kind == FAILED:
            self._started.set_result((first, second))
        elif kind == ENDED:
            self._spawn(self._finish(first, (second, third, fourth)))

    def _on_started(self, leader: int, supervisor: int) -> None:
        self._leader, self._supervisor = leader, supervisor
        self._began = (time.time(), time.monotonic())
        if self._request.deadline_s is not None:
            self._deadline = self._loop.call_later(
                self._request.deadline_s, self.end, Reason.DEADLINE
            )
        if not self._started.done():
            self._started.set_result(None)
        if self._reason is not None:  # its sandbox was destroyed while it started
            self._spawn(self.kill())

    def _on_supervisor_end(self) -> None:
        assert self._status is not None
        self._loop.remove_reader(self._status.fileno())
        self._status.close()
        self._gone.set()
        self._close_stdin()
        if not self._started.done():
            self._started.set_result((0, errno.EIO))
        elif self._leader is not None and self._reason is None:
            # Its supervisor was killed, or ended after the command: only the first is a fault.
            self._spawn(self._finish(None, None))
        self._ended(self)

    # --- end --------------------------------------------------------------------------

    def end(self, reason: Reason) -> None:
        """Kill the whole tree, for this reason if it is the first."""
        if self._reason is None and not self._finished.done():
            self._reason = reason
        if self._deadline is not None:
            self._deadline.cancel()
        self._spawn(self.kill())

    async def kill(self) -> tuple[ProcessInfo, ...]:
        """Kill everything below the supervisor; return what was killed once it is gone."""
        killed = {info.pid: info for info in self.processes()}
        while not self._gone.is_set() and self._supervisor is not None:
            killed |= {info.pid: info for info in self.processes()}
            kill_below(self._supervisor)
            with contextlib.suppress(TimeoutError):
                # A fork may race with one sweep; the supervisor ends when none is left.
                await asyncio.wait_for(self._gone.wait(), 0.005)
        return tuple(killed.values())

    async def _finish(self, status: int | None, usage: tuple[int, int, int] | None) -> None:
        if self._finished.done():
            return
        if self._reason in (Reason.DEADLINE, Reason.OUTPUT_LIMIT, Reason.SANDBOX_GONE):
            await self._gone.wait()
        if self._deadline is not None:
            self._deadline.cancel()
        self._output.drain()
        if not self._finished.done():
            self._finished.set_result(self._result(status, usage))

    def _result(self, status: int | None, usage: tuple[int, int, int] | None) -> ExecResult:
        reason, code, signum = self._reason, None, None
        if status is None:
            reason = reason or Reason.INFRASTRUCTURE
        elif os.WIFSIGNALED(status):
            signum = os.WTERMSIG(status)
            reason = reason or Reason.SIGNAL
        elif reason is None:
            code = os.WEXITSTATUS(status)
            reason = Reason.EXIT
        window = self._request.window_bytes
        resources = Resources()
        if usage is not None:
            resources = Resources(
                cpu_user_s=usage[0] / 1e6,
                cpu_system_s=usage[1] / 1e6,
                memory_peak_bytes=usage[2] * 1024,
            )
        return ExecResult(
            operation_id=self._operation_id,
            sandbox_id=self._sandbox_id,
            reason=reason,
            exit_code=code,
            signal=signum,
            out=self._output.window("stdout", window),
            err=self._output.window("stderr", window),
            started_at=self._began[0],
            ended_at=time.time(),
            duration_s=time.monotonic() - self._began[1],
            resources=resources,
            leftovers=self.processes(),
            request=self._request,
        )

    def _close(self) -> None:
        """Give back every descriptor; what was kept stays readable."""
        self._output.close()
        self._close_stdin()

    # --- output -----------------------------------------------------------------------

    def _check_kill_bytes(self) -> None:
        limit = self._request.kill_bytes
        if limit is None or self._reason is not None:
            return
        if sum(self._output.totals) > limit:
            self.end(Reason.OUTPUT_LIMIT)

    async def read(
        self, stream: Stream, cursor: int, max_bytes: int, *, wait: bool = True
    ) -> OutputChunk:
        """See `RunningExec.read`."""
        return await self._output.read(stream, cursor, max_bytes, wait=wait)

    async def mark(self) -> tuple[int, int]:
        """See `RunningExec.mark`."""
        self._output.drain()
        return self._output.totals

    async def forget(self) -> None:
        """See `RunningExec.forget`."""
        self._output.drop()

    async def wait(self) -> ExecResult:
        """See `RunningExec.wait`."""
        return await asyncio.shield(self._finished)

    # --- input, signals ---------------------------------------------------------------

    async def write_stdin(self, data: bytes) -> None:
        """See `RunningExec.write_stdin`."""
        if not (self._request.stdin_open or self._request.pty):
            raise InvalidRequestError("stdin is closed: the request did not ask to keep it open")
        if self._stdin is None:
            raise BrokenPipeError("stdin has been closed")
        await self._stdin.write(data)

    async def close_stdin(self) -> None:
        """See `RunningExec.close_stdin`."""
        if self._stdin is None:
            return
        if self._request.pty is not None:
            self._stdin.say_end()
        else:
            await self._stdin.close()

    def _close_stdin(self) -> None:
        if self._stdin is not None:
            self._stdin.close_now()

    def processes(self) -> tuple[ProcessInfo, ...]:
        """All live processes that the command started, itself included."""
        if self._supervisor is None or self._gone.is_set():
            return ()
        found = ((pid, process_name(pid)) for pid in descendants(self._supervisor))
        return tuple(
            ProcessInfo(pid=pid, name=name, operation_id=self._operation_id)
            for pid, name in found
            if name is not None
        )

    async def signal(self, signum: int, scope: SignalScope = SignalScope.GROUP) -> int:
        """See `RunningExec.signal`."""
        if signum not in signal.valid_signals() and signum != 0:
            raise InvalidRequestError(f"{signum} is not a signal")
        leader = self._leader
        pids = [info.pid for info in self.processes()]
        if scope is SignalScope.LEADER:
            pids = [pid for pid in pids if pid == leader]
        elif scope is SignalScope.GROUP:
            pids = [pid for pid in pids if _group_of(pid) == leader]
        elif scope is SignalScope.CHILDREN:
            pids = [pid for pid in pids if pid != leader]
        reached = 0
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)
                reached += 1
        return reached

    async def resize(self, rows: int, cols: int) -> None:
        """See `RunningExec.resize`."""
        if self._request.pty is None:
            raise InvalidRequestError("the command has no terminal to resize")
        if self._stdin is not None:
            self._stdin.resize(rows, cols)

    async def aclose(self) -> None:
        """Kill what is left and give back every descriptor."""
        self.end(Reason.SANDBOX_GONE)
        await self._gone.wait()
        if self._leader is not None:
            await asyncio.wait((self._finished,))
        self._close()
