"""The two output streams of one native command, from its first byte to after its end.

While the command (or what it left behind) runs, bytes come from the spool files that the spawner
fills; afterwards from what came with the end.
"""

from __future__ import annotations

import errno
import os

from coldframe.host import forks
from coldframe.host.descriptors import close_all
from coldframe.host.outcome import Undertaking
from coldframe.host.spawner import (
    ExecEnd,
    Execution,
    Progress,
    SpawnerFault,
    StreamEnd,
)
from coldframe.host.spools import first_kept, read_spool, window_ends
from coldframe.protocol.errors import CapacityError, SpawnerLostError
from coldframe.protocol.models import Output

STDOUT, STDERR = 0, 1
_NEVER = (1 << 63) - 1
_EMPTY = Output()


class NativeOutput:
    """Reads by cursor; totals only grow."""

    def __init__(self, execution: Execution, spool_bytes: int) -> None:
        self._execution = execution
        self._spool_bytes = spool_bytes
        self._fds: list[int] = []
        """Of both streams, if at hand; -1: of one that is in `_inline`."""
        self._borrowed = False
        self._inline: list[bytes | None] = [None, None]
        self._totals = [0, 0]
        self._eof = [False, False]
        self._opened = False
        self._opening: Undertaking[None] | None = None
        self._watches: list[Undertaking[None] | None] = [None, None]
        self._closed = False

    @property
    def live(self) -> bool:
        """Whether the spool files are at hand."""
        return bool(self._fds)

    def close(self) -> None:
        """Drop what is kept. Twice is fine."""
        self._closed = True
        fds, self._fds = self._fds, []
        if not self._borrowed:
            close_all(fds)
        self._inline = [b"", b""]

    def abandon(self) -> None:
        """See `forks.Owner`."""
        self.close()

    async def read(
        self, index: int, cursor: int, max_bytes: int, *, wait: bool
    ) -> tuple[int, bytes, bool]:
        """Return (offset, data, whether nothing follows).

        Raises SpawnerFault (the command was not executed), SpawnerLostError.
        """
        await self._open()
        refreshed = False
        while not self._closed:
            inline = self._inline[index]
            if inline is not None:
                offset = min(cursor, len(inline))
                data = inline[offset : offset + max_bytes]
                return offset, data, offset + len(data) == len(inline)
            if cursor < self._totals[index]:
                offset, data, at_end = await self._kept(index, cursor, max_bytes)
                if data or at_end:
                    return offset, data, at_end
                cursor = offset
            elif self._eof[index] or (refreshed and not wait):
                return self._totals[index], b"", self._eof[index]
            elif wait:
                await self._more(index)
            else:
                await self.mark()
                refreshed = True
        return cursor, b"", True

    async def _kept(self, index: int, cursor: int, max_bytes: int) -> tuple[int, bytes, bool]:
        """Read what the spool still has from `cursor` on.

        Without data, the offset says how far there is none: it was overwritten meanwhile, or the
        spool could not be written when its disk was full.
        """
        size, head = self._spool_bytes, self._spool_bytes // 2
        offset = first_kept(size, self._totals[index], cursor)
        stop = min(offset + max_bytes, self._totals[index])
        if offset < head:
            stop = min(stop, head)
        data = read_spool(self._fds[index], size, offset, stop)
        if stop > head and not self._eof[index]:
            await self.mark()
            kept = first_kept(size, self._totals[index], offset)
            data, offset = data[kept - offset :], kept
            stop = max(stop, kept)
        if not data:
            offset = stop
        at_end = self._eof[index] and offset + len(data) == self._totals[index]
        return offset, data, at_end

    async def mark(self) -> tuple[int, int]:
        """Drain the pipes; return the totals, below which everything can be read."""
        try:
            self._note(await self._execution.mark())
        except (SpawnerFault, SpawnerLostError) as error:
            await self._note_end(error)
        return self._totals[STDOUT], self._totals[STDERR]

    async def _more(self, index: int) -> None:
        """Wait with all others that do; who gives up leaves nothing behind with the worker."""
        watch = self._watches[index]
        if watch is None or watch.done():
            watch = self._watches[index] = Undertaking(self._watched(index))
        await watch

    async def _watched(self, index: int) -> None:
        seen = [_NEVER, _NEVER]
        seen[index] = self._totals[index]
        try:
            self._note(await self._execution.watch(seen[0], seen[1]))
        except (SpawnerFault, SpawnerLostError) as error:
            await self._note_end(error)

    def _note(self, progress: Progress) -> None:
        # Answers may overtake each other: totals only grow.
        self._totals[STDOUT] = max(self._totals[STDOUT], progress.stdout_total)
        self._totals[STDERR] = max(self._totals[STDERR], progress.stderr_total)
        self._eof[STDOUT] |= progress.stdout_eof
        self._eof[STDERR] |= progress.stderr_eof

    async def _note_end(self, error: SpawnerFault | SpawnerLostError) -> None:
        """The spawner keeps this exec no more: nothing will be added."""
        if isinstance(error, SpawnerFault) and error.errno != errno.ENOENT:
            raise error
        try:
            end = await self._execution.ended
        except (SpawnerLostError, CapacityError):  # what came with the end is lost
            if not self._fds:
                raise
        else:
            self._adopt(end)
        self._count_late()
        self._eof = [True, True]

    def _count_late(self) -> None:
        """What was left running may have written behind the last totals that were told."""
        for index, fd in enumerate(self._fds):
            if fd < 0:
                continue
            self._totals[index] = max(self._totals[index], os.fstat(fd).st_size)

    # --- where the bytes are ------------------------------------------------------------

    async def _open(self) -> None:
        if self._opened:
            return
        if self._opening is None:
            self._opening = Undertaking(self._find())
        try:
            await self._opening
        except CapacityError:
            self._opening = None  # there may be room the next time
            raise

    async def _find(self) -> None:
        ended = self._execution.ended
        if ended.done() and not ended.result().spooled:
            self._adopt(ended.result())
            return
        try:
            spools = await self._execution.output()
        except (SpawnerFault, SpawnerLostError) as error:
            if isinstance(error, SpawnerFault) and error.errno != errno.ENOENT:
                raise
            self._adopt(await ended)
            return
        if self._closed or self._opened:
            os.close(spools.stdout_fd)
            os.close(spools.stderr_fd)
            return
        self._opened = True
        self._fds = [spools.stdout_fd, spools.stderr_fd]
        forks.own(self)
        self._spool_bytes = spools.progress.spool_bytes
        self._note(spools.progress)

    def _adopt(self, end: ExecEnd) -> None:
        """The spawner tells no more: take what came with the end, if nothing is at hand yet."""
        streams = (end.stdout, end.stderr)
        for index, stream in enumerate(streams):
            self._totals[index] = max(self._totals[index], stream.total)
        self._eof = [True, True]
        if self._opened or self._closed:
            return
        if all(stream.spool_fd is None for stream in streams):
            self._inline = [stream.data or b"" for stream in streams]
            self._opened = True
            return
        # They stay the end's: whoever drops that drops us first.
        self._fds = [-1 if stream.spool_fd is None else stream.spool_fd for stream in streams]
        self._borrowed = True
        self._inline = [stream.data for stream in streams]
        self._opened = True
        self._count_late()

    # --- windows ------------------------------------------------------------------------

    async def window(self, end: ExecEnd, stream: StreamEnd, window_bytes: int) -> Output:
        """Return the window of a stream that lies in a spool, as it was at the command's end."""
        if stream.data is not None or stream.spool_fd is None:
            return whole_window(stream, window_bytes)
        if stream.spool_errno:
            return _head_alone(stream, stream.spool_fd, self._spool_bytes, window_bytes)
        spool, total = self._spool_bytes, stream.total
        head_end, tail_start = window_ends(total, window_bytes, spool)
        data = read_spool(stream.spool_fd, spool, tail_start, total)
        head = read_spool(stream.spool_fd, spool, 0, head_end)
        if end.leftovers and total > spool // 2:
            # What still runs may have written over the ring while we read it.
            index = STDOUT if stream is end.stdout else STDERR
            await self.mark()
            oldest = first_kept(spool, self._totals[index], spool // 2)
            if head_end > spool // 2 and oldest > spool // 2:
                head, data, tail_start = head[: spool // 2], head[spool // 2 :], spool // 2
            if self._totals[index] > spool:
                data = data[max(0, oldest - tail_start) :]
        return Output.model_construct(
            total_bytes=total, sha256=stream.sha256.hex(), head=head, tail=data
        )

    def known(self, index: int, window_bytes: int) -> Output:
        """What is known of a stream whose end nobody will tell any more."""
        if not self._fds:
            return Output.model_construct(total_bytes=0, sha256="", head=b"", tail=b"")
        total = self._totals[index]
        stop = min(total, self._spool_bytes // 2, window_bytes)
        head = read_spool(self._fds[index], self._spool_bytes, 0, stop)
        return Output.model_construct(total_bytes=total, sha256="", head=head, tail=b"")


def _head_alone(stream: StreamEnd, fd: int, spool_bytes: int, window_bytes: int) -> Output:
    """The window of a stream whose spool ran out of disk: of its ring nothing is certain."""
    stop = min(stream.total, spool_bytes // 2, window_bytes)
    head = read_spool(fd, spool_bytes, 0, stop)
    return Output.model_construct(
        total_bytes=stream.total, sha256=stream.sha256.hex(), head=head, tail=b""
    )


def whole_window(stream: StreamEnd, window_bytes: int) -> Output:
    """The window of a stream that came back whole with the end."""
    if not stream.total:
        return _EMPTY
    data = stream.data or b""
    head_end, tail_start = window_ends(len(data), window_bytes, len(data))
    return Output.model_construct(
        total_bytes=stream.total,
        sha256=stream.sha256.hex(),
        head=data[:head_end],
        tail=data[tail_start:],
    )
