"""Carry plain HTTP requests one by one: each names its host, and some get a credential."""

from __future__ import annotations

import asyncio
import socket
from typing import Literal

from coldframe.host.egress import relay
from coldframe.host.egress.desk import Desk, RefusedError
from coldframe.host.egress.flows import Flow
from coldframe.host.egress.http import (
    MOST_HEAD,
    BadRequestError,
    Head,
    authority,
    parse_head,
    refusal,
)
from coldframe.host.egress.upstreams import TLS_PORT, PlainUpstream, TlsUpstream, Upstream
from coldframe.protocol.network import Credential

_READ_BYTES = 1 << 14
"""What is held of one connection: somebody may have thousands whose other side takes nothing."""
_MOST_LINE, _MOST_TRAILERS = 4096, 64
_HEAD_TIMEOUT_S = 30.0
CREDENTIALS_PORT = 80
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
"""Those that get a credential: others may have the server repeat what it was told (TRACE)."""
_UPGRADE = frozenset({"upgrade", "http2-settings"})


class ClientStream:
    """What comes from the sandbox, read by heads, lines and bodies."""

    def __init__(self, client: socket.socket, data: bytes = b"") -> None:
        self._client, self._data = client, bytearray(data)

    async def _more(self) -> bool:
        piece = await asyncio.get_running_loop().sock_recv(self._client, _READ_BYTES)
        self._data += piece
        return bool(piece)

    async def until(self, mark: bytes, most: int) -> bytes | None:
        """Return all up to a mark, with it; None at the end of file before the first byte.

        Raises BadRequestError: it is longer than `most`, or ends early.
        """
        while (at := self._data.find(mark)) < 0:
            if len(self._data) > most:
                raise BadRequestError("a head or a line is too long")
            if not await self._more():
                if not self._data:
                    return None
                raise BadRequestError("it ends in the middle")
        return self._cut(at + len(mark))

    async def head(self) -> Head | None:
        """Return the next request, None at the end. Raises BadRequestError, TimeoutError."""
        if not self._data and not await self._more():
            return None
        async with asyncio.timeout(_HEAD_TIMEOUT_S):
            raw = await self.until(b"\r\n\r\n", MOST_HEAD)
        return None if raw is None else parse_head(raw)

    async def some(self, most: int) -> bytes:
        """Return at least one byte. Raises BadRequestError at the end of file."""
        if not self._data and not await self._more():
            raise BadRequestError("its body ends early")
        return self._cut(min(most, len(self._data)))

    def rest(self) -> bytes:
        """Return what was read and not yet taken."""
        return self._cut(len(self._data))

    def _cut(self, count: int) -> bytes:
        piece = bytes(self._data[:count])
        del self._data[:count]
        return piece


