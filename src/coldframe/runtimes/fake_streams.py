"""What a command of the fake runtime reads from and writes to: pipes, or a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pty
import struct
import termios
from dataclasses import dataclass

from coldframe.protocol.models import ExecRequest, PtySize, Stream


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


class Stdin:
    """Our end of a command's stdin: written in turn, whatever the pipe holds."""

    def __init__(self, fd: int, gone: asyncio.Event) -> None:
        """Take `fd` over; nobody reads any more once `gone` is set."""
        self._loop = asyncio.get_running_loop()
        self._fd: int | None = fd
        self._gone = gone
        self._turn = asyncio.Lock()
        self._feeding: asyncio.Task[None] | None = None

    def feed(self, data: bytes, *, close: bool) -> None:
        """Write what the request gave, before all else."""
        self._feeding = self._loop.create_task(self._feed(data, close))

    async def _feed(self, data: bytes, close: bool) -> None:
        with contextlib.suppress(BrokenPipeError):
            await self._write(data)
        if close:
            self.close_now()

    async def write(self, data: bytes) -> None:
        """Write all of it. Raises BrokenPipeError."""
        if self._feeding is not None:
            await asyncio.shield(self._feeding)
        await self._write(data)

    async def _write(self, data: bytes) -> None:
        view = memoryview(data)
        async with self._turn:
            while view:
                if self._fd is None:
                    raise BrokenPipeError("stdin has been closed")
                try:
                    view = view[os.write(self._fd, view) :]
                except BlockingIOError:
                    await self._writable(self._fd)
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
            if self._fd == fd:
                self._loop.remove_writer(fd)

    def resize(self, rows: int, cols: int) -> None:
        """Set the terminal's size, if it is one."""
        if self._fd is not None:
            set_size(self._fd, rows, cols)

    def say_end(self) -> None:
        """Send a terminal what means the end of input."""
        if self._fd is not None:
            with contextlib.suppress(OSError):  # nobody has it open any more
                os.write(self._fd, b"\x04")

    async def close(self) -> None:
        """Close it in turn. Twice is fine."""
        if self._feeding is not None:
            await asyncio.shield(self._feeding)
        async with self._turn:
            self.close_now()

    def close_now(self) -> None:
        """Close it whoever is writing."""
        fd, self._fd = self._fd, None
        if fd is not None:
            self._loop.remove_writer(fd)
            os.close(fd)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
