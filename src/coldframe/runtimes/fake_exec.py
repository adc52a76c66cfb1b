"""One command of the fake runtime: pipes, status, deadline and the end of its process tree."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import pty
import signal
import socket
import struct
import termios
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coldframe.protocol.errors import InvalidRequestError
from coldframe.protocol.models import (
    ExecRequest,
    ExecResult,
    OutputChunk,
    ProcessInfo,
    PtySize,
    Reason,
    Resources,
    SignalScope,
    Stream,
)
from coldframe.runtimes.fake_spool import Spool
from coldframe.runtimes.fake_zygote import ENDED, FAILED, REPORT, STARTED, descendants, kill_below

_READ = 1 << 18
_STATUS_BYTES = 2 << 20
"""Of these the second half is the newest."""
_PIPE_MAX = 1 << 20
"""More than a pipe or a terminal holds."""


@dataclass
class Streams:
    """Our ends of a command's streams, and those that it gets."""

    theirs: tuple[int, ...]
    """stdin, stdout, stderr and, if asked for, the status pipe, as descriptors 0 to 3."""
    stdin: int | None
    outputs: dict[Stream, int]
    """What we read: stdout and stderr, or the terminal; and the status pipe."""

    def close_theirs(self) -> None:
        """Close the command's ends in this process."""
        for fd in set(self.theirs):
            os.close(fd)


def open_streams(request: ExecRequest) -> Streams:
    """Make pipes, or a terminal of the asked size, and the status pipe if it is asked for."""
    streams = _open_terminal(request.pty) if request.pty is not None else _open_pipes(request)
    if request.status_pipe:
        reader, writer = os.pipe()
        streams.theirs += (writer,)
        streams.outputs["status"] = reader
    for fd in streams.outputs.values():
        os.set_blocking(fd, False)
    return streams


def _open_terminal(size: PtySize) -> Streams:
    master, slave = pty.openpty()
    set_size(master, size.rows, size.cols)
    return Streams((slave, slave, slave), os.dup(master), {"stdout": master})


def _open_pipes(request: ExecRequest) -> Streams:
    out_reader, out_writer = os.pipe()
    err_reader, err_writer = os.pipe()
    in_reader, in_writer = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), None
    if request.stdin is not None or request.stdin_open:
        os.close(in_reader)
        in_reader, in_writer = os.pipe()
        os.set_blocking(in_writer, False)
    outputs: dict[Stream, int] = {"stdout": out_reader, "stderr": err_reader}
    return Streams((in_reader, out_writer, err_writer), in_writer, outputs)


def set_size(terminal: int, rows: int, cols: int) -> None:
    """Set a terminal's size in characters."""
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))


