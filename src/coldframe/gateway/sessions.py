"""/v1/sessions: shells that live on between commands."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import Response

from coldframe.gateway.context import (
    DEFAULT_WAIT_S,
    WaitSeconds,
    body,
    documented,
    enter,
    json_answer,
    json_list,
    service_of,
)
from coldframe.gateway.execs import running
from coldframe.gateway.identity import Scope
from coldframe.gateway.large import result_answer
from coldframe.gateway.models import ExecStarted
from coldframe.gateway.once import Once
from coldframe.protocol.ids import OPERATION_PATTERN
from coldframe.protocol.models import SessionExecRequest, SessionInfo, SessionRequest, SessionResult

router = APIRouter(prefix="/v1", tags=["sessions"])
_changes = APIRouter(prefix=router.prefix, tags=router.tags, route_class=Once)

SessionId = Annotated[
    str,
    Path(
        description="The operation id of the session's shell.",
        json_schema_extra={"pattern": OPERATION_PATTERN},
    ),
]
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"model": SessionResult, "description": "It has ended."},
    202: {"model": ExecStarted, "description": "It has not ended within `wait_s`; ask again."},
}


@router.post(
    "/sandboxes/{sandbox_id}/sessions",
    status_code=201,
    response_model=SessionInfo,
    openapi_extra=documented(SessionRequest),
)
async def create(request: Request, sandbox_id: str) -> Response:
    """Start a shell that lives on between commands; answer once it takes them.

    Its id is the request's `operation_id`; the same again gives the same session. It needs no
    client: it lives until it is closed, ends by itself, or its sandbox ends.
    """
    tenant = enter(request, Scope.EXEC)
    asked = await body(request, SessionRequest)
    inner = asked.model_copy(update={"operation_id": tenant.operation(asked.operation_id)})
    made = await tenant.node.sessions().create(tenant.sandbox(sandbox_id), inner)
    return json_answer(tenant.session(made), 201)


@router.get("/sandboxes/{sandbox_id}/sessions", response_model=list[SessionInfo])
async def list_(request: Request, sandbox_id: str) -> Response:
    """List the sessions of a sandbox whose shell lives, oldest first."""
    tenant = enter(request, Scope.READ)
    found = await tenant.node.sessions().list(tenant.sandbox(sandbox_id))
    return json_list(map(tenant.session, found))


@router.get("/sessions/{session_id}", response_model=SessionInfo)
async def get(request: Request, session_id: SessionId) -> Response:
    """Return what is known of a session: what runs in it, or how its shell ended."""
    tenant = enter(request, Scope.READ)
    found = await tenant.node.sessions().get(tenant.operation(session_id))
    return json_answer(tenant.session(found))


@router.post(
    "/sessions/{session_id}/execs",
    response_model=None,
    responses=_ANSWERS,
    openapi_extra=documented(SessionExecRequest),
)
async def run(
    request: Request, session_id: SessionId, wait_s: WaitSeconds = DEFAULT_WAIT_S
) -> Response:
    """Run one command line in its turn; answer when it has ended, at the latest after `wait_s`.

    The same `operation_id` again gives the first result and runs nothing. It is an exec like
    others: `/v1/execs/{operation_id}` has its output as it comes, its result, and `cancel`, which
    leaves the shell alive. It reads end of file.
    """
    tenant = enter(request, Scope.EXEC)
    asked = await body(request, SessionExecRequest)
    inner = asked.model_copy(update={"operation_id": tenant.operation(asked.operation_id)})
    session = tenant.operation(session_id)
    try:
        async with service_of(request).polls.bound(wait_s):
            told = await tenant.node.sessions().exec(session, inner)
    except TimeoutError:
        return running(tenant, inner.operation_id)
    return result_answer(service_of(request), tenant, told.result, tenant.session_result(told))


@_changes.delete("/sessions/{session_id}", response_model=SessionInfo)
async def close(
    request: Request,
    session_id: SessionId,
    kill: Annotated[
        bool, Query(description="At once, with all that it started; else after its last command.")
    ] = False,
) -> Response:
    """End a session; answer how its shell ended. What its commands left running lives on."""
    tenant = enter(request, Scope.EXEC)
    ended = await tenant.node.sessions().close(tenant.operation(session_id), kill=kill)
    return json_answer(tenant.session(ended))


router.routes.extend(_changes.routes)
