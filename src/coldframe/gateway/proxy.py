"""`/p/TOKEN/...`: HTTP to what listens on a port of a sandbox, for browsers.

Whoever has the URL may use it, so it is answered before the door. What listens is hostile: its
answer is read by h11, which bounds its head and takes no answer that has two readings, and is sent
as fast as the browser takes it. WebSockets: `proxy_websocket.py`.
"""

from __future__ import annotations

import asyncio
import contextlib

import h11
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coldframe.gateway import failures
from coldframe.gateway.audited import REFUSED
from coldframe.gateway.context import Service, until_one_ends
from coldframe.gateway.proxy_headers import Passage
from coldframe.gateway.proxy_websocket import carry
from coldframe.gateway.tickets import PREFIX, Ticket
from coldframe.protocol import tracing
from coldframe.protocol.errors import (
    ColdframeError,
    InvalidRequestError,
    PortUnreachableError,
    PortUrlInvalidError,
    SandboxGoneError,
    SandboxNotFoundError,
    SandboxStateError,
)
from coldframe.protocol.text import excerpt

_PIECE = 1 << 16
_HEAD_BYTES = 1 << 16
_BAD_GATEWAY = 502
_BODILESS = frozenset({204, 304})
"""Statuses whose answers have no body, whatever length they state."""
_FRAMES = frozenset({b"content-length", b"transfer-encoding"})
_PREFIX = PREFIX.encode()


class ByUrl:
    """An application, and another one for what is below `/p/`."""

    def __init__(self, app: ASGIApp, by_url: ASGIApp) -> None:
        self._app, self._by_url = app, by_url

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything on to one of them."""
        if scope["raw_path"].startswith(_PREFIX):
            tracing.enter(None)  # the connection may have that of another request
            await self._by_url(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class PortProxy:
    """The application below `/p/`."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the port that its token is for."""
        token, slash, _ = scope["raw_path"].removeprefix(_PREFIX).partition(b"/")
        if not slash and scope["type"] == "http":
            # Relative links need it.
            passage = Passage(_PREFIX + token, 0)
            there = passage.prefix + b"/" + passage.target(scope["raw_path"], scope["query_string"])
            moved = Response(status_code=308, headers={"location": there.decode("latin-1")})
            await moved(scope, receive, send)
            return
        try:
            ticket = self._service.tickets.read(token.decode("ascii", "replace"))
            reader, writer = await self._connect(ticket)
        except ColdframeError as error:
            await _refuse(scope, receive, send, error)
            return
        passage = Passage(_PREFIX + token, ticket.port)
        try:
            if scope["type"] == "websocket":
                await carry(scope, receive, send, passage, (reader, writer))
            else:
                await _Exchange(passage, reader, writer).run(scope, receive, send)
        except PortUnreachableError as error:
            await _refuse(scope, receive, send, error)
        finally:
            writer.transport.abort()

    async def _connect(self, ticket: Ticket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            return await self._service.node.connect(ticket.sandbox_id, ticket.port)
        except (SandboxNotFoundError, SandboxGoneError, SandboxStateError) as error:
            raise PortUrlInvalidError(
                "this URL leads nowhere: unknown, expired, or of a sandbox that has ended"
            ) from error


async def _refuse(scope: Scope, receive: Receive, send: Send, error: ColdframeError) -> None:
    scope.setdefault("state", {})[REFUSED] = True
    response = failures.answer(error)
    if isinstance(error, PortUnreachableError):
        response.status_code = _BAD_GATEWAY
    await response(scope, receive, send)


class _Exchange:
    """One request and its answer, on a connection of their own."""

    def __init__(
        self, passage: Passage, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._passage, self._reader, self._writer = passage, reader, writer
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD_BYTES)

    async def run(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._begin(scope)
        except h11.LocalProtocolError as error:
            await _refuse(
                scope, receive, send, InvalidRequestError(f"this cannot be passed on: {error}")
            )
            return
        answer = self._pass_answer(scope, receive, send)
        async with until_one_ends(answer, self._ask(receive)) as (answering, _):
            if answering.done():
                answering.result()

    def _begin(self, scope: Scope) -> None:
        target = self._passage.target(scope["raw_path"], scope["query_string"])
        headers = self._passage.inward(scope["headers"])
        given = dict(scope["headers"])
        if b"transfer-encoding" in given:
            headers.append((b"transfer-encoding", b"chunked"))
        elif b"content-length" in given:
            headers.append((b"content-length", given[b"content-length"]))
        headers.append((b"connection", b"close"))
        request = h11.Request(method=scope["method"], target=target, headers=headers)
        self._write(request)

    def _write(self, event: h11.Event) -> None:
        data = self._http.send(event)
        if data:
            self._writer.write(data)

    async def _ask(self, receive: Receive) -> None:
        """Send the body; return when the browser has gone."""
        with contextlib.suppress(ConnectionError, h11.LocalProtocolError):
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return
                if message.get("body"):
                    self._write(h11.Data(data=message["body"]))
                    await self._writer.drain()
                more = message.get("more_body", False)
            self._write(h11.EndOfMessage())
            await self._writer.drain()
        while (await receive())["type"] != "http.disconnect":
            pass

    async def _pass_answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            begun = await self._head()
        except (h11.RemoteProtocolError, ConnectionError) as error:
            told = f"port {self._passage.port} does not answer by HTTP: {excerpt(str(error))}"
            await _refuse(scope, receive, send, PortUnreachableError(told))
            return
        headers = self._passage.outward(begun.headers)
        if begun.status_code in _BODILESS:
            headers = [header for header in headers if header[0] != b"content-length"]
        await send({"type": "http.response.start", "status": begun.status_code, "headers": headers})
        with contextlib.suppress(h11.RemoteProtocolError, ConnectionError):
            while isinstance(event := await self._next(), h11.Data):
                body: Message = {"type": "http.response.body", "body": bytes(event.data)}
                await send({**body, "more_body": True})
            if isinstance(event, h11.EndOfMessage):
                await send({"type": "http.response.body", "body": b""})
        # Else the answer is not whole, and the server ends the browser's connection: an end that
        # looked like any other would pass half a file for a whole one.

    async def _head(self) -> h11.Response:
        while isinstance(event := await self._next(), h11.InformationalResponse):
            pass
        if not isinstance(event, h11.Response) or event.status_code >= 600:
            raise h11.RemoteProtocolError("no answer")
        if {name for name, _ in event.headers} >= _FRAMES:
            raise h11.RemoteProtocolError("its end is told by a length and by chunks")
        return event

    async def _next(self) -> h11.Event | None:
        """Return what comes next; None: nothing does."""
        while True:
            event = self._http.next_event()
            if isinstance(event, h11.Event):
                return event
            if event is not h11.NEED_DATA:
                return None
            self._http.receive_data(await self._reader.read(_PIECE))
