"""The door: nobody's request gets to a route before it is known who asks.

On a unix socket the kernel says who connects (`protocol.py`); on TCP a key does. A service without
keys listens on loopback only, and then takes no request that a web page could have sent: what
names another host, or comes from another origin, is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
from collections.abc import Awaitable, Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coldframe.gateway import failures
from coldframe.gateway.behalf import HEADER, heard
from coldframe.gateway.identity import Identity, local
from coldframe.gateway.keys import authenticate
from coldframe.gateway.store import Store
from coldframe.gateway.watch import Watch
from coldframe.protocol.errors import (
    ColdframeError,
    InvalidRequestError,
    NotAuthenticatedError,
    VersionMismatchError,
)
from coldframe.protocol.wire import (
    SPOKEN_VERSIONS,
    VERSION_HEADER,
    common_version,
)

OPEN_PATHS = frozenset({"/healthz", "/v1/versions", "/openapi.json"})
"""What anybody may ask: they tell nothing of anybody's."""

Admission = Callable[[Scope], Awaitable[Identity]]
"""Says who asks, or raises a ColdframeError."""

_VERSION = VERSION_HEADER.lower().encode("ascii")
_ONCE = frozenset({b"host", b"authorization", b"idempotency-key", _VERSION, HEADER})
"""Headers that say who asks, where, and whether again: of two a proxy may have read the other."""


async def by_socket(scope: Scope) -> Identity:
    """Admit who could connect to the unix socket: root, or the node's own user."""
    del scope
    return local("unix socket")


def by_key(store: Store) -> Admission:
    """Admit holders of keys; anybody on this machine as long as no key was ever made."""

    async def admit(scope: Scope) -> Identity:
        headers = scope["headers"]
        authorization = _header(headers, b"authorization")
        if authorization is None and await store.keyless():
            _require_no_web_page(headers)
            return local("loopback without keys")
        return await authenticate(store, authorization)

    return admit


def _require_no_web_page(headers: list[tuple[bytes, bytes]]) -> None:
    host = _header(headers, b"host") or ""
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    # A page of a sandbox's own, under /p/, has this service's origin: its reads name no origin, but
    # where they come from.
    by_page = (
        _header(headers, b"origin") is not None
        or _header(headers, b"referer") is not None
        or _header(headers, b"sec-fetch-site") not in {None, "none"}
    )
    if by_page or not is_loopback(name.strip("[]")):
        raise NotAuthenticatedError(
            "without keys only programs of this machine are served, by a loopback address and not "
            "from web pages; make a key: coldframe key create"
        )


@functools.lru_cache(maxsize=256)
def is_loopback(host: str) -> bool:
    """Whether a host is this machine alone, by address or as `localhost`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _header(headers: list[tuple[bytes, bytes]], name: bytes) -> str | None:
    for key, value in headers:
        if key == name:
            return value.decode("latin-1")
    return None


class Guard:
    """An application behind the door."""

    def __init__(self, app: ASGIApp, admit: Admission, watch: Watch | None = None) -> None:
        """Take what says who asks, and what ends the requests of a key that is revoked."""
        self._app, self._admit, self._watch = app, admit, watch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through with its caller's identity in its state, or answer it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        sender = None
        try:
            _require_one_reading(scope["headers"])
            version = _agree(scope)
            if scope["path"] not in OPEN_PATHS:
                sender = await self._admit(scope)
                behalf = _header(scope["headers"], HEADER)
                identity = sender if behalf is None else heard(behalf, sender)
                scope.setdefault("state", {})["identity"] = identity
        except ColdframeError as error:
            await _refuse(scope, receive, send, error)
            return
        if version is not None:
            send = _saying(send, version)
        if sender is None or not sender.keyed or self._watch is None:
            await self._app(scope, receive, send)
            return
        with self._watch.over(sender.name) as cut:
            try:
                await self._app(scope, receive, send)
            except asyncio.CancelledError:
                if not cut.made:
                    raise
                with contextlib.suppress(RuntimeError):  # an answer that had begun just ends
                    revoked = NotAuthenticatedError("this key was revoked")
                    await _refuse(scope, receive, send, revoked)


def _require_one_reading(headers: list[tuple[bytes, bytes]]) -> None:
    seen = [name for name, _ in headers if name in _ONCE]
    if len(seen) > len(set(seen)):
        twice = next(name for name in seen if seen.count(name) > 1).decode("ascii")
        raise InvalidRequestError(f"the header {twice!r} is there more than once; send one")


def _agree(scope: Scope) -> int | None:
    """Return the version to speak when a client offers several; None: there is nothing to say."""
    offered = _header(scope["headers"], _VERSION)
    if offered is None:
        return None
    chosen = common_version(offered)
    if chosen is None:
        ours = ", ".join(map(str, SPOKEN_VERSIONS))
        raise VersionMismatchError(
            f"the client speaks protocol {offered[:20]!r}, this service {ours}; "
            "use the same version of Coldframe on both sides"
        )
    return chosen if "," in offered else None


def _saying(send: Send, version: int) -> Send:
    async def said(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", ())]
            if all(name != _VERSION for name, _ in headers):  # else a node behind us has said
                headers.append((_VERSION, str(version).encode()))
            message = {**message, "headers": headers}
        await send(message)

    return said


async def _refuse(scope: Scope, receive: Receive, send: Send, error: ColdframeError) -> None:
    """Answer a request, or the handshake of a WebSocket, with an error."""
    response = failures.answer(error)
    response.headers["connection"] = "close"
    if response.status_code == failures.UNAUTHENTICATED:
        response.headers["www-authenticate"] = "Bearer"
    await response(scope, receive, send)
