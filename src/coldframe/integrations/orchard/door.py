"""Lets Orchard's requests in beside Coldframe's own: its paths, its way to show a key."""

from __future__ import annotations

import re
from urllib.parse import parse_qs

from starlette.responses import JSONResponse
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from coldframe.gateway.context import Service
from coldframe.gateway.guard import Admission, Guard
from coldframe.gateway.identity import Identity
from coldframe.gateway.watch import Watch
from coldframe.integrations.orchard import files, routes, services, terminal
from coldframe.protocol.errors import ColdframeError

_PATHS = re.compile(r"/|/(?:health|resources)|/(?:sandboxes|jobs)(?:/.*)?", re.DOTALL)
_OPEN = frozenset({"/", "/health"})
_PROTOCOL_PREFIX = "api_key."
_MISSING, _INVALID = 401, 403


class Orchard:
    """Serves Orchard's routes of one service."""

    def __init__(self, service: Service) -> None:
        self._app = routes.make_app(service)

    @property
    def routes(self) -> list[BaseRoute]:
        """Its routes, to be looked up by what is asked for."""
        return [
            *routes.router.routes,
            *files.router.routes,
            *services.router.routes,
            *terminal.router.routes,
        ]

    def beside(self, app: ASGIApp, admit: Admission, watch: Watch) -> ASGIApp:
        """Return an application that answers Orchard's paths, and leaves others to `app`."""

        # A key that is revoked ends what is open with it here, too.
        admitted = Guard(self._app, _known, watch)

        async def both(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "lifespan" or _PATHS.fullmatch(scope["path"]) is None:
                await app(scope, receive, send)
                return
            if scope["path"] in _OPEN:
                await self._app(scope, receive, send)
            elif await _admit(scope, receive, send, admit):
                await admitted(scope, receive, send)

        return both


async def _known(scope: Scope) -> Identity:
    identity: Identity = scope["state"]["identity"]
    return identity


async def _admit(scope: Scope, receive: Receive, send: Send, admit: Admission) -> bool:
    """Say who asks in the scope's state; one who may not is answered."""
    key = _key(scope)
    state = scope.setdefault("state", {})
    shown = dict(scope)
    if key is not None:
        bearer = (b"authorization", f"Bearer {key}".encode("latin-1", "replace"))
        others = [(name, value) for name, value in scope["headers"] if name != bearer[0]]
        shown["headers"] = [*others, bearer]
    try:
        state["identity"] = await admit(shown)
    except ColdframeError as error:
        if scope["type"] == "websocket":
            await terminal.refuse(WebSocket(scope, receive, send), terminal.UNAUTHORIZED)
        else:
            status = _MISSING if key is None else _INVALID
            await JSONResponse({"detail": str(error)}, status)(scope, receive, send)
        return False
    return True


def _key(scope: Scope) -> str | None:
    headers: dict[bytes, bytes] = dict(scope["headers"])
    if b"x-api-key" in headers:
        return headers[b"x-api-key"].decode("latin-1")
    if scope["type"] != "websocket":
        return None
    query: bytes = scope["query_string"]
    asked = parse_qs(query.decode("latin-1")).get("api_key")
    if asked:
        return asked[0]
    protocols: list[str] = scope.get("subprotocols", [])
    for protocol in protocols:
        if protocol.startswith(_PROTOCOL_PREFIX):
            scope.setdefault("state", {})["subprotocol"] = protocol
            return protocol.removeprefix(_PROTOCOL_PREFIX)
    return None
