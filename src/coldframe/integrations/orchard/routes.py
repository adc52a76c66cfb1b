"""Orchard's routes, answered by a Coldframe node."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import time
import uuid
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Query, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

import coldframe
from coldframe.gateway import failures
from coldframe.gateway.context import Service, body, enter, service_of, unless_gone
from coldframe.gateway.identity import Scope
from coldframe.gateway.tenants import Tenant
from coldframe.integrations.orchard import files, services, terminal, words
from coldframe.integrations.orchard.jobs import Job, Jobs
from coldframe.node.quotas import in_use
from coldframe.protocol.errors import (
    CapacityError,
    ColdframeError,
    Execution,
    ProgramNotFoundError,
    SandboxNotFoundError,
)
from coldframe.protocol.ids import new_operation_id
from coldframe.protocol.models import (
    MIB,
    ExecRequest,
    SandboxInfo,
    SandboxSpec,
)

router = APIRouter()

_BODY_BYTES = 128 * MIB
"""Files travel in JSON here, so a body may be larger than elsewhere."""
_DRAIN_S = 30.0
_RETRY_S = "5"
_OVERLOADED = 503

_Timeout = Annotated[int, Query(ge=0, le=86_400)]


def make_app(service: Service) -> FastAPI:
    """Return an application that knows its callers: `state.identity` of each request."""
    app = FastAPI(openapi_url=None)
    app.state.service = copy.copy(service)  # the same in all else
    app.state.service.settings = dataclasses.replace(service.settings, json_bytes=_BODY_BYTES)
    app.state.jobs = Jobs()
    app.include_router(router)
    app.state.exposed = {}
    app.include_router(files.router)
    app.include_router(services.router)
    app.include_router(terminal.router)
    app.add_exception_handler(ColdframeError, _answer_ours)
    app.add_exception_handler(HTTPException, _answer_http)
    app.add_exception_handler(ClientDisconnect, _answer_nobody)
    app.add_exception_handler(Exception, _answer_fault)
    return app


# --- errors ---------------------------------------------------------------------------


def refusal(error: ColdframeError) -> Response:
    """Say an error as Orchard does.

    Its client sends again what was answered 503, and sends a command again after any error: so
    503 means that nothing was done, and a command that may have run is never an error.
    """
    status = failures.status_of(error)
    if isinstance(error, CapacityError) and error.execution is Execution.NOT_EXECUTED:
        status = _OVERLOADED
    elif status in {_OVERLOADED, 507}:
        status = 500
    elif status == 410:
        status = 404
    headers = {"Retry-After": _RETRY_S} if status == _OVERLOADED else None
    return JSONResponse({"detail": str(error)}, status, headers)


async def _answer_ours(request: Request, error: Exception) -> Response:
    assert isinstance(error, ColdframeError)
    return refusal(failures.in_words_of(request, error))


async def _answer_http(request: Request, error: Exception) -> Response:
    del request
    assert isinstance(error, HTTPException)
    return JSONResponse({"detail": error.detail}, error.status_code)


async def _answer_nobody(request: Request, error: Exception) -> Response:
    del request, error
    return Response(status_code=400)


async def _answer_fault(request: Request, error: Exception) -> Response:
    del request, error  # raised again, and logged, by whoever is outside
    told = {"error": "Internal server error", "detail": "the service failed; its log says why"}
    return JSONResponse(told, 500, {"connection": "close"})


# --- the service ----------------------------------------------------------------------


@router.get("/")
async def root() -> dict[str, str]:
    """Say who is here. Needs no key."""
    return {"service": "coldframe", "version": coldframe.__version__, "status": "running"}


@router.get("/health")
async def health(request: Request) -> Response:
    """Answer 200 only if a sandbox can be made. Needs no key."""
    try:
        await service_of(request).health.latest()
    except ColdframeError as error:
        return JSONResponse({"status": "unhealthy", "detail": str(error)}, _OVERLOADED)
    return JSONResponse({"status": "healthy"})


@router.get("/resources")
async def resources(request: Request) -> dict[str, Any]:
    """Say what the node has, what is free of it, and what the caller's sandboxes may take."""
    tenant = enter(request, Scope.READ)
    node = await tenant.node.resources()
    live = await tenant.list({})
    whole = words.amounts_of(node.capacity)
    return {
        "status": "ok",
        "nodes": [{"name": tenant.node.id, "capacity": whole, "allocatable": whole}],
        "total_capacity": whole,
        "total_allocatable": whole,
        "total_requested": words.amounts_of(in_use(info.spec for info in live)),
        # Measured: limits are promises, and all of them may be more than there is.
        "available": words.amounts_of(node.free),
        "sandbox_pods": [
            {
                "name": info.spec.name or info.id,
                "cpu": info.spec.cpu,
                "phase": "Pending" if info.ready_at is None else "Running",
            }
            for info in live
        ],
    }


# --- sandboxes ------------------------------------------------------------------------


