"""Pass requests on to another service as they are, in the name of whoever makes them.

What stands behind a `Guard` is asked by callers that it has let in; the other service takes their
names from the header (`behalf.py`). Bodies stream both ways at once, at the pace of the slower
side. Why not through the SDK's link: docs/adr/0055-several-gateways-over-one-node.md
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from websockets.asyncio.client import ClientConnection, connect, unix_connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

from coldframe.gateway import failures
from coldframe.gateway.behalf import HEADER, told
from coldframe.gateway.context import hung_up, until_one_ends
from coldframe.gateway.express import Door
from coldframe.gateway.identity import Identity
from coldframe.gateway.meters import Meters
from coldframe.gateway.protocol import Shortcut
from coldframe.gateway.tenants import Quotas
from coldframe.node.sandboxes import CloseReport
from coldframe.protocol import places, tracing
from coldframe.protocol.errors import ColdframeError, ServiceUnreachableError

_BY_QUOTA = frozenset({"/v1/sandboxes", "/v1/resources"})
"""Paths whose answers depend on what the owner may have."""
_FRAME_BYTES = 16 << 20
_OPEN_S = 10.0
_OURS = frozenset(
    {
        *(b"host", b"authorization", b"content-length", b"transfer-encoding", HEADER),
        *(b"connection", b"keep-alive", b"te", b"trailer", b"upgrade", b"expect"),
        # The connection adds it, for the trace that the request is part of here.
        tracing.HEADER.encode(),
        *(b"proxy-authenticate", b"proxy-authorization", b"proxy-connection"),
    }
)
"""Headers of one connection, and those that say who asks: never passed on."""
_NORMAL, _UNSAID = 1000, {1005, 1006}
_VISIBLE = "".join(map(chr, range(0x21, 0x7F)))

_NOBODY = Identity("nobody", frozenset(), "nobody")
"""Who asks for what needs no key."""

Headers = Sequence[tuple[str, str]]


class _Address(Protocol):
    @property
    def host(self) -> str: ...
    @property
    def authority(self) -> str: ...
    @property
    def unix(self) -> Path | None: ...
    @property
    def tls(self) -> bool: ...


class _Head(Protocol):
    status: int
    lines: Sequence[str]
    """Headers."""


class Upstream(Protocol):
    """Connections to the other service; the SDK's `Http` is one."""

    address: Any

    def stream(
        self,
        method: str,
        target: str,
        content: AsyncIterator[bytes] | None = None,
        headers: Headers = (),
    ) -> contextlib.AbstractAsyncContextManager[tuple[_Head, AsyncIterator[bytes]]]:
        """Send a request whose body is sent while the answer is read.

        Raises:
            ServiceUnreachableError: nobody answers, or no more.
        """


