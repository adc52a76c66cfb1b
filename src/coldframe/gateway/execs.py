"""/v1/execs: commands, their ends, their output, and what is sent to them while they run."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from coldframe.gateway.context import (
    DEFAULT_WAIT_S,
    RAW_BODY,
    OperationId,
    Service,
    WaitSeconds,
    body,
    documented,
    enter,
    json_answer,
    json_list,
    service_of,
    unless_gone,
)
from coldframe.gateway.identity import Scope
from coldframe.gateway.large import result_answer
from coldframe.gateway.models import ExecStarted, Reached, Signal, Totals
from coldframe.gateway.once import Once, OnceByPieces
from coldframe.gateway.tenants import Tenant
from coldframe.protocol.following import READ_BYTES
from coldframe.protocol.models import (
    ExecInfo,
    ExecRequest,
    ExecResult,
    OutputChunk,
    PtySize,
    Stream,
)
from coldframe.protocol.wire import chunk_headers

router = APIRouter(prefix="/v1", tags=["execs"])
_changes = APIRouter(prefix=router.prefix, tags=router.tags, route_class=Once)
_fed = APIRouter(prefix=router.prefix, tags=router.tags, route_class=OnceByPieces)

_START_S = 30.0
"""How long the start of a command, or a look at its output, may take."""
_MOST_OUTPUT = 1 << 24

_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"model": ExecResult, "description": "It has ended."},
    202: {"model": ExecStarted, "description": "It has not ended within `wait_s`; ask again."},
}


@router.post(
    "/sandboxes/{sandbox_id}/execs",
    response_model=None,
    responses=_ANSWERS,
    openapi_extra=documented(ExecRequest),
)
async def submit(
    request: Request, sandbox_id: str, wait_s: WaitSeconds = DEFAULT_WAIT_S
) -> Response:
    """Run a command; answer when it has ended, at the latest after `wait_s`.

    The same `operation_id` again gives the first result and runs nothing. With `wait_s=0` it is
    answered as soon as the command runs. It goes on when the client goes away.
    """
    # Most do not come here, but by `express.py`.
    tenant = enter(request, Scope.EXEC)
    wanted = tenant.request(await body(request, ExecRequest))
    inner = tenant.sandbox(sandbox_id)
    service = service_of(request)
    if wait_s == 0:
        return await _start(service, tenant, inner, wanted)
    try:
        async with service.polls.bound(wait_s):
            result = await tenant.node.exec(inner, wanted)
    except TimeoutError:
        return running(tenant, wanted.operation_id)
    return result_answer(service, tenant, result, tenant.result(result))


@router.get("/sandboxes/{sandbox_id}/execs", response_model=list[ExecInfo])
async def list_(request: Request, sandbox_id: str) -> Response:
    """List a sandbox's newest 1,000 commands whose results are kept, oldest first."""
    tenant = enter(request, Scope.READ)
    found = await tenant.node.commands(tenant.sandbox(sandbox_id))
    return json_list(tenant.commands(found))


async def _start(service: Service, tenant: Tenant, inner: str, wanted: ExecRequest) -> Response:
    with contextlib.suppress(TimeoutError):
        async with service.polls.bound(_START_S):
            await tenant.node.start_exec(inner, wanted)
    return running(tenant, wanted.operation_id)


def running(tenant: Tenant, operation_id: str | None) -> Response:
    """Answer that a command has not ended, by the node's id of it."""
    assert operation_id is not None
    started = tenant.node.exec_started(operation_id)
    shown = ExecStarted(operation_id=tenant.untagged(operation_id), started=started)
    return json_answer(shown, 202)


@router.get("/execs/{operation_id}", response_model=None, responses=_ANSWERS)
async def wait(request: Request, operation_id: OperationId, wait_s: WaitSeconds = 0.0) -> Response:
    """Return how a command ended, waiting for at most `wait_s`."""
    tenant = enter(request, Scope.READ)
    return await _ended(request, tenant, tenant.operation(operation_id), wait_s)


async def _ended(request: Request, tenant: Tenant, inner: str, wait_s: float) -> Response:
    result = await tenant.node.poll_exec(inner)
    if result is None and wait_s > 0:
        try:
            async with service_of(request).polls.bound(wait_s):
                result = await tenant.node.wait_exec(inner)
        except TimeoutError:
            pass
    if result is None:
        return running(tenant, inner)
    return result_answer(service_of(request), tenant, result, tenant.result(result))