class RequestCarrier:
    """All requests of one redirected connection, which are for one host."""

    def __init__(
        self,
        desk: Desk,
        flow: Flow,
        beginning: bytes,
        down: relay.Direction | None,
        *,
        by_tls: bool = False,
    ) -> None:
        """With `by_tls` the client speaks TLS, which was ended here; so does the other side."""
        self._secrets: list[Credential] = []
        self._by_tls = by_tls
        self._spoken: Literal["tls", "http"] = "tls" if by_tls else "http"
        flow.spoken = self._spoken
        self._desk, self._flow, self._down = desk, flow, down
        self._stream = ClientStream(flow.client, beginning)
        self._upstream: Upstream | None = None

    async def run(self) -> None:
        """Carry requests until the client has no more. Raises as `tunnel.carry`."""
        flow = self._flow
        while True:
            try:
                head = await self._stream.head()
                if head is None:
                    break
                name = self._require(head)
                if await self._one(head, name):
                    return
            except (BadRequestError, RefusedError) as error:
                await self._say(error)
                raise (
                    error
                    if isinstance(error, RefusedError)
                    else self._desk.refuse(flow, str(error))
                ) from None
        if self._upstream is not None:
            self._upstream.finish()
            await self._upstream.down()

    async def _say(self, error: Exception) -> None:
        """Tell the client why, if no answer of the other side can be in the way."""
        if self._upstream is None:
            status = "403 Forbidden" if isinstance(error, RefusedError) else "400 Bad Request"
            await self._flow.answer(refusal(status, str(error)))

    def _require(self, head: Head) -> str | None:
        """Return the host that a request is for. Raises RefusedError, BadRequestError."""
        flow, desk = self._flow, self._desk
        assert flow.address is not None
        if head.method == "CONNECT" or not head.target.startswith(("/", "*")):
            raise BadRequestError("this is no proxy: ask for a path")
        if not flow.verdict.names:
            verdict = desk.engine.named(flow.name or "", flow.address, flow.port, self._spoken)
            if not verdict.allowed:
                raise desk.refuse(flow, verdict.reason)
            if not desk.engine.policy.credentials:
                return None
        hosts = head.values("host")
        host = authority(hosts[0], flow.port) if len(hosts) == 1 else head.host
        bound = flow.name if self._by_tls or self._upstream is not None else None
        if not flow.verdict.names and host.name not in flow.names:
            return None
        if host.name not in flow.names or bound not in (None, host.name):
            flow.name = bound or host.name
            raise desk.refuse(flow, f"Host names {host}, which was not resolved to this address")
        if host.port != flow.port:
            raise desk.refuse(flow, f"Host names port {host.port}, the connection {flow.port}")
        assert host.name is not None
        flow.name = host.name
        verdict = desk.engine.named(host.name, flow.address, flow.port, self._spoken)
        if not verdict.allowed:
            raise desk.refuse(flow, verdict.reason)
        flow.verdict = verdict if verdict.names else flow.verdict
        return host.name

    async def _one(self, head: Head, name: str | None) -> bool:
        """Carry one request; True: nothing is left to be done for this connection."""
        port = TLS_PORT if self._by_tls else CREDENTIALS_PORT
        secrets = credentials_for(self._desk, head, name, self._flow.port, port)
        first = self._upstream is None
        if not first and secrets != self._secrets:
            raise self._desk.refuse(self._flow, "its requests would need different credentials")
        self._secrets = secrets
        upgrade = head.upgrade == "websocket" and first and not self._by_tls
        drop = frozenset(one.header.lower() for one in secrets)
        drop |= frozenset() if upgrade else _UPGRADE
        add = tuple((one.header, one.value.get_secret_value()) for one in secrets)
        length = head.length
        upstream = await self._reach(secrets, name)
        await upstream.send(head.encode(target=head.target, drop=drop, add=add))
        if upgrade and isinstance(upstream, PlainUpstream) and await upstream.upgraded():
            await self._freely(upstream)
            return True
        if isinstance(upstream, PlainUpstream):
            upstream.start()
        await send_body(self._stream, length, upstream)
        return False

    async def _reach(self, secrets: list[Credential], name: str | None) -> Upstream:
        if self._upstream is None:
            self._desk.announce(self._flow)
            spoken_for = self._flow.name if self._by_tls else name
            if spoken_for is not None and (self._by_tls or any(one.tls for one in secrets)):
                self._upstream = await TlsUpstream.open(self._flow, spoken_for, by_tls=self._by_tls)
            else:
                made = self._flow.upstream or await self._desk.connect(self._flow)
                self._upstream = PlainUpstream(self._flow, made, self._down)
        return self._upstream

    async def _freely(self, upstream: PlainUpstream) -> None:
        await upstream.send(self._stream.rest())
        assert self._flow.upstream is not None
        up = relay.upward(self._flow, self._flow.upstream)
        await asyncio.gather(up.ended, upstream.down())


def credentials_for(
    desk: Desk, head: Head, name: str | None, port: int, wanted: int = CREDENTIALS_PORT
) -> list[Credential]:
    """Return what is added to a request for a host on the `wanted` port. Raises BadRequestError."""
    secrets = desk.engine.credentials(name) if name and port == wanted else []
    if wanted == TLS_PORT:
        secrets = [one for one in secrets if one.tls]
    if secrets and head.method not in _METHODS:
        raise BadRequestError(f"{head.method[:20]} could show the credential that is added")
    return secrets


async def send_body(stream: ClientStream, length: int | None, upstream: Upstream) -> None:
    """Carry a request's body. Raises BadRequestError, OSError."""
    if length is not None:
        await _send_exactly(stream, length, upstream)
        return
    # Written anew: extensions and trailers are where two readers see different ends of a body.
    while size := _chunk_size(await stream.until(b"\r\n", _MOST_LINE)):
        await upstream.send(b"%x\r\n" % size)
        await _send_exactly(stream, size, upstream)
        if await stream.until(b"\r\n", 2) != b"\r\n":
            raise BadRequestError("a chunk has no end")
        await upstream.send(b"\r\n")
    for _ in range(_MOST_TRAILERS):
        line = await stream.until(b"\r\n", _MOST_LINE)
        if line is None:
            raise BadRequestError("its body ends early")
        if line == b"\r\n":
            await upstream.send(b"0\r\n\r\n")
            return
    raise BadRequestError("too many trailers")


async def _send_exactly(stream: ClientStream, length: int, upstream: Upstream) -> None:
    while length:
        piece = await stream.some(min(length, _READ_BYTES))
        length -= len(piece)
        await upstream.send(piece)


def _chunk_size(line: bytes | None) -> int:
    digits = (line or b"").removesuffix(b"\r\n").partition(b";")[0]
    if not 0 < len(digits) <= 15 or not all(c in b"0123456789abcdefABCDEF" for c in digits):
        raise BadRequestError("a chunk has no size")
    return int(digits, 16)