class Relay:
    """An application that is another service."""

    def __init__(self, upstream: Upstream, quotas: Quotas, own: Headers = ()) -> None:
        """Take the way to it, where quotas are, and headers that let this gateway in there."""
        self._upstream, self._quotas, self._own = upstream, quotas, tuple(own)
        self._tls = ssl.create_default_context() if upstream.address.tls else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request with what the other service answers."""
        try:
            target, headers = _target(scope), await self._headers(scope)
        except ColdframeError as error:
            await failures.answer(error)(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await self._websocket(scope, target, headers, receive, send)
        else:
            await self._request(scope, target, headers, receive, send)

    async def _headers(self, scope: Scope) -> list[tuple[str, str]]:
        passed = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in scope["headers"]
            if name not in _OURS and not name.startswith(b"sec-websocket-")
        ]
        # Without it the other service would take this for a request of its administrator.
        identity: Identity = scope.get("state", {}).get("identity", _NOBODY)
        quota = None
        if identity.owner is not None and scope["path"] in _BY_QUOTA:
            quota = await self._quotas.quota(identity.owner)
        passed.append((HEADER.decode(), told(identity, quota)))
        return passed

    # --- requests ---------------------------------------------------------------------

    async def _request(
        self, scope: Scope, target: str, headers: Headers, receive: Receive, send: Send
    ) -> None:
        asked = _Asked(scope, receive)
        answer = self._pass(scope, asked, target, headers, send)
        try:
            async with until_one_ends(answer, asked.left()) as (passing, _):
                if passing.done():
                    passing.result()
        finally:
            if asked.content is not None:
                await asked.content.aclose()

    async def _pass(
        self, scope: Scope, asked: _Asked, target: str, headers: Headers, send: Send
    ) -> None:
        begun = False
        try:
            going = self._upstream.stream(scope["method"], target, asked.content, headers)
            async with going as (head, pieces):
                shown = _answered(head.lines)
                start = {"type": "http.response.start", "status": head.status, "headers": shown}
                begun = True
                await send(start)
                async for piece in pieces:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        except ServiceUnreachableError as error:
            if begun:
                raise
            await failures.answer(error)(scope, asked.receive, send)
        except _LeftError:
            pass

    # --- WebSockets -------------------------------------------------------------------

    async def _websocket(
        self, scope: Scope, target: str, headers: Headers, receive: Receive, send: Send
    ) -> None:
        await receive()
        spoken = scope.get("subprotocols") or None
        trace = tracing.traceparent()
        if trace is not None:
            headers = [*headers, (tracing.HEADER, trace)]
        try:
            async with await self._connected(target, [*self._own, *headers], spoken) as theirs:
                await send({"type": "websocket.accept", "subprotocol": theirs.subprotocol})
                hearing = asyncio.ensure_future(_hear(scope, receive, theirs))
                try:
                    async for message in theirs:
                        key = "bytes" if isinstance(message, bytes) else "text"
                        await send({"type": "websocket.send", key: message})
                finally:
                    hearing.cancel()
                    await asyncio.gather(hearing, return_exceptions=True)
                code = theirs.close_code or _NORMAL
                code = _NORMAL if code in _UNSAID else code
                await _close(send, code, theirs.close_reason or "")
        except InvalidStatus as error:
            told = error.response
            lines = [f"{name}: {value}" for name, value in told.headers.raw_items()]
            refusal = Response(bytes(told.body or b""), told.status_code)
            refusal.raw_headers = _answered(lines)
            await refusal(scope, receive, send)
        except ConnectionClosed:
            await _close(send, _NORMAL, "")
        except (WebSocketException, OSError, TimeoutError):
            gone = ServiceUnreachableError("the node behind this gateway does not answer")
            await failures.answer(gone)(scope, receive, send)

    async def _connected(
        self, target: str, headers: Headers, spoken: list[str] | None
    ) -> ClientConnection:
        address = self._upstream.address
        options: dict[str, Any] = {
            "additional_headers": list(headers),
            "max_size": _FRAME_BYTES,
            "open_timeout": _OPEN_S,
            "ping_interval": None,  # what the sandbox does not take, the node does not read
            "compression": None,
            "subprotocols": spoken,
            "user_agent_header": None,
            "proxy": None,
        }
        if address.unix is not None:
            with places.address_of(address.unix) as near:
                return await unix_connect(near, f"ws://localhost{target}", **options)
        scheme = "ws" if self._tls is None else "wss"
        uri = f"{scheme}://{address.authority}{target}"
        return await connect(uri, ssl=self._tls, **options)


class ServedRelay:
    """See `Served`: nothing of the other service ends with this one."""

    def __init__(self, upstream: Upstream, quotas: Quotas, own: Headers) -> None:
        self.app: ASGIApp = Relay(upstream, quotas, own)
        self.by_url: ASGIApp = self.app
        self.meters = Meters()

    def express(self, door: Door) -> Shortcut | None:
        """See `Served`: it has no commands of its own."""
        del door
        return None

    def reached_at(self, origin: str) -> None:
        """See `Served`: URLs are the other service's."""

    spawner_protocol = None

    def running(self) -> int:
        """See `Served`."""
        return 0

    def live(self) -> bool:
        """See `Served`."""
        return False

    def answer_now(self) -> None:
        """See `Served`: who waits there is answered there."""

    async def close(self) -> CloseReport:
        """See `Served`."""
        return CloseReport()

    async def leave(self) -> int | None:
        """See `Served`."""
        return None


class _LeftError(Exception):
    """The client went away in the middle of its body."""


class _Asked:
    """A request that is being read: its body, and whether its client has left."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.receive = receive
        self._read = asyncio.Event()
        sized = any(
            name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
            for name, value in scope["headers"]
        )
        self.content = self._pieces() if sized else None
        if not sized:
            self._read.set()

    async def _pieces(self) -> AsyncGenerator[bytes, None]:
        try:
            while True:
                message = await self.receive()
                if message["type"] == "http.disconnect":
                    raise _LeftError
                if message.get("body"):
                    yield message["body"]
                if not message.get("more_body"):
                    return
        finally:
            self._read.set()

    async def left(self) -> None:
        """Return when the client has left; what it still sends is nobody's."""
        await self._read.wait()
        while (await self.receive())["type"] != "http.disconnect":
            pass


async def _hear(scope: Scope, receive: Receive, theirs: ClientConnection) -> None:
    async with until_one_ends(_pass_on(receive, theirs), hung_up(scope)):
        pass
    await theirs.close()


async def _pass_on(receive: Receive, theirs: ClientConnection) -> None:
    with contextlib.suppress(ConnectionClosed):
        while (message := await receive())["type"] != "websocket.disconnect":
            data = message.get("bytes")
            await theirs.send(message.get("text") or "" if data is None else data)


async def _close(send: Send, code: int, reason: str) -> None:
    with contextlib.suppress(RuntimeError, OSError):  # the client has closed it already
        await send({"type": "websocket.close", "code": code, "reason": reason[:60]})


def _answered(lines: Sequence[str]) -> list[tuple[bytes, bytes]]:
    pairs = (line.encode("latin-1").partition(b":") for line in lines)
    named = ((name.lower(), value.strip()) for name, _, value in pairs)
    return [pair for pair in named if pair[0] == b"content-length" or pair[0] not in _OURS]


def _target(scope: Scope) -> str:
    """Return path and query as they were sent; what is no ASCII is percent-encoded."""
    raw = scope.get("raw_path") or quote(scope["path"]).encode()
    query = scope["query_string"]
    whole = raw + b"?" + query if query else raw
    return quote(whole, safe=_VISIBLE)