@router.post("/execs/{operation_id}/cancel", response_model=None, responses=_ANSWERS)
async def cancel(
    request: Request, operation_id: OperationId, wait_s: WaitSeconds = DEFAULT_WAIT_S
) -> Response:
    """Kill a command and all that it started; answer how it ended, at most `wait_s` after that.

    One that still waits for its turn is killed once it runs; 202: not yet, ask again. One that has
    ended keeps its result, and loses what it left running: twice is fine.
    """
    tenant = enter(request, Scope.EXEC)
    inner = tenant.operation(operation_id)
    try:
        async with asyncio.timeout(_START_S):
            await tenant.node.cancel_exec(inner)
    except TimeoutError:
        return running(tenant, inner)
    return await _ended(request, tenant, inner, wait_s)


@router.get(
    "/execs/{operation_id}/output/{stream}",
    response_model=None,
    responses={
        200: {
            "content": {"application/octet-stream": {}},
            "description": "Bytes from the cursor on. Coldframe-Offset says where they begin, "
            "Coldframe-Dropped how many before them are no longer kept, Coldframe-Eof is 1 when "
            "nothing follows. None within `wait_s`: an empty body, and Coldframe-Eof is 0.",
        }
    },
)
async def output(
    request: Request,
    operation_id: OperationId,
    stream: Stream,
    *,
    cursor: Annotated[int, Query(ge=0)] = 0,
    max_bytes: Annotated[int, Query(ge=1, le=_MOST_OUTPUT)] = READ_BYTES,
    wait_s: WaitSeconds = 0.0,
) -> Response:
    """Return output from a cursor on: at least one byte, the end, or nothing within `wait_s`.

    Pieces have at most 256 KiB, whatever `max_bytes` says: who does not read holds one in memory.
    """
    tenant = enter(request, Scope.READ)
    inner = tenant.operation(operation_id)
    read, most = tenant.node.read_output, min(max_bytes, READ_BYTES)
    try:
        async with service_of(request).polls.bound(wait_s or _START_S):
            chunk = await read(inner, stream, cursor, most, wait_s > 0)
    except TimeoutError:
        chunk = OutputChunk(stream=stream, offset=cursor, data=b"")
    return Response(chunk.data, 200, chunk_headers(chunk), "application/octet-stream")


@_changes.delete("/execs/{operation_id}/output", status_code=204, response_model=None)
async def forget(request: Request, operation_id: OperationId) -> Response:
    """Drop an ended command's kept output. Its result stays."""
    tenant = enter(request, Scope.EXEC)
    await tenant.node.forget(tenant.operation(operation_id))
    return Response(status_code=204)


@_fed.post(
    "/execs/{operation_id}/stdin", status_code=204, response_model=None, openapi_extra=RAW_BODY
)
async def stdin(
    request: Request,
    operation_id: OperationId,
    close: Annotated[bool, Query(description="Then give the command end of file.")] = False,
) -> Response:
    """Write a command's stdin, as fast as it reads.

    Without `Idempotency-Key` not to be sent again when the connection was lost: how much was
    written is not known.
    """
    tenant = enter(request, Scope.EXEC)
    inner = tenant.operation(operation_id)
    async for piece in request.stream():
        if piece:
            await tenant.node.write_stdin(inner, piece)
    if close:
        await tenant.node.close_stdin(inner)
    return Response(status_code=204)


@_changes.post(
    "/execs/{operation_id}/signal", response_model=Reached, openapi_extra=documented(Signal)
)
async def signal(request: Request, operation_id: OperationId) -> Response:
    """Send a signal to a command."""
    tenant = enter(request, Scope.EXEC)
    wanted = await body(request, Signal)
    inner = tenant.operation(operation_id)
    # A command that still waits for its turn can be signalled once it runs.
    sent = tenant.node.signal(inner, wanted.signal, wanted.scope)
    return json_answer(Reached(reached=await unless_gone(request, sent)))


@_changes.put(
    "/execs/{operation_id}/terminal",
    status_code=204,
    response_model=None,
    openapi_extra=documented(PtySize),
)
async def resize(request: Request, operation_id: OperationId) -> Response:
    """Set the size of a command's terminal."""
    tenant = enter(request, Scope.EXEC)
    size = await body(request, PtySize)
    await tenant.node.resize(tenant.operation(operation_id), size.rows, size.cols)
    return Response(status_code=204)


@router.post("/execs/{operation_id}/mark", response_model=Totals)
async def mark(request: Request, operation_id: OperationId) -> Response:
    """Drain what is in the pipes now; return how much each stream has had."""
    tenant = enter(request, Scope.READ)
    out, err = await unless_gone(request, tenant.node.mark(tenant.operation(operation_id)))
    return json_answer(Totals(stdout=out, stderr=err))


router.routes.extend([*_changes.routes, *_fed.routes])
