"""What the shell of a session reports by its status pipe, line by line."""

from __future__ import annotations

import asyncio
from typing import Any

from coldframe.node import shellscript
from coldframe.node.execs import Execs
from coldframe.protocol.models import OutputChunk

_LINE_BYTES = 4096
Report = tuple[bytes, bytes]
"""The nonce of what was asked, and what was told."""


class Reports:
    """Of one shell, read in order by one task at a time."""

    def __init__(self, execs: Execs, shell_id: str, end: asyncio.Future[None]) -> None:
        """`end` is done when the shell has ended."""
        self._execs, self._shell_id, self._end = execs, shell_id, end
        self._at = 0
        self._lines = b""
        self.over = False
        """Whether nothing can report any more: the shell has ended, or is another program now."""

    async def next_or_end(self, *nonces: bytes) -> Report | None:
        """As `next`; where nothing reports any more, return once the shell has ended."""
        told = await self.next(*nonces)
        if told is None:
            self.over = True
            await asyncio.wait({self._end})
        return told

    async def next(self, *nonces: bytes) -> Report | None:
        """Return what is reported under one of these, or None: nothing reports any more."""
        while True:
            while b"\n" in self._lines:
                line, _, self._lines = self._lines.partition(b"\n")
                nonce, _, told = line.partition(b" ")
                if nonce in nonces and shellscript.is_report(told):
                    return nonce, told
            chunk = await self._chunk()
            if chunk is None or not chunk.data:
                return None
            self._at = chunk.next_cursor
            self._lines = (self._lines + chunk.data)[-_LINE_BYTES:]

    async def _chunk(self) -> OutputChunk | None:
        """Return what was reported next, of a shell that has ended what is there; None: nothing."""
        end = self._end
        read = asyncio.ensure_future(
            self._execs.read(self._shell_id, "status", self._at, _LINE_BYTES, not end.done())
        )
        try:
            waits: set[asyncio.Future[Any]] = {read, end}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if end.done() and not read.done():
                return None
            return read.result()
        finally:
            await stop(read)


async def stop(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel tasks that have not ended, and wait until they have."""
    for task in tasks:
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait({task})
