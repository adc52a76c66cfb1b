"""Pipes to and from a command that never make the host wait or hoard: stdin and status.

Both belong to the running event loop. Where commands outlive this process, the next one goes on
with their descriptors: so what it needs lies in these, not in memory.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections import deque

from coldframe.host import forks, syscalls

_READ_BYTES = 64 << 10
_PIPE_BYTES = 64 << 10
_PAGE = 4096
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
STATUS_KEPT_BYTES = 1 << 20
STATUS_NAMES = ("status", "status_kept")


class CommandPipes:
    """The pipes of one command: our ends as streams, its ends as descriptors to pass on."""

    def __init__(self) -> None:
        self.stdin: int | None = None
        """What the command reads."""
        self.status_end: int | None = None
        """What the command writes its status to."""
        self.feed: StdinFeed | None = None
        self.status: StatusStream | None = None
        self._theirs: list[int] = []

    @classmethod
    def for_request(
        cls, *, stdin: bytes | None, stdin_open: bool, status: bool, outlive: bool = False
    ) -> CommandPipes:
        """Make what is asked for; stdin that does not fit a pipe goes in the background.

        With `outlive` it is a file instead, unless it is to stay open.
        """
        pipes = cls()
        try:
            if outlive and not stdin_open and len(stdin or b"") > _PIPE_BYTES:
                pipes._open_file(stdin or b"")
            elif stdin is not None or stdin_open:
                pipes._open_stdin(stdin or b"", stdin_open)
            if status:
                reading, writing = os.pipe2(os.O_CLOEXEC)
                pipes._theirs.append(writing)
                pipes.status_end = writing
                pipes.status = StatusStream(reading)
        except BaseException:
            pipes.close()
            pipes.close_theirs()
            raise
        return pipes

    def _open_stdin(self, data: bytes, stay_open: bool) -> None:
        self.stdin, writing = os.pipe2(os.O_CLOEXEC)
        self._theirs.append(self.stdin)
        self.feed = StdinFeed(writing)
        if data:
            self.feed.give(data)
        if not stay_open:
            self.feed.end()

    def _open_file(self, data: bytes) -> None:
        with open(_memory_file("stdin"), "wb", closefd=False) as file:
            self.stdin = file.fileno()
            self._theirs.append(self.stdin)
            file.write(data)
        os.lseek(self.stdin, 0, os.SEEK_SET)
        os.fchmod(self.stdin, 0o444)
        fcntl.fcntl(self.stdin, fcntl.F_ADD_SEALS, _SEALS)

    @property
    def kept_status(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Names and descriptors of what another process needs to go on with the status pipe."""
        return ((), ()) if self.status is None else (STATUS_NAMES, self.status.filenos())

    def close_theirs(self) -> None:
        """Close the command's ends, once they were passed on. Twice is fine."""
        while self._theirs:
            os.close(self._theirs.pop())

    def close(self) -> None:
        """Close our ends: there will be no command."""
        if self.feed is not None:
            self.feed.close()
        if self.status is not None:
            self.status.close()


