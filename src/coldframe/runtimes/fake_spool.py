"""One stream of a command of the fake runtime, kept in bounded memory."""

from __future__ import annotations

import asyncio
import hashlib

from coldframe.protocol.models import Output, OutputChunk, Stream


class Spool:
    """Head and tail of a stream, `limit` bytes in all, with the total and digest of the whole."""

    def __init__(self, stream: Stream, limit: int) -> None:
        self._stream: Stream = stream
        self._head_limit = limit // 2
        self._tail_limit = limit - limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._digest = hashlib.sha256()
        self._changed = asyncio.Event()
        self.total = 0
        self.eof = False

    def feed(self, data: bytes) -> None:
        """Append what was read from the pipe."""
        self.total += len(data)
        self._digest.update(data)
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > self._tail_limit:
            del self._tail[: len(self._tail) - self._tail_limit]
        self._notify()

    def end(self) -> None:
        """Note that nothing follows."""
        self.eof = True
        self._notify()

    def drop(self) -> None:
        """Forget the kept bytes; totals stay."""
        self._head.clear()
        self._tail.clear()
        self._head_limit = self._tail_limit = 0
        self.end()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def output(self, window: int) -> Output:
        """Return totals, digest and the window: head and tail, half each."""
        kept = self.total - len(self._head) - len(self._tail) == 0
        head_size, tail_size = window // 2, window - window // 2
        if kept and self.total <= window:
            head, tail = bytes(self._head + self._tail), b""
        elif kept:
            whole = self._head + self._tail
            head, tail = bytes(whole[:head_size]), bytes(whole[len(whole) - tail_size :])
        else:
            head = bytes(self._head[:head_size])
            tail = bytes(self._tail[max(0, len(self._tail) - tail_size) :])
        return Output(total_bytes=self.total, sha256=self._digest.hexdigest(), head=head, tail=tail)

    def _chunk(self, cursor: int, max_bytes: int) -> OutputChunk:
        tail_start = self.total - len(self._tail)
        offset = min(cursor, self.total)
        if offset < len(self._head):
            data = bytes(self._head[offset : offset + max_bytes])
        else:
            offset = max(offset, tail_start)
            begin = offset - tail_start
            data = bytes(self._tail[begin : begin + max_bytes])
        return OutputChunk(
            stream=self._stream,
            offset=offset,
            data=data,
            dropped_bytes=max(0, offset - cursor),
            eof=self.eof and offset + len(data) >= self.total,
        )

    async def read(self, cursor: int, max_bytes: int, *, wait: bool) -> OutputChunk:
        """Return bytes from `cursor` on; with `wait`, at least one byte or eof."""
        while True:
            changed = self._changed
            chunk = self._chunk(cursor, max_bytes)
            if chunk.data or chunk.eof or not wait:
                return chunk
            await changed.wait()
