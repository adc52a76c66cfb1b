"""The door: nobody's request gets to a route before it is known who asks.

On a unix socket the kernel says who connects (`protocol.py`); on TCP a key does. A service without
keys listens on loopback only, and then takes no request that a web page could have sent: what
names another host, or comes from another origin, is refused.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
from collections.abc import Awaitable, Callable

from starlette.responses import Response
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
from coldframe.protocol.text import excerpt
from coldframe.protocol.wire import (
    SPOKEN_VERSIONS,
    VERSION_HEADER,
    common_version,
)

_OWN_USER, _ANYBODY_HERE = local("unix socket"), local("loopback without keys")

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
    return _OWN_USER


def by_key(store: Store) -> Admission:
    """Admit holders of keys; anybody on this machine as long as no key was ever made."""

    async def admit(scope: Scope) -> Identity:
        headers = dict(scope["headers"])
        authorization = _text(headers.get(b"authorization"))
        if authorization is None and await store.keyless():
            _require_no_web_page(headers)
            return _ANYBODY_HERE
        return await authenticate(store, authorization)

    return admit


def _require_no_web_page(headers: dict[bytes, bytes]) -> None:
    host = _text(headers.get(b"host")) or ""
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    # A page of a sandbox's own, under /p/, has this service's origin: its reads name no origin, but
    # where they come from.
    by_page = (
        b"origin" in headers
        or b"referer" in headers
        or headers.get(b"sec-fetch-site") not in {None, b"none"}
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


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")


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
        try:
            sender, version = await let_in(scope, self._admit)
        except ColdframeError as error:
            await refusal(error)(scope, receive, send)
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
                try:
                    await refusal(revoked())(scope, receive, send)
                except RuntimeError:  # an answer had begun
                    failures.break_off(scope, revoked())


async def let_in(scope: Scope, admit: Admission) -> tuple[Identity | None, int | None]:
    """Say in a request's state who makes it; return who sends it, and the version to speak.

    No sender: for what anybody may ask. No version: there is nothing to say of it.

    Raises:
        ColdframeError: it is to be answered with this `refusal`.
    """
    headers = _with_one_reading(scope["headers"])
    if b"host" not in headers and scope.get("http_version") == "1.1":
        raise InvalidRequestError("a request of HTTP/1.1 names its host (RFC 9112, 3.2); send one")
    version = _agree(_text(headers.get(_VERSION)))
    if scope["path"] in OPEN_PATHS:
        return None, version
    sender = await admit(scope)
    behalf = _text(headers.get(HEADER))
    identity = sender if behalf is None else heard(behalf, sender)
    scope.setdefault("state", {})["identity"] = identity
    return sender, version


def _with_one_reading(pairs: list[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    headers = dict(pairs)
    if len(headers) < len(pairs):
        seen = [name for name, _ in pairs]
        for name in _ONCE & headers.keys():
            if seen.count(name) > 1:
                twice = name.decode("ascii")
                raise InvalidRequestError(f"the header {twice!r} is there more than once; send one")
    return headers


def _agree(offered: str | None) -> int | None:
    """Return the version to speak when a client offers several; None: there is nothing to say."""
    if offered is None:
        return None
    chosen = common_version(offered)
    if chosen is None:
        ours = ", ".join(map(str, SPOKEN_VERSIONS))
        raise VersionMismatchError(
            f"the client speaks protocol {excerpt(offered, 20)}, this service {ours}; "
            "use the same version of Coldframe on both sides"
        )
    return chosen if "," in offered else None


def spoken(version: int) -> tuple[bytes, bytes]:
    """Return the header that says which version was chosen."""
    return _VERSION, str(version).encode()


def _saying(send: Send, version: int) -> Send:
    async def said(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", ())]
            if all(name != _VERSION for name, _ in headers):  # else a node behind us has said
                headers.append(spoken(version))
            message = {**message, "headers": headers}
        await send(message)

    return said


def refusal(error: ColdframeError) -> Response:
    """Return the answer to a request, or the handshake of a WebSocket, that is not let in."""
    response = failures.answer(error)
    response.headers["connection"] = "close"
    if response.status_code == failures.UNAUTHENTICATED:
        response.headers["www-authenticate"] = "Bearer"
    return response


def revoked() -> ColdframeError:
    """Return why a request ends that was let in."""
    return NotAuthenticatedError("this key was revoked")
