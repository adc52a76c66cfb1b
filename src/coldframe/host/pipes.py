"""Pipes to and from a command that never make the host wait or hoard: stdin and status.

Both belong to the running event loop.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque

from coldframe.host import forks

_READ_BYTES = 64 << 10
STATUS_KEPT_BYTES = 1 << 20
STATUS_FD = 3


class CommandPipes:
    """The pipes of one command: our ends as streams, its ends as descriptors to pass on."""

    def __init__(self) -> None:
        self.stdin: int | None = None
        """What the command reads."""
        self.extra: tuple[tuple[int, int], ...] = ()
        """(number in the command, descriptor) pairs."""
        self.feed: StdinFeed | None = None
        self.status: StatusStream | None = None
        self._theirs: list[int] = []

    @classmethod
    def for_request(cls, *, stdin: bytes | None, stdin_open: bool, status: bool) -> CommandPipes:
        """Make what is asked for; stdin that does not fit a pipe goes in the background."""
        pipes = cls()
        try:
            if stdin is not None or stdin_open:
                pipes._open_stdin(stdin or b"", stdin_open)
            if status:
                reading, writing = os.pipe2(os.O_CLOEXEC)
                pipes._theirs.append(writing)
                pipes.extra = ((STATUS_FD, writing),)
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
    """The reading end of a command's status pipe: read all the time, its last MiB kept."""

    def __init__(self, fd: int) -> None:
        """Takes the descriptor over."""
        self._loop = asyncio.get_running_loop()
        self._fd = fd
        self._kept = bytearray()
        self._changed = asyncio.Event()
        self.total = 0
        self.eof = False
        os.set_blocking(fd, False)
        self._loop.add_reader(fd, self._readable)
        forks.own(self)

    async def read(self, cursor: int, max_bytes: int, *, wait: bool) -> tuple[int, bytes, bool]:
        """Return (offset, data, whether nothing follows); with `wait`, a byte or the end."""
        while True:
            changed = self._changed
            start = self.total - len(self._kept)
            offset = max(min(cursor, self.total), start)
            data = bytes(self._kept[offset - start : offset - start + max_bytes])
            at_end = self.eof and offset + len(data) == self.total
            if data or at_end or not wait:
                return offset, data, at_end
            await changed.wait()

    def drain(self) -> None:
        """Take in what has arrived, now."""
        if self._fd >= 0:
            self._readable()

    def close(self) -> None:
        """Stop reading. Twice is fine."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
            self.eof = True
            self._notify()

    def abandon(self) -> None:
        """See `forks.Owner`."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _readable(self) -> None:
        try:
            data = os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self.close()
            return
        self.total += len(data)
        self._kept += data
        if len(self._kept) > 2 * STATUS_KEPT_BYTES:
            del self._kept[:-STATUS_KEPT_BYTES]
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
