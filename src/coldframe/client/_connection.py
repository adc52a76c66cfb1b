"""One connection of the SDK's: an answer that comes in one piece is taken so, others are read.

Most answers do. A stream reader, its buffer and a timeout of its own take a third of what the SDK
spends on a command.
"""

from __future__ import annotations

import asyncio
import functools
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from coldframe.protocol import places, wire

_PIECE = 1 << 18
_BUFFER = 1 << 20
_IDLE_S = 60.0
"""Connections that did nothing for longer are not used again: the service may be closing them."""
_COMMON = 512
"""Heads up to so many bytes are kept: the next answer has the same, but for a length perhaps."""


@dataclass(frozen=True)
class Address:
    """Where a service is."""

    host: str
    port: int = 0
    unix: Path | None = None
    tls: bool = False

    def __str__(self) -> str:
        if self.unix is not None:
            return f"unix:{self.unix}"
        return f"{'https' if self.tls else 'http'}://{self.authority}"

    @property
    def authority(self) -> str:
        """For the Host header."""
        if self.unix is not None:
            return "localhost"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass
class Head:
    """How an answer begins."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case; of several of one name the last."""
    lines: Sequence[str]
    """All of them, as they came."""


@dataclass
class Answer(Head):
    """An answer whose body is in memory."""

    body: bytes


class Connection(asyncio.StreamReaderProtocol):
    """A connection to a service; `open_connection` makes one."""

    writer: asyncio.StreamWriter

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.reader = asyncio.StreamReader(limit=_BUFFER, loop=self._loop)
        super().__init__(self.reader, loop=self._loop)
        self._idle_since: float | None = None
        self._is_read = False
        """Whether the reader has something of the answer, or the end of the connection."""
        self._ended = False
        """Whether nothing more comes."""
        self._first: asyncio.Future[Answer | None] | None = None
        """Gets the answer if it comes whole; None: it is to be read."""
        self._until = 0.0
        self._timer: asyncio.TimerHandle | None = None
        """Comes no later than `_until`, and stays: most answers come long before."""

    async def answer(self, request: bytes, method: str, within_s: float | None) -> Answer:
        """Send a request and return its answer, body included.

        Raises:
            OSError, EOFError, ValueError, asyncio.LimitOverrunError: there is none, or not
                `within_s`, or it is no HTTP.
        """
        until = None if within_s is None else self._loop.time() + within_s
        self.writer.write(request)
        whole = None if self._is_read else await self._at_once(until)
        if whole is not None:
            return whole
        async with asyncio.timeout_at(until):
            head = await read_head(self.reader)
            body = await _body(self.reader, method, head)
        return Answer(head.status, head.headers, head.lines, body)

    async def _at_once(self, until: float | None) -> Answer | None:
        self._first = self._loop.create_future()
        if until is not None:
            self._watch(until)
        try:
            return await self._first
        finally:
            self._first = None

    def close(self) -> None:
        """End it; nothing more is sent."""
        self.writer.transport.abort()

    def rest(self) -> None:
        """Its answer is whole, and nothing else is asked by it for now."""
        self._is_read = False
        self._idle_since = monotonic()

    def wake(self) -> bool:
        """Use it again; False: it can no longer be relied upon."""
        since, self._idle_since = self._idle_since, None
        stale = since is None or monotonic() - since > _IDLE_S
        return not (stale or self._ended or self.writer.is_closing())

    # --- what the event loop calls -----------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Take an answer that is whole; keep anything else to be read."""
        first = self._first
        if self._idle_since is not None:
            self.close()  # nobody has asked for it
        elif first is None or self._is_read:
            super().data_received(data)
            self._is_read = True
        elif first.done():
            self.close()  # nor for more than the whole
        elif (whole := _whole(data)) is not None:
            first.set_result(whole)
        else:
            super().data_received(data)
            self._read_on()

    def eof_received(self) -> bool | None:
        """Let whoever waits see that there is no more."""
        self._ended = True
        self._read_on()
        return super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """Let whoever waits see why."""
        self._ended = True
        self._read_on()
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def _read_on(self) -> None:
        self._is_read = True
        if self._first is not None and not self._first.done():
            self._first.set_result(None)

    def _watch(self, until: float) -> None:
        self._until = until
        if self._timer is not None and self._timer.when() > until:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = self._loop.call_at(until, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._first is None or self._first.done():
            return
        if self._loop.time() < self._until:
            self._watch(self._until)
        else:
            self._first.set_exception(TimeoutError())


async def open_connection(address: Address, tls: ssl.SSLContext | None) -> Connection:
    """Connect to a service; raises OSError."""
    loop = asyncio.get_running_loop()
    transport: asyncio.BaseTransport
    if address.unix is not None:
        with places.address_of(address.unix) as near:
            transport, connection = await loop.create_unix_connection(Connection, near)
    else:
        transport, connection = await loop.create_connection(
            Connection, address.host, address.port, ssl=tls
        )
    connection.writer = asyncio.StreamWriter(transport, connection, connection.reader, loop)
    return connection


def _whole(data: bytes) -> Answer | None:
    """Return the answer that this is; None: it is none, or only part of one."""
    end = data.find(b"\r\n\r\n") + 4
    if end < 4:
        return None
    try:
        head = _common_head(data[:end]) if end <= _COMMON else _head(data[:end])
        size = int(head.headers.get("content-length", -1))
    except ValueError:
        return None  # whoever reads it says why
    if "transfer-encoding" in head.headers or size != len(data) - end:
        return None
    return Answer(head.status, head.headers, head.lines, data[end:])


async def read_head(reader: asyncio.StreamReader) -> Head:
    """Read how an answer begins."""
    return _head(await reader.readuntil(b"\r\n\r\n"))


def _head(raw: bytes) -> Head:
    first, *lines = raw[:-4].decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    if not version.startswith("HTTP/1."):
        raise ValueError(f"{first[:80]!r} is no HTTP answer")
    pairs = (line.partition(":") for line in lines)
    headers = {name.lower(): value.strip() for name, _, value in pairs}
    return Head(int(rest[:3]), headers, lines)


_common_head = functools.lru_cache(maxsize=128)(_head)


async def _body(reader: asyncio.StreamReader, method: str, head: Head) -> bytes:
    size = head.headers.get("content-length")
    if size is None or method == "HEAD" or "transfer-encoding" in head.headers:
        return b"".join([piece async for piece in pieces(reader, method, head)])
    return await reader.readexactly(int(size))


async def pieces(reader: asyncio.StreamReader, method: str, head: Head) -> AsyncIterator[bytes]:
    """Read what follows it; raises the error that ends it in the middle, if there is one."""
    if method == "HEAD" or head.status in {204, 304}:
        return
    if head.headers.get("transfer-encoding") == "chunked":
        while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
            async for piece in _exactly(reader, size):
                yield piece
            await reader.readexactly(2)
        while trailer := (await reader.readuntil(b"\r\n"))[:-2]:
            name, _, value = trailer.partition(b":")
            if name.decode("latin-1").lower() == wire.ERROR_TRAILER:
                raise wire.read_error(value, head.status)
        return
    async for piece in _exactly(reader, int(head.headers["content-length"])):
        yield piece


async def _exactly(reader: asyncio.StreamReader, size: int) -> AsyncIterator[bytes]:
    while size:
        piece = await reader.read(min(size, _PIECE))
        if not piece:
            raise EOFError("it ended in the middle")
        size -= len(piece)
        yield piece
