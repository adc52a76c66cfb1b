"""What is said of the node and the service as a whole."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

import coldframe
from coldframe.gateway.context import (
    enter,
    json_answer,
    service_of,
)
from coldframe.gateway.identity import Scope
from coldframe.gateway.meters import CONTENT_TYPE
from coldframe.gateway.models import Health, Versions
from coldframe.protocol import PROTOCOL_VERSION
from coldframe.protocol.models import Capabilities, Ledger
from coldframe.protocol.resources import ResourceReport

router = APIRouter(tags=["service"])


@router.get("/v1/versions", response_model=Versions)
async def versions(request: Request) -> Response:
    """Return what this service speaks. Needs no key."""
    del request
    return json_answer(Versions(coldframe=coldframe.__version__, protocol=PROTOCOL_VERSION))


@router.get("/v1/capabilities", response_model=Capabilities)
async def capabilities(request: Request) -> Response:
    """Return what the runtime has probed on its machine."""
    return json_answer(enter(request, Scope.READ).node.capabilities())


@router.get("/v1/resources", response_model=ResourceReport)
async def resources(request: Request) -> Response:
    """Return what the caller's sandboxes are limited to, and its quota; the node's for admins."""
    return json_answer(await enter(request, Scope.READ).resources())


@router.get("/v1/ledger", response_model=Ledger)
async def ledger(request: Request) -> Response:
    """Count every sandbox of the node, whoever's, and compare the kernel with those that live."""
    return json_answer(await enter(request, Scope.ADMIN).node.ledger())


@router.get("/metrics", response_model=None, responses={200: {"content": {"text/plain": {}}}})
async def metrics(request: Request) -> Response:
    """Return counts and latencies in the text format of Prometheus."""
    node = enter(request, Scope.ADMIN).node
    text = service_of(request).meters.render(node.load(), await node.ledger())
    return Response(text, headers={"content-type": CONTENT_TYPE})


@router.get("/healthz", response_model=Health)
async def healthz(request: Request) -> Response:
    """Answer 200 only if a sandbox can be made: one is made and ended, at most once in a while."""
    return json_answer(await service_of(request).health.latest())
