"""/v1/sandboxes: create, look, wait, renew, delete, network policy, processes."""

from __future__ import annotations

import math
import time
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from coldframe.gateway.context import (
    ExpectedVersion,
    IdempotencyKey,
    WaitSeconds,
    body,
    documented,
    enter,
    json_answer,
    json_list,
    raw_queries,
    service_of,
    unless_gone,
)
from coldframe.gateway.identity import Scope
from coldframe.gateway.models import Lease, SandboxPage
from coldframe.gateway.once import Once, OnceOwned
from coldframe.gateway.presence import PresenceName, presence_of
from coldframe.protocol.errors import InvalidRequestError
from coldframe.protocol.models import (
    MOST_CHANGES,
    DiskExtension,
    FileChanges,
    Fingerprint,
    GuardReport,
    GuardRequest,
    ProcessInfo,
    SandboxInfo,
    SandboxSpec,
    SandboxState,
)
from coldframe.protocol.network import EgressEvents, NetworkPolicy

router = APIRouter(prefix="/v1/sandboxes", tags=["sandboxes"])
_changes = APIRouter(prefix=router.prefix, tags=router.tags, route_class=Once)
_owned = APIRouter(prefix=router.prefix, tags=router.tags, route_class=OnceOwned)


@router.post("", status_code=201, response_model=SandboxInfo, openapi_extra=documented(SandboxSpec))
async def create(
    request: Request, idempotency_key: IdempotencyKey = None, presence: PresenceName = None
) -> Response:
    """Make a sandbox; answer once it is ready.

    With `Idempotency-Key` it is made although the client goes away, and the same key gives the
    same answer. Without one it is undone if the client goes away before it is ready. With
    `Coldframe-Presence` it ends with the client that is there under that name (`/v1/presence`).
    """
    tenant = enter(request, Scope.CREATE)
    spec = await body(request, SandboxSpec)
    began = time.perf_counter()
    making = tenant.create(spec, idempotency_key, presence_of(request, tenant, presence))
    info = await (making if idempotency_key is not None else unless_gone(request, making))
    request.state.sandbox = info.id
    service_of(request).meters.boot.add(time.perf_counter() - began)
    return json_answer(info, 201)


