"""Follow a command's two streams as one, from cursors on, until the command has ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Protocol

from coldframe.protocol.models import ExecResult, OutputChunk, Stream

READ_BYTES = 1 << 18
"""How much one read of output asks for."""


class Readable(Protocol):
    """Where output is read."""

    async def read_output(
        self, operation_id: str, stream: Stream, cursor: int, max_bytes: int, wait: bool, /
    ) -> OutputChunk: ...


class OutputSource(Readable, Protocol):
    """Where the end is learnt too: a node, or a link to one."""

    async def wait_exec(self, operation_id: str, /) -> ExecResult: ...


async def merged(
    source: OutputSource, operation_id: str, cursors: Mapping[Stream, int] | None = None
) -> AsyncGenerator[OutputChunk, None]:
    """Yield stdout and stderr as they come, until the command has ended and all is read.

    Ends with the command, whoever still holds its pipes. Each stream is read at most one
    chunk ahead of the caller.
    """
    at: dict[Stream, int] = {"stdout": 0, "stderr": 0, **(cursors or {})}
    reads = {stream: _reading(source, operation_id, stream, at[stream]) for stream in at}
    ended = asyncio.ensure_future(source.wait_exec(operation_id))
    try:
        while reads and not ended.done():
            await asyncio.wait({*reads.values(), ended}, return_when=asyncio.FIRST_COMPLETED)
            for stream, read in list(reads.items()):
                if not read.done():
                    continue
                chunk = read.result()
                at[stream] = chunk.next_cursor
                if chunk.data or chunk.dropped_bytes:
                    yield chunk
                if chunk.eof:
                    del reads[stream]
                else:
                    reads[stream] = _reading(source, operation_id, stream, at[stream])
        result = await ended
    finally:
        await _cancel({*reads.values(), ended})
    totals: dict[Stream, int] = {
        "stdout": result.out.total_bytes,
        "stderr": result.err.total_bytes,
    }
    for stream, end in totals.items():
        async for chunk in between(source, operation_id, stream, at[stream], end):
            yield chunk


async def between(
    source: Readable, operation_id: str, stream: Stream, cursor: int, end: int
) -> AsyncIterator[OutputChunk]:
    """Yield what lies from `cursor` up to `end`; all of it is in the spool or dropped."""
    while cursor < end:
        wanted = min(READ_BYTES, end - cursor)
        chunk = await source.read_output(operation_id, stream, cursor, wanted, False)
        if chunk.offset >= end or chunk.next_cursor == cursor:
            yield OutputChunk(stream=stream, offset=end, data=b"", dropped_bytes=end - cursor)
            return
        cursor = chunk.next_cursor
        yield chunk


def _reading(
    source: OutputSource, operation_id: str, stream: Stream, cursor: int
) -> asyncio.Task[OutputChunk]:
    return asyncio.ensure_future(_read(source, operation_id, stream, cursor))


async def _read(
    source: OutputSource, operation_id: str, stream: Stream, cursor: int
) -> OutputChunk:
    return await source.read_output(operation_id, stream, cursor, READ_BYTES, True)


async def _cancel(tasks: set[asyncio.Task[OutputChunk] | asyncio.Task[ExecResult]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
