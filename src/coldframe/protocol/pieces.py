"""Contents on their way, piece by piece."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

PIECE_BYTES = 1 << 20


async def pieces_of(data: bytes) -> AsyncIterator[bytes]:
    """Yield bytes in pieces of at most 1 MiB."""
    if len(data) <= PIECE_BYTES:
        if data:
            yield data
        return
    view = memoryview(data)
    for start in range(0, len(view), PIECE_BYTES):
        yield bytes(view[start : start + PIECE_BYTES])


async def close_source(source: AsyncIterator[Any]) -> None:
    """Close an asynchronous generator; other iterators have nothing to close."""
    aclose = getattr(source, "aclose", None)
    if aclose is not None:
        await aclose()