@router.get("", response_model=SandboxPage)
async def list_(
    request: Request,
    label: Annotated[
        list[str] | None, Query(description="`name=value`; repeated: all must hold.")
    ] = None,
    cursor: Annotated[str | None, Query(description="`next_cursor` of the page before.")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Response:
    """List the caller's sandboxes that have not ended, oldest first, a page at a time."""
    tenant = enter(request, Scope.READ)
    asked = raw_queries(request, "label") if label else ()
    pairs = [one.decode("utf-8", "surrogateescape").partition("=") for one in asked]
    if not all(equals for _, equals, _ in pairs):
        raise InvalidRequestError("label: write name=value")
    place = None if cursor is None else _place(cursor)
    found = await tenant.list({name: value for name, _, value in pairs}, place, limit + 1)
    page = found[:limit]
    more = len(found) > len(page)
    return json_answer(
        SandboxPage(
            sandboxes=page,
            next_cursor=f"{page[-1].created_at!r}/{page[-1].id}" if more else None,
        )
    )


def _place(cursor: str) -> tuple[float, str]:
    at, slash, sandbox_id = cursor.partition("/")
    try:
        place = float(at)
    except ValueError:
        place = math.nan
    if not (slash and math.isfinite(place)):
        raise InvalidRequestError("cursor: take next_cursor of the page before")
    return place, sandbox_id


@router.get("/{sandbox_id}", response_model=SandboxInfo)
async def get(
    request: Request,
    sandbox_id: str,
    state: Annotated[
        list[SandboxState] | None, Query(description="Wait until it is in one of these states.")
    ] = None,
    wait_s: WaitSeconds = 30.0,
) -> Response:
    """Return what is known of a sandbox, by id or by the name of a live one.

    With `state`, once it is in one of those, has ended, or `wait_s` are over.
    """
    tenant = enter(request, Scope.READ)
    if not state:
        return json_answer(await tenant.get(sandbox_id))
    inner = tenant.sandbox(sandbox_id)
    try:
        async with service_of(request).polls.bound(wait_s):
            info = await tenant.node.wait_for_state(inner, state, wait_s)
    except TimeoutError:
        info = await tenant.node.get(inner)
    return json_answer(tenant.outward(info))


@_owned.delete("/{sandbox_id}", response_model=SandboxInfo)
async def delete(
    request: Request, sandbox_id: str, expected_version: ExpectedVersion = None
) -> Response:
    """End a sandbox; answer when nothing of it is left. One that has ended already is fine."""
    tenant = enter(request, Scope.CREATE)
    info = await tenant.node.delete(tenant.sandbox(sandbox_id), expected_version=expected_version)
    return json_answer(tenant.outward(info))


@_owned.put("/{sandbox_id}/lease", response_model=SandboxInfo, openapi_extra=documented(Lease))
async def renew(
    request: Request, sandbox_id: str, expected_version: ExpectedVersion = None
) -> Response:
    """Let the lease end so many seconds from now."""
    tenant = enter(request, Scope.CREATE)
    lease = await body(request, Lease)
    info = await tenant.node.renew(
        tenant.sandbox(sandbox_id), lease.ttl_s, expected_version=expected_version
    )
    return json_answer(tenant.outward(info))


@_owned.put(
    "/{sandbox_id}/network", response_model=SandboxInfo, openapi_extra=documented(NetworkPolicy)
)
async def set_network(
    request: Request, sandbox_id: str, expected_version: ExpectedVersion = None
) -> Response:
    """Put a network policy in force, for open connections too."""
    tenant = enter(request, Scope.CREATE)
    policy = await body(request, NetworkPolicy)
    info = await tenant.node.set_network(
        tenant.sandbox(sandbox_id), policy, expected_version=expected_version
    )
    return json_answer(tenant.outward(info))


@router.get("/{sandbox_id}/network", response_model=NetworkPolicy)
async def network(request: Request, sandbox_id: str) -> Response:
    """Return the network policy that is in force, without its secrets."""
    tenant = enter(request, Scope.READ)
    return json_answer((await tenant.get(sandbox_id)).spec.network)


@router.get("/{sandbox_id}/egress", response_model=EgressEvents)
async def egress(
    request: Request,
    sandbox_id: str,
    cursor: Annotated[int, Query(ge=0)] = 0,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
) -> Response:
    """Return decisions about the network from a cursor on."""
    tenant = enter(request, Scope.READ)
    events = await tenant.node.egress_events(tenant.sandbox(sandbox_id), cursor, limit)
    return json_answer(events)


@_owned.put(
    "/{sandbox_id}/disk",
    status_code=204,
    response_model=None,
    openapi_extra=documented(DiskExtension),
)
async def extend_disk(request: Request, sandbox_id: str) -> Response:
    """Let a sandbox hold a little more than its disk limit says."""
    tenant = enter(request, Scope.CREATE)
    await tenant.node.extend_disk(tenant.sandbox(sandbox_id), await body(request, DiskExtension))
    return Response(status_code=204)


@_changes.put(
    "/{sandbox_id}/guard",
    status_code=204,
    response_model=None,
    openapi_extra=documented(GuardRequest),
)
async def guard(request: Request, sandbox_id: str) -> Response:
    """Guard a directory: one command alone may write it, and only by what nobody planted."""
    tenant = enter(request, Scope.EXEC)
    asked = await body(request, GuardRequest)
    inner = asked.model_copy(update={"operation_id": tenant.operation(asked.operation_id)})
    await tenant.node.guard(tenant.sandbox(sandbox_id), inner)
    return Response(status_code=204)


@_changes.post("/{sandbox_id}/guard/report", response_model=GuardReport)
async def guard_report(request: Request, sandbox_id: str) -> Response:
    """End all writing in the guarded directory, and tell what is in it."""
    tenant = enter(request, Scope.EXEC)
    return json_answer(await tenant.node.guard_report(tenant.sandbox(sandbox_id)))


@_changes.delete("/{sandbox_id}/guard", status_code=204, response_model=None)
async def unguard(request: Request, sandbox_id: str) -> Response:
    """Take the guarded directory away."""
    tenant = enter(request, Scope.EXEC)
    await tenant.node.unguard(tenant.sandbox(sandbox_id))
    return Response(status_code=204)


@router.get("/{sandbox_id}/fingerprint", response_model=Fingerprint)
async def fingerprint(request: Request, sandbox_id: str) -> Response:
    """Return digests of the sandbox's state."""
    tenant = enter(request, Scope.READ)
    taken = tenant.node.fingerprint(tenant.sandbox(sandbox_id))
    return json_answer(await unless_gone(request, taken))


@router.get("/{sandbox_id}/changes", response_model=FileChanges)
async def changes(
    request: Request,
    sandbox_id: str,
    since: Annotated[
        str | None, Query(description="The mark of an earlier answer; else over the image.")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=MOST_CHANGES)] = MOST_CHANGES,
) -> Response:
    """Return which files were created, changed or removed since a mark. Paths are base64."""
    tenant = enter(request, Scope.READ)
    told = tenant.node.changes(tenant.sandbox(sandbox_id), since, limit)
    return json_answer(await unless_gone(request, told))


@router.get("/{sandbox_id}/processes", response_model=list[ProcessInfo])
async def processes(request: Request, sandbox_id: str) -> Response:
    """Return all processes but pid 1. Their names are hostile text."""
    tenant = enter(request, Scope.READ)
    found = await tenant.node.processes(tenant.sandbox(sandbox_id))
    return json_list(tenant.processes(found))


@_changes.delete("/{sandbox_id}/processes", response_model=list[ProcessInfo])
async def kill_processes(
    request: Request,
    sandbox_id: str,
    operation_id: Annotated[
        str | None, Query(description="Only those of this command; else everything but pid 1.")
    ] = None,
) -> Response:
    """Kill processes; return what was killed, once it is dead."""
    tenant = enter(request, Scope.EXEC)
    inner = None if operation_id is None else tenant.operation(operation_id)
    killed = await tenant.node.kill_processes(tenant.sandbox(sandbox_id), inner)
    return json_list(tenant.processes(killed))


router.routes.extend([*_changes.routes, *_owned.routes])