def _memory_file(name: str) -> int:
    return os.memfd_create(f"coldframe-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


class StdinFeed:
    """The writing end of a command's stdin: a pipe, or the master of its terminal."""

    def __init__(self, fd: int) -> None:
        """Takes the descriptor over."""
        self._loop = asyncio.get_running_loop()
        self._fd = fd
        self._queue: deque[tuple[memoryview, asyncio.Future[None] | None]] = deque()
        self._closing = False
        os.set_blocking(fd, False)
        forks.own(self)

    def fileno(self) -> int:
        """Its descriptor."""
        return self._fd

    @property
    def open(self) -> bool:
        """Whether bytes can still be given."""
        return self._fd >= 0 and not self._closing

    def give(self, data: bytes) -> None:
        """Write in the background, as fast as the command reads."""
        self._enqueue(data, None)

    async def write(self, data: bytes) -> None:
        """Return when all of `data` is in the pipe.

        Raises BrokenPipeError when nobody reads any more. A cancelled write may have written
        a part, and writes no more.
        """
        if not self.open:
            raise BrokenPipeError("stdin is closed")
        done: asyncio.Future[None] = self._loop.create_future()
        self._enqueue(data, done)
        await done

    def end(self) -> None:
        """Give end of file behind what is queued. Twice is fine."""
        self._closing = True
        if not self._queue:
            self.close()

    def close(self) -> None:
        """Close at once; whoever still writes gets BrokenPipeError. Twice is fine."""
        if self._fd < 0:
            return
        self._loop.remove_writer(self._fd)
        os.close(self._fd)
        self._fd = -1
        while self._queue:
            _, done = self._queue.popleft()
            if done is not None and not done.done():
                done.set_exception(BrokenPipeError("nobody reads the command's stdin"))

    def abandon(self) -> None:
        """See `forks.Owner`."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _enqueue(self, data: bytes, done: asyncio.Future[None] | None) -> None:
        self._queue.append((memoryview(data), done))
        if len(self._queue) == 1:
            self._writable()
            if self._queue and self._fd >= 0:
                self._loop.add_writer(self._fd, self._writable)

    def _writable(self) -> None:
        try:
            while self._queue:
                data, done = self._queue[0]
                if done is not None and done.done():  # cancelled
                    self._queue.popleft()
                    continue
                while data:
                    data = data[os.write(self._fd, data) :]
                    self._queue[0] = (data, done)
                self._queue.popleft()
                if done is not None:
                    done.set_result(None)
        except BlockingIOError:
            return
        except OSError:  # EPIPE; EIO of a terminal that has hung up
            self.close()
            return
        if self._closing:
            self.close()
        else:
            self._loop.remove_writer(self._fd)


class StatusStream:
    """The reading end of a command's status pipe: read all the time, its last MiB kept.

    What comes is moved by the kernel from the pipe to the end of a file in memory, whose length so
    is what has come, whenever this process dies; its beginning is given back.
    """

    def __init__(self, fd: int, kept: int | None = None) -> None:
        """Take the pipe over, and the file that another process has put something into."""
        self._loop = asyncio.get_running_loop()
        self._fd, self._kept = fd, _memory_file("status") if kept is None else kept
        self._changed = asyncio.Event()
        self.total = os.fstat(self._kept).st_size
        self._given_back = 0
        self.eof = False
        os.set_blocking(fd, False)
        self._loop.add_reader(fd, self._readable)
        forks.own(self)

    def filenos(self) -> tuple[int, int]:
        """The pipe and the file, as long as it was not closed."""
        return self._fd, self._kept

    async def read(self, cursor: int, max_bytes: int, *, wait: bool) -> tuple[int, bytes, bool]:
        """Return (offset, data, whether nothing follows); with `wait`, a byte or the end."""
        while True:
            changed = self._changed
            start = max(0, self.total - STATUS_KEPT_BYTES)
            offset = max(min(cursor, self.total), start)
            data = b"" if self._kept < 0 else os.pread(self._kept, max_bytes, offset)
            at_end = self.eof and offset + len(data) == self.total
            if data or at_end or not wait:
                return offset, data, at_end
            await changed.wait()

    def drain(self) -> None:
        """Take in what has arrived, now."""
        if self._fd >= 0:
            self._readable()

    def close(self) -> None:
        """Stop reading, and keep nothing. Twice is fine."""
        self._end()
        kept, self._kept = self._kept, -1
        if kept >= 0:
            self.total = 0
            os.close(kept)

    def abandon(self) -> None:
        """See `forks.Owner`."""
        for fd in (self._fd, self._kept):
            if fd >= 0:
                os.close(fd)
        self._fd = self._kept = -1

    def _end(self) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
            self.eof = True
            self._notify()

    def _readable(self) -> None:
        try:
            moved = os.splice(
                self._fd,
                self._kept,
                _READ_BYTES,
                offset_dst=self.total,
                flags=os.SPLICE_F_NONBLOCK,
            )
        except BlockingIOError:
            return
        if not moved:
            self._end()
            return
        self.total += moved
        old = (self.total - STATUS_KEPT_BYTES) // _PAGE * _PAGE
        if old - self._given_back >= STATUS_KEPT_BYTES:
            syscalls.punch_hole(self._kept, self._given_back, old - self._given_back)
            self._given_back = old
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
