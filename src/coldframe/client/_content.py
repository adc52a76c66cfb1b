"""Content that a caller gives to be written: bytes, text, file objects, iterables."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from typing import Protocol, TypeAlias

from coldframe.protocol.errors import InvalidRequestError
from coldframe.protocol.pieces import PIECE_BYTES, pieces_of
from coldframe.protocol.text import encoded


class Readable(Protocol):
    """A file object opened for reading bytes."""

    def read(self, size: int, /) -> bytes: ...


Content: TypeAlias = bytes | bytearray | memoryview | str | Readable | Iterable[bytes]
"""Text is written as UTF-8; file objects and iterables are read piece by piece."""

AsyncContent: TypeAlias = Content | AsyncIterable[bytes]
"""Content, or an asynchronous iterable of bytes."""


def whole_bytes(content: object) -> bytes | None:
    """Return the bytes of a content that is in memory already, else None.

    Raises:
        InvalidRequestError: it is text that cannot be encoded.
    """
    if isinstance(content, str):
        return encoded(content, "the content")
    if isinstance(content, bytes | bytearray | memoryview):
        return bytes(content)
    return None


def checked_piece(piece: object) -> bytes:
    """Return a piece as bytes.

    Raises:
        InvalidRequestError: it is not bytes-like (text is refused: its encoding is not known).
    """
    if isinstance(piece, bytes):
        return piece
    if isinstance(piece, bytearray | memoryview):
        return bytes(piece)
    raise InvalidRequestError(f"content gave {type(piece).__name__}, not bytes: open in mode 'rb'")


def sync_pieces(content: object) -> Iterator[bytes]:
    """Iterate a file object or iterable in pieces, in the thread of who iterates.

    Raises:
        InvalidRequestError: it is neither, or gives something else than bytes.
    """
    read = getattr(content, "read", None)
    if callable(read):
        while piece := read(PIECE_BYTES):
            yield checked_piece(piece)
    elif isinstance(content, Iterable):
        for piece in content:
            yield checked_piece(piece)
    else:
        raise InvalidRequestError(
            f"content: cannot write a {type(content).__name__}: not bytes or text"
        )


async def async_pieces(content: object) -> AsyncIterator[bytes]:
    """Yield any content piece by piece; file objects are read in a thread.

    Raises:
        InvalidRequestError: it is no content.
    """
    data = whole_bytes(content)
    if data is not None:
        async for piece in pieces_of(data):
            yield piece
        return
    if isinstance(content, AsyncIterable):
        async for piece in content:
            yield checked_piece(piece)
        return
    source = sync_pieces(content)
    if not callable(getattr(content, "read", None)):
        for piece in source:
            yield piece
        return
    while (piece_read := await asyncio.to_thread(next, source, None)) is not None:
        yield piece_read
