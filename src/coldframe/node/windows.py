"""Keep the head and the tail of a stream, its length and its digest, in bounded memory."""

from __future__ import annotations

import hashlib

from coldframe.protocol.models import Output, OutputChunk


class Window:
    """The output of one command of a session, built from chunks in order."""

    def __init__(self, window_bytes: int) -> None:
        self._limit = window_bytes
        self._head_limit = (window_bytes + 1) // 2
        self._head, self._tail = bytearray(), bytearray()
        self._digest = hashlib.sha256()
        self._total = 0
        self._whole = True

    def add(self, chunk: OutputChunk) -> None:
        """Take the next chunk. What the spool had dropped makes the digest unknown."""
        if chunk.dropped_bytes:
            self._whole = False
            self._total += chunk.dropped_bytes
            self._spill(b"")
        self._total += len(chunk.data)
        self._digest.update(chunk.data)
        self._spill(chunk.data)

    def _spill(self, data: bytes) -> None:
        if self._whole and self._total <= self._limit:
            self._head += data
            return
        rest = bytes(self._head[self._head_limit :]) + data
        room = self._head_limit - len(self._head)
        if self._whole and room > 0:
            self._head += data[:room]
            rest = data[room:]
        del self._head[self._head_limit :]
        self._tail += rest
        keep = self._limit - self._head_limit
        if len(self._tail) > keep:
            del self._tail[: len(self._tail) - keep]

    def output(self) -> Output:
        """Return what was kept."""
        return Output(
            total_bytes=self._total,
            sha256=self._digest.hexdigest() if self._whole else "",
            head=bytes(self._head),
            tail=bytes(self._tail),
        )
