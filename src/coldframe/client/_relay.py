"""Join two byte streams, so that a synchronous caller gets an ordinary socket."""

from __future__ import annotations

import asyncio
import contextlib


async def relay(
    left_reader: asyncio.StreamReader,
    left_writer: asyncio.StreamWriter,
    right_reader: asyncio.StreamReader,
    right_writer: asyncio.StreamWriter,
) -> None:
    """Copy both ways until both have ended; an end of one way is passed on at once."""
    try:
        await asyncio.gather(_copy(left_reader, right_writer), _copy(right_reader, left_writer))
    finally:
        for writer in (left_writer, right_writer):
            writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    # A peer that is gone ends its way; the other way may still have something to say.
    with contextlib.suppress(ConnectionError):
        while piece := await reader.read(1 << 16):
            writer.write(piece)
            await writer.drain()
    with contextlib.suppress(OSError):
        if writer.can_write_eof():
            writer.write_eof()
