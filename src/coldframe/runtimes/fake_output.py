"""What one command of the fake runtime writes: its pipes, read into spools."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping

from coldframe.protocol.errors import InvalidRequestError
from coldframe.protocol.models import ExecRequest, Output, OutputChunk, Stream
from coldframe.runtimes.fake_spool import Spool

_READ = 1 << 18
_STATUS_BYTES = 2 << 20
"""Of these the second half is the newest."""
_PIPE_MAX = 1 << 20
"""More than a pipe or a terminal holds."""


class FakeOutput:
    """Belongs to the event loop that it was made on."""

    def __init__(self, request: ExecRequest, grown: Callable[[], None]) -> None:
        """`grown` is told of everything that is read."""
        self._loop, self._grown = asyncio.get_running_loop(), grown
        self._spools: dict[Stream, Spool] = {
            "stdout": Spool("stdout", request.spool_bytes),
            "stderr": Spool("stderr", request.spool_bytes),
        }
        if request.status_pipe:
            self._spools["status"] = Spool("status", _STATUS_BYTES)
        self._readers: dict[int, Spool] = {}

    def watch(self, outputs: Mapping[Stream, int]) -> None:
        """Read from now on from these descriptors, which are taken over."""
        for name, fd in outputs.items():
            self._readers[fd] = self._spools[name]
            self._loop.add_reader(fd, self._read, fd)
        if "stderr" not in outputs:
            self._spools["stderr"].end()

    def _read(self, fd: int) -> int:
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
            self._end(fd)
            return 0
        spool.feed(data)
        self._grown()
        return len(data)

    def drain(self) -> None:
        """Read what is in the pipes at this moment, however fast somebody goes on writing."""
        for fd in list(self._readers):
            left = _PIPE_MAX
            while left > 0 and (count := self._read(fd)):
                left -= count

    def _end(self, fd: int) -> None:
        spool = self._readers.pop(fd, None)
        if spool is not None:
            self._loop.remove_reader(fd)
            os.close(fd)
            spool.end()

    @property
    def totals(self) -> tuple[int, int]:
        """Bytes of stdout and stderr so far."""
        return self._spools["stdout"].total, self._spools["stderr"].total

    def window(self, stream: Stream, size: int) -> Output:
        """Return head and tail of a stream."""
        return self._spools[stream].output(size)

    async def read(self, stream: Stream, cursor: int, max_bytes: int, *, wait: bool) -> OutputChunk:
        """See `RunningExec.read`."""
        if stream not in self._spools:
            raise InvalidRequestError(f"stream {stream!r} needs a request with status_pipe")
        return await self._spools[stream].read(cursor, max_bytes, wait=wait)

    def drop(self) -> None:
        """Keep nothing of it any more."""
        for spool in self._spools.values():
            spool.drop()

    def close(self) -> None:
        """Give back every descriptor; what was kept stays readable."""
        for fd in list(self._readers):
            self._end(fd)
