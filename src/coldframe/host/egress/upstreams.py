"""The other side of plain HTTP requests: as they are, or by TLS that the node speaks."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import ssl
from typing import Protocol

from coldframe.host.egress import relay
from coldframe.host.egress.dial import open_connection
from coldframe.host.egress.flows import Flow

_READ_BYTES = 1 << 14
TLS_PORT = 443
_IDLE_S, _LEFT_IDLE_S = 60.0, 2.0
"""For which a server may say nothing once its client has said all, or has left."""


class Upstream(Protocol):
    """The other side, plain or by TLS."""

    async def send(self, data: bytes) -> None: ...

    async def down(self) -> None:
        """Wait until all that it sends has been carried to the sandbox."""

    async def upgraded(self) -> bool:
        """Whether its first answer agrees to go on with another protocol."""

    def finish(self) -> None:
        """Tell it that nothing more comes."""


class PlainUpstream:
    """See `Upstream`."""

    def __init__(self, flow: Flow, made: socket.socket, down: relay.Direction | None) -> None:
        self._flow, self._socket, self._down = flow, made, down

    async def send(self, data: bytes) -> None:
        """See `Upstream.send`."""
        await self._flow.allow(len(data))
        self._flow.count_out(len(data))
        await asyncio.get_running_loop().sock_sendall(self._socket, data)

    def start(self) -> None:
        """Begin to carry what it sends."""
        self._down = self._down or relay.downward(self._flow, self._socket)

    async def down(self) -> None:
        """See `Upstream.down`."""
        self.start()
        assert self._down is not None
        await self._down.ended

    async def upgraded(self) -> bool:
        """See `Upstream.upgraded`: looks at its answer without taking it."""
        wanted = b"HTTP/1.1 101 "
        seen = b""
        while len(seen) < len(wanted) and wanted.startswith(seen):
            await _readable(self._socket)
            more = self._socket.recv(len(wanted), socket.MSG_PEEK)
            if not more:
                return False
            if more == seen:
                await asyncio.sleep(0.001)  # what was seen is still there: the rest is to come
            seen = more
        return seen == wanted

    def finish(self) -> None:
        """See `Upstream.finish`."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)


async def _readable(one: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(one.fileno(), ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(one.fileno())


@functools.lru_cache(maxsize=4)
def _trust(paths: ssl.DefaultVerifyPaths) -> ssl.SSLContext:
    """What the host trusts; reading it takes longer than everything else of a request."""
    del paths
    return ssl.create_default_context()


class TlsUpstream:
    """See `Upstream`. The node speaks TLS, so that the sandbox need not hold the credential."""

    def __init__(
        self,
        flow: Flow,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        idle_s: float,
    ) -> None:
        self._idle_s = idle_s
        self._flow, self._reader, self._writer = flow, reader, writer
        task = asyncio.ensure_future(self._carry())
        flow.watch(task)
        flow.stops.append(self._stop)
        self._task = task

    @classmethod
    async def open(cls, flow: Flow, name: str, *, by_tls: bool = False) -> TlsUpstream:
        """Connect to a host's TLS port at the address that was decided about. Raises OSError.

        With `by_tls` the client speaks TLS too: who has said all there has left.
        """
        assert flow.address is not None
        made = await open_connection(flow.address, TLS_PORT)
        try:
            reader, writer = await asyncio.open_connection(
                sock=made, ssl=_trust(ssl.get_default_verify_paths()), server_hostname=name
            )
        except BaseException:
            made.close()
            raise
        return cls(flow, reader, writer, _LEFT_IDLE_S if by_tls else _IDLE_S)

    def _stop(self) -> None:
        self._task.cancel()
        self._writer.transport.abort()

    async def send(self, data: bytes) -> None:
        """See `Upstream.send`."""
        await self._flow.allow(len(data))
        self._flow.count_out(len(data))
        self._writer.write(data)
        await self._writer.drain()

    async def _carry(self) -> None:
        loop = asyncio.get_running_loop()
        while data := await self._reader.read(_READ_BYTES):
            await self._flow.allow(len(data))
            self._flow.count_in(len(data))
            await loop.sock_sendall(self._flow.client, data)
        with contextlib.suppress(OSError):
            self._flow.client.shutdown(socket.SHUT_WR)

    async def down(self) -> None:
        """See `Upstream.down`."""
        await self._task

    async def upgraded(self) -> bool:
        """See `Upstream.upgraded`: not by this way."""
        return False

    def finish(self) -> None:
        """See `Upstream.finish`; TLS has no half-closed state that servers agree on.

        So it is given the time to answer, as long as it does.
        """
        self._end_when_idle(-1)

    def _end_when_idle(self, before: int) -> None:
        if self._flow.bytes_in == before:
            self._writer.transport.abort()
        elif not self._task.done():
            loop = asyncio.get_running_loop()
            loop.call_later(self._idle_s, self._end_when_idle, self._flow.bytes_in)
