"""Orchard's services: a URL for a port of a sandbox, which can be taken back."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException

from coldframe.gateway.context import body, enter, service_of, unless_gone
from coldframe.gateway.identity import Scope
from coldframe.gateway.tenants import Tenant
from coldframe.gateway.tickets import PREFIX, Ticket
from coldframe.integrations.orchard import words
from coldframe.protocol.errors import ColdframeError, PortUrlInvalidError

router = APIRouter(prefix="/sandboxes/{sandbox_id}/services")

_TTL_S = 3600.0
_LOOK_S = 0.2
_PROBE_S = 5.0
_MOST_PORTS = 8

Exposed = dict[str, dict[int, dict[str, int]]]
"""By the node's id of a sandbox, and by port: tokens, and when each expires."""


@router.post("")
async def expose(request: Request, sandbox_id: str) -> dict[str, Any]:
    """Return a URL that leads to a port, once something answers there if that is asked for."""
    tenant = enter(request, Scope.EXEC)
    asked = await body(request, words.Expose)
    info = await words.found(tenant, sandbox_id)
    exposed: Exposed = request.app.state.exposed
    _drop_expired(exposed)
    ports = exposed.get(info.id, {})
    if asked.port not in ports and len(ports) >= _MOST_PORTS:
        raise HTTPException(409, f"Sandbox {sandbox_id} exposes {_MOST_PORTS} ports already")
    if asked.wait_ready:
        try:
            async with asyncio.timeout(asked.ready_timeout):
                await unless_gone(request, _until_ready(tenant, info.id, asked))
        except TimeoutError:
            said = f"{asked.port} did not answer {asked.health_path} within {asked.ready_timeout}s"
            raise HTTPException(408, f"Service on port {said}") from None
    expires_at = math.ceil(time.time() + (asked.ttl_seconds or _TTL_S))
    token = service_of(request).tickets.issue(Ticket(info.id, asked.port, expires_at))
    exposed.setdefault(info.id, {}).setdefault(asked.port, {})[token] = expires_at
    return {
        "sandbox_id": sandbox_id,
        "port": asked.port,
        # Without a last slash: clients put `/ws` and the like behind it.
        "url": f"{request.url.scheme}://{request.url.netloc}{PREFIX}{token}",
        "expires_at": float(expires_at),
    }


def _drop_expired(exposed: Exposed) -> None:
    now = time.time()
    for sandbox_id, ports in list(exposed.items()):
        for port, tokens in list(ports.items()):
            ports[port] = {token: until for token, until in tokens.items() if until > now}
            if not ports[port]:
                del ports[port]
        if not ports:
            del exposed[sandbox_id]


async def _until_ready(tenant: Tenant, inner: str, asked: words.Expose) -> None:
    while not await _answers(tenant, inner, asked):  # noqa: ASYNC110 - nobody tells us
        await asyncio.sleep(_LOOK_S)


async def _answers(tenant: Tenant, inner: str, asked: words.Expose) -> bool:
    """Whether an HTTP server says anything but that it failed."""
    try:
        async with asyncio.timeout(_PROBE_S):
            reader, writer = await tenant.node.connect(inner, asked.port)
            try:
                line = f"GET {asked.health_path} HTTP/1.1\r\nHost: localhost:{asked.port}\r\n"
                writer.write(f"{line}Connection: close\r\n\r\n".encode("latin-1"))
                version, _, rest = (await reader.readline()).partition(b" ")
            finally:
                writer.close()
    except (ColdframeError, OSError, ValueError):
        return False
    return version.startswith(b"HTTP/1.") and rest[:1] in {b"2", b"3", b"4"}


@router.get("")
async def exposed(request: Request, sandbox_id: str) -> dict[str, Any]:
    """List the ports that URLs lead to."""
    info = await words.found(enter(request, Scope.READ), sandbox_id)
    known: Exposed = request.app.state.exposed
    _drop_expired(known)
    return {"sandbox_id": sandbox_id, "ports": sorted(known.get(info.id, {}))}


@router.delete("/{port}")
async def revoke(request: Request, sandbox_id: str, port: int) -> dict[str, Any]:
    """Let every URL of a port lead nowhere from now on."""
    info = await words.found(enter(request, Scope.EXEC), sandbox_id)
    known: Exposed = request.app.state.exposed
    tokens = known.get(info.id, {}).pop(port, None)
    if tokens is None:
        raise HTTPException(404, f"Port {port} is not exposed for sandbox {sandbox_id}")
    for token in tokens:
        with contextlib.suppress(PortUrlInvalidError):  # its time is over
            service_of(request).tickets.revoke(token)
    return {"status": "revoked", "sandbox_id": sandbox_id, "port": port}
