"""Content that a caller gives to be written: bytes, text, file objects, iterables."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from functools import partial
from typing import BinaryIO, Protocol, TypeAlias, cast

from coldframe.protocol.errors import InvalidRequestError
from coldframe.protocol.pieces import PIECE_BYTES, close_source, pieces_of
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


class Pieces(AsyncIterator[bytes]):
    """Content on its way, piece by piece."""

    repeats = False
    """Whether it may be read again from where it began."""

    async def rewind(self) -> bool:
        """Go back to where it began; False: that cannot be done after all."""
        return False


class SyncSource:
    """A file object or an iterable, read in the thread of whoever asks. Raises as `sync_pieces`."""

    def __init__(self, content: object) -> None:
        self._content = content
        self._begin = _place(content)
        self._pieces = sync_pieces(content)
        self.repeats = self._begin is not None or _repeats(content)

    def read(self) -> bytes | None:
        """Return the next piece; None: there is none."""
        return next(self._pieces, None)

    def rewind(self) -> bool:
        """See `Pieces.rewind`."""
        if self._begin is not None:
            try:
                cast(BinaryIO, self._content).seek(self._begin)
            except (OSError, ValueError):
                return False
        self._pieces = sync_pieces(self._content)
        return True


def _place(content: object) -> int | None:
    """Return where a file stands that can be read from there again."""
    if not callable(getattr(content, "read", None)):
        return None
    file = cast(BinaryIO, content)
    try:
        return file.tell() if file.seekable() else None
    except (AttributeError, OSError, ValueError):
        return None


def _repeats(content: object) -> bool:
    """Whether each iteration of it begins anew."""
    if callable(getattr(content, "read", None)):
        return False
    return isinstance(content, Iterable) and not isinstance(content, Iterator)


class Repeated(Pieces):
    """What an asynchronous iterator gives that can be had anew."""

    repeats = True

    def __init__(self, begin: Callable[[], AsyncIterator[bytes]]) -> None:
        self._begin, self._source = begin, begin()

    async def __anext__(self) -> bytes:
        return await anext(self._source)

    async def rewind(self) -> bool:
        """See `Pieces`."""
        await self.aclose()
        self._source = self._begin()
        return True

    async def aclose(self) -> None:
        """Let what it comes from go."""
        await close_source(self._source)


async def _checked(content: AsyncIterable[object]) -> AsyncIterator[bytes]:
    async for piece in content:
        yield checked_piece(piece)


class _Given(Pieces):
    """What an asynchronous iterator of the caller's gives."""

    def __init__(self, source: AsyncIterator[object]) -> None:
        self._source = source

    async def __anext__(self) -> bytes:
        return checked_piece(await anext(self._source))


class _Read(Pieces):
    """What a file object or iterable gives; the former is read in a thread."""

    def __init__(self, content: object) -> None:
        self._source = SyncSource(content)
        self.repeats = self._source.repeats
        self._in_thread = callable(getattr(content, "read", None))
        self._reading: asyncio.Future[bytes | None] | None = None

    async def __anext__(self) -> bytes:
        if self._in_thread:
            self._reading = asyncio.ensure_future(asyncio.to_thread(self._source.read))
            piece = await asyncio.shield(self._reading)
        else:
            piece = self._source.read()
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def rewind(self) -> bool:
        """See `Pieces`."""
        if self._reading is not None:  # whoever asked for it may not have waited
            await asyncio.wait({self._reading})
        return self._source.rewind()


def async_pieces(content: object) -> Pieces:
    """Return any content piece by piece; file objects are read in a thread.

    It raises InvalidRequestError when it is read, if it is no content.
    """
    data = whole_bytes(content)
    if data is not None:
        return Repeated(partial(pieces_of, data))
    if isinstance(content, AsyncIterator):
        return _Given(content)
    if isinstance(content, AsyncIterable):
        return Repeated(partial(_checked, content))
    return _Read(content)