def process_name(pid: int) -> str | None:
    """Return the name of a live process, None when it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    name, _, rest = stat.partition(b"(")[2].rpartition(b")")
    return None if rest.split()[0] in (b"Z", b"X") else name.decode("utf-8", "replace")


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


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
        self._spools: dict[Stream, Spool] = {
            "stdout": Spool("stdout", request.spool_bytes),
            "stderr": Spool("stderr", request.spool_bytes),
        }
        if request.status_pipe:
            self._spools["status"] = Spool("status", _STATUS_BYTES)
        self._readers: dict[int, Spool] = {}
        self._stdin: int | None = None
        self._stdin_lock = asyncio.Lock()
        self._feeding: asyncio.Task[None] | None = None
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
        self._stdin = streams.stdin
        for name, fd in streams.outputs.items():
            self._readers[fd] = self._spools[name]
            self._loop.add_reader(fd, self._drain, fd)
        if "stderr" not in streams.outputs:
            self._spools["stderr"].end()
        status.setblocking(False)
        self._loop.add_reader(status.fileno(), self._on_status)
        failure = await asyncio.shield(self._started)
        if failure is not None:
            self._close()
        elif self._request.stdin is not None and self._stdin is not None:
            self._feeding = self._loop.create_task(self._feed(self._request.stdin))
        return failure

    async def _feed(self, data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):
            await self._write(data)
        if not self._request.stdin_open:
            self._close_stdin()

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
        self._drain_now()
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
            out=self._spools["stdout"].output(window),
            err=self._spools["stderr"].output(window),
            started_at=self._began[0],
            ended_at=time.time(),
            duration_s=time.monotonic() - self._began[1],
            resources=resources,
            leftovers=self.processes(),
            request=self._request,
        )

    def _close(self) -> None:
        """Give back every descriptor; what was kept stays readable."""
        for fd in list(self._readers):
            self._end_stream(fd)
        self._close_stdin()

    # --- output -----------------------------------------------------------------------

    def _drain(self, fd: int) -> int:
        spool = self._readers.get(fd)
        if spool is None:
            return 0
        try:
            data = os.read(fd, _READ)
        except BlockingIOError:
            return 0
        except OSError:  # a terminal whose last user has closed it
            data = b""
        if not data:
            self._end_stream(fd)
            return 0
        spool.feed(data)
        self._check_kill_bytes()
        return len(data)

    def _drain_now(self) -> None:
        """Read what is in the pipes at this moment, however fast somebody goes on writing."""
        for fd in list(self._readers):
            left = _PIPE_MAX
            while left > 0 and (count := self._drain(fd)):
                left -= count

    def _end_stream(self, fd: int) -> None:
        spool = self._readers.pop(fd, None)
        if spool is not None:
            self._loop.remove_reader(fd)
            os.close(fd)
            spool.end()

    def _check_kill_bytes(self) -> None:
        limit = self._request.kill_bytes
        if limit is None or self._reason is not None:
            return
        if self._spools["stdout"].total + self._spools["stderr"].total > limit:
            self.end(Reason.OUTPUT_LIMIT)

    async def read(
        self, stream: Stream, cursor: int, max_bytes: int, *, wait: bool = True
    ) -> OutputChunk:
        """See `RunningExec.read`."""
        if stream not in self._spools:
            raise InvalidRequestError(f"stream {stream!r} needs a request with status_pipe")
        return await self._spools[stream].read(cursor, max_bytes, wait=wait)

    async def mark(self) -> tuple[int, int]:
        """See `RunningExec.mark`."""
        self._drain_now()
        return self._spools["stdout"].total, self._spools["stderr"].total

    async def forget(self) -> None:
        """See `RunningExec.forget`."""
        for spool in self._spools.values():
            spool.drop()

    async def wait(self) -> ExecResult:
        """See `RunningExec.wait`."""
        return await asyncio.shield(self._finished)

    # --- input, signals ---------------------------------------------------------------

    async def write_stdin(self, data: bytes) -> None:
        """See `RunningExec.write_stdin`."""
        if not (self._request.stdin_open or self._request.pty):
            raise InvalidRequestError("stdin is closed: the request did not ask to keep it open")
        if self._feeding is not None:  # what the request gave goes first
            await asyncio.shield(self._feeding)
        await self._write(data)

    async def _write(self, data: bytes) -> None:
        view = memoryview(data)
        async with self._stdin_lock:
            while view:
                fd = self._stdin
                if fd is None:
                    raise BrokenPipeError("stdin has been closed")
                try:
                    view = view[os.write(fd, view) :]
                except BlockingIOError:
                    await self._writable(fd)
                except OSError as error:
                    raise BrokenPipeError("nobody reads stdin") from error

    async def _writable(self, fd: int) -> None:
        ready: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_writer(fd, _resolve, ready)
        ended = self._loop.create_task(self._gone.wait())
        try:
            await asyncio.wait((ready, ended), return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
            if self._stdin == fd:
                self._loop.remove_writer(fd)

    async def close_stdin(self) -> None:
        """See `RunningExec.close_stdin`."""
        if self._request.pty is not None and self._stdin is not None:
            with contextlib.suppress(OSError):
                os.write(self._stdin, b"\x04")
            return
        if self._feeding is not None:
            await asyncio.shield(self._feeding)
        async with self._stdin_lock:
            self._close_stdin()

    def _close_stdin(self) -> None:
        fd, self._stdin = self._stdin, None
        if fd is not None:
            self._loop.remove_writer(fd)
            os.close(fd)

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
            set_size(self._stdin, rows, cols)

    async def aclose(self) -> None:
        """Kill what is left and give back every descriptor."""
        self.end(Reason.SANDBOX_GONE)
        await self._gone.wait()
        if self._leader is not None:
            await asyncio.wait((self._finished,))
        self._close()
