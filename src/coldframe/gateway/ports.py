"""/v1/sandboxes/ID/ports: what listens in a sandbox, and ways into it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request, WebSocket, WebSocketDisconnect
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse

from coldframe.gateway import failures
from coldframe.gateway.context import (
    RAW_BODY,
    body,
    documented,
    enter,
    hung_up,
    json_answer,
    service_of,
    until_one_ends,
)
from coldframe.gateway.identity import Scope
from coldframe.gateway.models import PortUrlIssued, PortUrlRequest
from coldframe.gateway.once import Once
from coldframe.gateway.tickets import PREFIX, Ticket
from coldframe.protocol.errors import ColdframeError

router = APIRouter(prefix="/v1/sandboxes/{sandbox_id}/ports", tags=["ports"])
_changes = APIRouter(prefix=router.prefix, tags=router.tags, route_class=Once)

Port = Annotated[int, Path(ge=1, le=65535)]
_PIECE = 1 << 16
_BYTES: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/octet-stream": {}}, "description": "What the port says."}
}


@router.get("", response_model=list[int])
async def listening(request: Request, sandbox_id: str) -> list[int]:
    """Return the TCP ports that something in the sandbox listens on."""
    tenant = enter(request, Scope.READ)
    return list(await tenant.node.listening_ports(tenant.sandbox(sandbox_id)))


@_changes.post(
    "/{port}/url",
    status_code=201,
    response_model=PortUrlIssued,
    openapi_extra=documented(PortUrlRequest),
)
async def url(request: Request, sandbox_id: str, port: Port) -> Response:
    """Return a URL by which a browser reaches a port: HTTP and WebSocket, without a key.

    It cannot be guessed, and leads nowhere once it expires or the sandbox ends. Whoever has it may
    use it. What listens sees requests to `localhost:PORT`, without the caller's Authorization.
    """
    tenant = enter(request, Scope.EXEC)
    wanted = await body(request, PortUrlRequest)
    info = await tenant.node.get(tenant.sandbox(sandbox_id))
    service = service_of(request)
    expires_at = math.ceil(time.time() + wanted.ttl_s)
    token = service.tickets.issue(Ticket(info.id, port, expires_at))
    path, origin = f"{PREFIX}{token}/", service.origin
    issued = PortUrlIssued(
        path=path,
        origin=origin,
        url=None if origin is None else origin + path,
        expires_at=float(expires_at),
    )
    return json_answer(issued, 201)


@router.post("/{port}/stream", response_model=None, responses=_BYTES, openapi_extra=RAW_BODY)
async def stream(request: Request, sandbox_id: str, port: Port) -> Response:
    """Connect to a port: the body is what it hears, the answer what it says, both at once.

    The answer begins as soon as the connection stands; the end of the body is passed on as end of
    file. For clients and proxies that can send and receive at the same time; others use the
    WebSocket.
    """
    tenant = enter(request, Scope.EXEC)
    reader, writer = await tenant.node.connect(tenant.sandbox(sandbox_id), port)

    async def answer() -> AsyncIterator[bytes]:
        sending = asyncio.ensure_future(_send(request, writer))
        try:
            with contextlib.suppress(ConnectionError):
                while piece := await reader.read(_PIECE):
                    yield piece
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            writer.close()

    return _Duplex(answer(), 200, media_type="application/octet-stream")


class _Duplex(StreamingResponse):
    """A stream whose request is still being read: what comes in is not ours to listen to."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the answer; its generator learns of a lost client by reading the request."""
        try:
            await self.stream_response(send)
        finally:
            close = getattr(self.body_iterator, "aclose", None)
            if close is not None:
                await close()


async def _send(request: Request, writer: asyncio.StreamWriter) -> None:
    async with until_one_ends(_pass_body(request, writer), hung_up(request.scope)):
        pass
    writer.transport.abort()


async def _pass_body(request: Request, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ClientDisconnect):
        with contextlib.suppress(ConnectionError):
            async for piece in request.stream():
                writer.write(piece)
                await writer.drain()
            if writer.can_write_eof():
                writer.write_eof()
        while (await request.receive())["type"] != "http.disconnect":
            pass


@router.websocket("/{port}/websocket")
async def websocket(socket: WebSocket, sandbox_id: str, port: Port) -> None:
    """Connect to a port: binary frames both ways. An empty frame to the port is end of file."""
    try:
        tenant = enter(socket, Scope.EXEC)
        reader, writer = await tenant.node.connect(tenant.sandbox(sandbox_id), port)
    except ColdframeError as error:
        await socket.send_denial_response(failures.answer(failures.in_words_of(socket, error)))
        return
    await socket.accept()
    hearing = asyncio.ensure_future(_hear(socket, writer))
    try:
        with contextlib.suppress(ConnectionError, RuntimeError, WebSocketDisconnect):
            while piece := await _read_or_stop(reader, hearing):
                await socket.send_bytes(piece)
        with contextlib.suppress(RuntimeError, WebSocketDisconnect):
            await socket.close()
    finally:
        hearing.cancel()
        await asyncio.gather(hearing, return_exceptions=True)
        writer.close()


async def _read_or_stop(reader: asyncio.StreamReader, stop: asyncio.Task[None]) -> bytes:
    reading = asyncio.ensure_future(reader.read(_PIECE))
    await asyncio.wait({reading, stop}, return_when=asyncio.FIRST_COMPLETED)
    if reading.done():
        return reading.result()
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    return b""


async def _hear(socket: WebSocket, writer: asyncio.StreamWriter) -> None:
    passing = _pass_messages(socket, writer)
    async with until_one_ends(passing, hung_up(socket.scope)) as (passed, _):
        if not passed.done():
            writer.transport.abort()  # what it waits for may never come


async def _pass_messages(socket: WebSocket, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while (message := await socket.receive())["type"] != "websocket.disconnect":
            piece = message.get("bytes") or (message.get("text") or "").encode()
            if piece:
                writer.write(piece)
                await writer.drain()
            elif writer.can_write_eof():
                writer.write_eof()


router.routes.extend(_changes.routes)