@router.post("/sandboxes")
async def create(request: Request) -> dict[str, Any]:
    """Make a sandbox. It is ready when this answers, and undone if the caller goes away before."""
    tenant = enter(request, Scope.CREATE)
    asked = await body(request, words.Create)
    sandbox_id = asked.sandbox_id or uuid.uuid4().hex[:12]
    spec = words.spec_of(asked, sandbox_id)
    patience = asked.timeout or words.READY_S
    try:
        async with asyncio.timeout(patience):
            info = await unless_gone(request, _made(tenant, spec))
    except TimeoutError:
        raise HTTPException(408, f"no sandbox was ready within {patience} s") from None
    request.state.sandbox = info.id
    return {**words.settings_of(info.spec), "timeout": patience, "status": "ready"}


async def _made(tenant: Tenant, spec: SandboxSpec) -> SandboxInfo:
    info = await tenant.create(spec, None)
    try:
        await tenant.node.files(info.id).mkdir(
            words.WORKDIR, mode=0o777, owner=None, parents=True, exist_ok=True
        )
    except BaseException:
        await asyncio.shield(tenant.node.delete(info.id))
        raise
    return info


@router.get("/sandboxes/{sandbox_id}")
async def get(request: Request, sandbox_id: str) -> dict[str, Any]:
    """Say how a sandbox is."""
    return words.state_of(await words.found(enter(request, Scope.READ), sandbox_id))


@router.get("/sandboxes/{sandbox_id}/wait")
async def wait(
    request: Request, sandbox_id: str, timeout: _Timeout = words.READY_S
) -> dict[str, Any]:
    """Say how a sandbox is: whatever can be found is ready, or has failed."""
    del timeout
    return words.state_of(await words.found(enter(request, Scope.READ), sandbox_id))


@router.delete("/sandboxes/{sandbox_id}")
async def delete(request: Request, sandbox_id: str) -> dict[str, str]:
    """End a sandbox. One that nobody knows is fine."""
    tenant = enter(request, Scope.CREATE)
    with contextlib.suppress(SandboxNotFoundError):
        await tenant.node.delete(tenant.sandbox(sandbox_id))
    return {"status": "deleted", "sandbox_id": sandbox_id}


@router.post("/sandboxes/{sandbox_id}/heartbeat")
async def heartbeat(request: Request, sandbox_id: str) -> dict[str, str]:
    """Say that the caller lives: from now on its sandbox ends if that is not said again in time."""
    tenant = enter(request, Scope.CREATE)
    info = await words.found(tenant, sandbox_id)
    left = info.created_at + words.TTL_S - time.time()
    await tenant.node.renew(info.id, max(1.0, min(words.HEARTBEAT_S, left)))
    return {"status": "ok", "sandbox_id": sandbox_id}


# --- commands -------------------------------------------------------------------------


@router.post("/sandboxes/{sandbox_id}/exec")
async def execute(request: Request, sandbox_id: str) -> dict[str, Any]:
    """Run a command; with `wait`, answer when it has ended."""
    tenant = enter(request, Scope.EXEC)
    asked = await body(request, words.Command)
    await words.found(tenant, sandbox_id)
    jobs: Jobs = request.app.state.jobs
    job = await jobs.submit(tenant, sandbox_id, asked)
    if not asked.wait:
        return {"job_id": job.id, "status": "queued"}
    patience = (asked.timeout_seconds or words.COMMAND_S) + _DRAIN_S
    with jobs.waited_for(job, asked):
        await unless_gone(request, _until_over(request, job, patience))
    error = job.error
    if error is not None and error.retryable and error.execution is Execution.NOT_EXECUTED:
        raise error
    return await job.shown()


async def _until_over(request: Request, job: Job, seconds: float) -> None:
    try:
        async with service_of(request).polls.bound(seconds):
            await job.over.wait()
    except TimeoutError:
        pass  # it is shown as it is


@router.get("/jobs/{job_id}")
async def job_now(request: Request, job_id: str) -> dict[str, Any]:
    """Say how a command is."""
    jobs: Jobs = request.app.state.jobs
    return await jobs.get(enter(request, Scope.READ), job_id).shown()


@router.get("/jobs/{job_id}/wait")
async def job_wait(request: Request, job_id: str, timeout: _Timeout = 300) -> dict[str, Any]:
    """Say how a command is once it has ended, or after `timeout`."""
    jobs: Jobs = request.app.state.jobs
    job = jobs.get(enter(request, Scope.READ), job_id)
    await unless_gone(request, _until_over(request, job, timeout))
    return await job.shown()


@router.post("/sandboxes/{sandbox_id}/apply_patch")
async def apply_patch(request: Request, sandbox_id: str) -> dict[str, Any]:
    """Apply a patch with the image's git."""
    tenant = enter(request, Scope.EXEC)
    asked = await body(request, words.Patch)
    info = await words.found(tenant, sandbox_id)
    wanted = ExecRequest(
        argv=("git", "apply", "-"),
        stdin=asked.patch.encode(errors="surrogateescape"),
        deadline_s=float(asked.timeout_seconds),
        operation_id=tenant.operation(new_operation_id()),
    )
    try:
        result = await tenant.node.exec(info.id, wanted)
    except ProgramNotFoundError:
        error = "the image has no git to apply a patch with"
        return {"success": False, "stdout": "", "stderr": "", "exit_code": 127, "error": error}
    return {
        "success": result.ok,
        "stdout": result.text,
        "stderr": result.stderr.decode("utf-8", "replace"),
        "exit_code": result.exit_code,
        "error": None if result.exit_code is not None else f"it was cut short: {result.reason}",
    }
