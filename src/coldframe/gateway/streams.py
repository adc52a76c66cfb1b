"""A command's output as it comes: server-sent events, and a WebSocket that also takes stdin.

The next piece is read when the client has taken the one before: a client that does not read holds
one piece of memory, and the command's output waits in its bounded spool.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Query, Request, WebSocket, WebSocketDisconnect
from starlette.responses import Response, StreamingResponse

from coldframe.gateway import failures
from coldframe.gateway.context import OperationId, enter, hung_up, until_one_ends
from coldframe.gateway.identity import Scope
from coldframe.gateway.models import Signal
from coldframe.gateway.tenants import Tenant
from coldframe.protocol import strict_json, wire
from coldframe.protocol.errors import ColdframeError, InvalidRequestError
from coldframe.protocol.following import merged
from coldframe.protocol.models import OutputChunk, PtySize, Stream
from coldframe.protocol.text import excerpt

router = APIRouter(prefix="/v1", tags=["execs"])

_Cursor = Annotated[int, Query(ge=0, description="Where to begin in the stream.")]
_LAST = re.compile(r"(\d{1,18})-(\d{1,18})")
_QUIET_S = 15.0
"""So often a stream that has nothing to say shows that it lives."""
_TAGS: dict[str, bytes] = {"stdout": b"\x01", "stderr": b"\x02"}

Cursors = dict[Stream, int]


@router.get(
    "/execs/{operation_id}/events",
    response_model=None,
    responses={200: {"content": {"text/event-stream": {}}, "description": "Server-sent events."}},
)
async def events(
    request: Request, operation_id: OperationId, stdout: _Cursor = 0, stderr: _Cursor = 0
) -> Response:
    """Stream both outputs as server-sent events until the command has ended.

    `output` has `{"stream", "offset", "dropped", "data"}`, data in base64, and an id
    `STDOUT-STDERR`: the cursors to go on with, which `Last-Event-ID` takes too. Then `result` has
    an ExecResult, or `error` an ErrorBody.
    """
    tenant = enter(request, Scope.READ)
    cursors: Cursors = {"stdout": stdout, "stderr": stderr}
    last = request.headers.get("last-event-id")
    if last is not None:
        match = _LAST.fullmatch(last)
        if match is None:
            raise InvalidRequestError("last-event-id: STDOUT-STDERR is expected")
        cursors = {"stdout": int(match[1]), "stderr": int(match[2])}
    await tenant.node.poll_exec(tenant.operation(operation_id))
    headers = {"cache-control": "no-store"}
    return StreamingResponse(
        _events(request, tenant, operation_id, cursors), 200, headers, "text/event-stream"
    )


async def _events(
    request: Request, tenant: Tenant, operation_id: str, cursors: Cursors
) -> AsyncIterator[bytes]:
    try:
        async with contextlib.aclosing(merged(tenant, operation_id, cursors)) as chunks:
            async for chunk in chunks_or_none(chunks):
                if chunk is None:
                    yield b": \n\n"
                    continue
                cursors[chunk.stream] = chunk.next_cursor
                at = f"{cursors['stdout']}-{cursors['stderr']}"
                yield _event("output", _shown(chunk), at)
        yield _event("result", wire.dump(await tenant.wait_exec(operation_id)))
    except ColdframeError as error:
        told = failures.in_words_of(request, error)
        yield _event("error", json.dumps(wire.error_body(told)).encode())


async def chunks_or_none(chunks: AsyncIterator[OutputChunk]) -> AsyncIterator[OutputChunk | None]:
    """Yield chunks, and None when there was none for a while."""
    following: asyncio.Task[OutputChunk | None] | None = None
    try:
        while True:
            following = following or asyncio.ensure_future(_next(chunks))
            done, _ = await asyncio.wait({following}, timeout=_QUIET_S)
            if not done:
                yield None
                continue
            chunk = following.result()
            following = None
            if chunk is None:
                return
            yield chunk
    finally:
        if following is not None:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


async def _next(chunks: AsyncIterator[OutputChunk]) -> OutputChunk | None:
    return await anext(chunks, None)


def _shown(chunk: OutputChunk) -> bytes:
    """A chunk as JSON. Written here: an encoder would look at every letter of the data."""
    told = {"stream": chunk.stream, "offset": chunk.offset, "dropped": chunk.dropped_bytes}
    head = json.dumps(told).encode().removesuffix(b"}")
    return b'%s, "data": "%s"}' % (head, base64.b64encode(chunk.data))


def _event(name: str, data: bytes, event_id: str | None = None) -> bytes:
    head = f"event: {name}\n" + (f"id: {event_id}\n" if event_id else "")
    return b"%sdata: %s\n\n" % (head.encode(), data)


@router.websocket("/execs/{operation_id}/attach")
async def attach(
    socket: WebSocket, operation_id: str, stdout: _Cursor = 0, stderr: _Cursor = 0
) -> None:
    """Attach to a command.

    Binary frames to the client: a byte 1 (stdout) or 2 (stderr), then output. A text frame is JSON:
    `{"result": ExecResult}` or `{"error": ErrorBody}`, and then the socket closes. From the client:
    binary frames are stdin, text frames one of `{"signal": {...}}`, `{"resize": {...}}`,
    `{"close_stdin": true}`.
    """
    try:
        tenant = enter(socket, Scope.EXEC)
        inner = tenant.operation(operation_id)
        await tenant.node.poll_exec(inner)
    except ColdframeError as error:
        await socket.send_denial_response(failures.answer(failures.in_words_of(socket, error)))
        return
    await socket.accept()
    telling = _tell(socket, tenant, operation_id, {"stdout": stdout, "stderr": stderr})
    async with until_one_ends(telling, _hear(socket, tenant, inner), hung_up(socket.scope)):
        pass
    with contextlib.suppress(RuntimeError, WebSocketDisconnect):  # the client has closed it already
        await socket.close()


async def _tell(socket: WebSocket, tenant: Tenant, operation_id: str, cursors: Cursors) -> None:
    with contextlib.suppress(WebSocketDisconnect):
        try:
            async with contextlib.aclosing(merged(tenant, operation_id, cursors)) as chunks:
                async for chunk in chunks:
                    await socket.send_bytes(_TAGS[chunk.stream] + chunk.data)
            result = wire.dump(await tenant.wait_exec(operation_id)).decode()
            await socket.send_text(f'{{"result":{result}}}')
        except ColdframeError as error:
            await _send_error(socket, error)


async def _send_error(socket: WebSocket, error: ColdframeError) -> None:
    await socket.send_json({"error": wire.error_body(failures.in_words_of(socket, error))})


async def _hear(socket: WebSocket, tenant: Tenant, inner: str) -> None:
    while (message := await socket.receive())["type"] != "websocket.disconnect":
        try:
            if message.get("bytes") is not None:
                await tenant.node.write_stdin(inner, message["bytes"])
            else:
                await _obey(tenant, inner, message.get("text") or "")
        except ColdframeError as error:
            await _send_error(socket, error)


async def _obey(tenant: Tenant, inner: str, text: str) -> None:
    try:
        told = strict_json.parse(text)
    except strict_json.NotStrictError:
        told = None
    if not isinstance(told, dict) or len(told) != 1:
        raise InvalidRequestError("a text frame has one of signal, resize, close_stdin")
    ((word, value),) = told.items()
    if word == "signal":
        wanted = wire.load(Signal, json.dumps(value).encode())
        await tenant.node.signal(inner, wanted.signal, wanted.scope)
    elif word == "resize":
        size = wire.load(PtySize, json.dumps(value).encode())
        await tenant.node.resize(inner, size.rows, size.cols)
    elif word == "close_stdin":
        await tenant.node.close_stdin(inner)
    else:
        raise InvalidRequestError(f"{excerpt(word)} is none of signal, resize, close_stdin")
