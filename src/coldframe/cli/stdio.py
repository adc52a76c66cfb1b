"""Tie a command in a sandbox to this process's own standard streams and signals."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import stat
import struct
import termios
import tty
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from coldframe.protocol.errors import ColdframeError

if TYPE_CHECKING:
    from coldframe.client import AsyncProcess

STDIN, STDOUT, STDERR = 0, 1, 2
_PIECE = 64 * 1024
_DEFAULT_SIZE = (24, 80)


class StdoutClosedError(BrokenPipeError):
    """Nobody reads our output any more."""


def stdin_kind() -> str:
    """Return `terminal`, `stream` (something to pass on) or `closed`."""
    try:
        mode = os.fstat(STDIN).st_mode
    except OSError:
        return "closed"
    if os.isatty(STDIN):
        return "terminal"
    return "closed" if stat.S_ISCHR(mode) and not _readable_device() else "stream"


def _readable_device() -> bool:
    return os.fstat(STDIN).st_rdev != Path(os.devnull).stat().st_rdev


def terminal_size() -> tuple[int, int]:
    """Return (rows, columns) of our terminal, or 24 × 80."""
    for fd in (STDIN, STDOUT, STDERR):
        try:
            packed = fcntl.ioctl(fd, termios.TIOCGWINSZ, bytes(8))
        except OSError:
            continue
        rows, cols, _, _ = struct.unpack("HHHH", packed)
        if rows and cols:
            return rows, cols
    return _DEFAULT_SIZE


def terminal_kind() -> str:
    """Return what programs call the kind of our terminal."""
    return os.environ.get("TERM") or "dumb"


@contextlib.contextmanager
def raw_terminal() -> Iterator[None]:
    """Pass every key on as it is pressed; restore the terminal whatever happens."""
    if not os.isatty(STDIN):
        yield
        return
    before = termios.tcgetattr(STDIN)
    tty.setraw(STDIN, termios.TCSADRAIN)  # keys that were pressed early count
    try:
        yield
    finally:
        termios.tcsetattr(STDIN, termios.TCSADRAIN, before)


async def pass_stdin(process: AsyncProcess) -> None:
    """Copy our stdin to the command's until either ends."""
    try:
        while data := await _read_stdin():
            await process.write_stdin(data)
        await process.close_stdin()
    except (BrokenPipeError, ColdframeError):
        # The command does not read any more, or has ended: how it ended says the rest.
        return


async def _read_stdin() -> bytes:
    """Wait for input without blocking the loop; files are always ready, pipes are polled."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    try:
        loop.add_reader(STDIN, ready.set_result, None)
    except OSError:  # epoll takes no regular files
        return await asyncio.to_thread(os.read, STDIN, _PIECE)
    try:
        await ready
    finally:
        loop.remove_reader(STDIN)
    return os.read(STDIN, _PIECE)


async def pass_output(process: AsyncProcess, *, kill: bool = True) -> dict[str, int]:
    """Copy the command's output to ours as it comes; return the bytes lost per stream.

    Raises:
        StdoutClosedError: the reader of our output has gone; the command has been killed, unless
            it is not ours to `kill`.
    """
    lost: dict[str, int] = {}
    try:
        async for chunk in process.output():
            if chunk.dropped_bytes:
                lost[chunk.stream] = lost.get(chunk.stream, 0) + chunk.dropped_bytes
            fd = STDERR if chunk.stream == "stderr" else STDOUT
            await asyncio.to_thread(_write_all, fd, chunk.data)
    except BrokenPipeError as error:
        if kill:
            await process.kill()
        raise StdoutClosedError(*error.args) from error
    return lost


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


@contextlib.contextmanager
def forwarded_signals(process: AsyncProcess) -> Iterator[None]:
    """Hand SIGINT, SIGTERM, SIGHUP and SIGQUIT to the command; a second one kills its tree.

    A changed window size is handed on too.
    """
    loop = asyncio.get_running_loop()
    sent: set[int] = set()
    tasks: set[asyncio.Task[None]] = set()

    def begin(number: int) -> None:
        again = number in sent
        sent.add(number)
        keep(_send(process, None if again else number))

    def resize() -> None:
        keep(_resize(process))

    def keep(work: Coroutine[None, None, None]) -> None:
        task = loop.create_task(work)
        tasks.add(task)  # the loop itself holds tasks weakly
        task.add_done_callback(tasks.discard)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    for number in numbers:
        loop.add_signal_handler(number, begin, number)
    loop.add_signal_handler(signal.SIGWINCH, resize)
    try:
        yield
    finally:
        for number in (*numbers, signal.SIGWINCH):
            loop.remove_signal_handler(number)


async def _send(process: AsyncProcess, number: int | None) -> None:
    with contextlib.suppress(ColdframeError):  # it has ended meanwhile
        if number is None:
            await process.kill()
        else:
            await process.signal(number)


async def _resize(process: AsyncProcess) -> None:
    with contextlib.suppress(ColdframeError):  # no terminal, or ended meanwhile
        await process.resize(*terminal_size())
