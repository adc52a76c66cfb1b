"""End a sandbox's TLS in the place of a host for which it has a credential.

The client is answered by a certificate that only this sandbox trusts; what it asks is carried by
`requests` as plain HTTP is, and goes on by TLS that the node speaks and checks.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl

from coldframe.host import forks
from coldframe.host.egress import relay
from coldframe.host.egress.desk import Desk
from coldframe.host.egress.flows import Flow
from coldframe.host.egress.requests import RequestCarrier

_READ_BYTES = 1 << 14
_HANDSHAKE_S, _LAST_WORDS_S = 10.0, 5.0


async def carry_terminated(desk: Desk, flow: Flow, name: str, beginning: bytes) -> None:
    """Carry a connection whose greeting names a host that has a credential.

    Raises:
        RefusedError: noted; it would not speak with us, or its requests are refused.
        OSError: either side broke.
    """
    if flow.upstream is not None:  # a proxy's tunnel: the credential travels by another
        relay.close(flow.upstream)
        flow.upstream = None
    flow.name = name
    outside = _Outside(flow.client, desk.authority.context_for(name), beginning)
    try:
        async with asyncio.timeout(_HANDSHAKE_S):
            await outside.greet()
    except (ssl.SSLError, TimeoutError) as error:
        why = getattr(error, "reason", None) or "it took too long"
        raise desk.refuse(
            flow, f"its TLS with us failed, which adds a credential for {name}: {why}"
        ) from None
    inside, flow.client = socket.socketpair()
    for one in (inside, flow.client):
        forks.own_socket(one).setblocking(False)
    pumps = [
        asyncio.ensure_future(one) for one in (outside.inward(inside), outside.outward(inside))
    ]
    whole = False
    try:
        try:
            await RequestCarrier(desk, flow, b"", None, by_tls=True).run()
            whole = True
        finally:
            whole = whole or flow.answered
            if whole:
                with contextlib.suppress(OSError):
                    flow.client.shutdown(socket.SHUT_WR)
                await asyncio.wait(pumps[1:], timeout=_LAST_WORDS_S)
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        inside.close()
        relay.close(outside.socket, reset=not whole)


class _Outside:
    """The sandbox's side of the connection: TLS that we answer."""

    def __init__(self, client: socket.socket, context: ssl.SSLContext, data: bytes) -> None:
        self.socket = client
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._in.write(data)
        self._tls = context.wrap_bio(self._in, self._out, server_side=True)
        self._sending = asyncio.Lock()

    async def greet(self) -> None:
        """Shake hands. Raises ssl.SSLError, OSError."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                await self._flush()
                if not await self._more():
                    raise ConnectionResetError("the client left in the middle of TLS") from None
            except ssl.SSLError:
                await self._flush()  # it is told why
                raise
            else:
                await self._flush()
                return

    async def _more(self) -> bool:
        data = await asyncio.get_running_loop().sock_recv(self.socket, _READ_BYTES)
        if data:
            self._in.write(data)
        else:
            self._in.write_eof()
        return bool(data)

    async def _flush(self) -> None:
        async with self._sending:
            if data := self._out.read():
                await asyncio.get_running_loop().sock_sendall(self.socket, data)

    async def inward(self, inside: socket.socket) -> None:
        """Carry what the client says, decrypted, to its end."""
        loop = asyncio.get_running_loop()
        while data := await self._read():
            await loop.sock_sendall(inside, data)
        with contextlib.suppress(OSError):
            inside.shutdown(socket.SHUT_WR)

    async def _read(self) -> bytes:
        while True:
            try:
                return self._tls.read(_READ_BYTES)
            except ssl.SSLWantReadError:
                await self._flush()
                await self._more()
            except ssl.SSLError:  # an end without a goodbye, or nonsense: nothing more comes
                return b""

    async def outward(self, inside: socket.socket) -> None:
        """Carry what it is answered, encrypted, to its end."""
        loop = asyncio.get_running_loop()
        while data := await loop.sock_recv(inside, _READ_BYTES):
            self._tls.write(data)
            await self._flush()
        with contextlib.suppress(ssl.SSLError):
            self._tls.unwrap()
        with contextlib.suppress(OSError):
            await self._flush()
            self.socket.shutdown(socket.SHUT_WR)
