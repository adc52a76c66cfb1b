"""Routes whose changes are made once for each `Idempotency-Key`: a replay gets the first answer."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message

from coldframe.gateway import failures
from coldframe.gateway.context import enter, service_of
from coldframe.gateway.identity import Scope
from coldframe.node.effects import Reply
from coldframe.node.operations import may_run_again, mismatch
from coldframe.protocol.errors import ColdframeError, TooSlowError
from coldframe.protocol.ids import OPERATION_PATTERN

Handler = Callable[[Request], Coroutine[Any, Any, Response]]

_HEADER = "idempotency-key"
_PARAMETER = {
    "name": _HEADER,
    "in": "header",
    "required": False,
    "description": "An operation id: the same request again gives the first answer.",
    "schema": {"type": "string", "pattern": OPERATION_PATTERN},
}


class Once(APIRoute):
    """A route. What changes things needs the scope, also where only its first answer is given."""

    scope = Scope.EXEC
    by_pieces = False
    """Whether something is done before all of the body is there."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        self._changes = "GET" not in (options.get("methods") or ())
        if self._changes:
            extra = dict(options.get("openapi_extra") or {})
            known = [one for one in extra.get("parameters", ()) if one is not _PARAMETER]
            extra["parameters"] = [*known, _PARAMETER]
            options["openapi_extra"] = extra
        super().__init__(path, endpoint, **options)

    def get_route_handler(self) -> Handler:
        """See `APIRoute`."""
        handle = super().get_route_handler()
        return partial(_once, self, handle) if self._changes else handle


class OnceByPieces(Once):
    """For what takes its body as it comes."""

    by_pieces = True


class OnceOwned(Once):
    """For what decides over a whole sandbox."""

    scope = Scope.CREATE


class OnceShared(Once):
    """For what is everybody's."""

    scope = Scope.ADMIN


async def _once(route: Once, handle: Handler, request: Request) -> Response:
    key = request.headers.get(_HEADER)
    if key is None:
        return await handle(request)
    tenant = enter(request, route.scope)
    body = _Body(request)
    asked = hashlib.sha256(request.method.encode() + b" " + _target(request)).hexdigest()
    act = partial(_act, route, handle, body)
    reply = await tenant.node.once(tenant.operation(key), asked, tenant.identity.owner, act)
    first = reply.body_sha256
    if not body.taken and first is not None and first != await body.rest():
        raise mismatch(key)
    later = failures.retry_after(reply.status)
    headers = None if later is None else {"retry-after": later}
    return Response(reply.content, reply.status, headers, reply.kind)


def _target(request: Request) -> bytes:
    raw: bytes = request.scope.get("raw_path") or request.scope["path"].encode()
    return raw + b"?" + bytes(request.scope["query_string"])


async def _act(route: Once, handle: Handler, body: _Body) -> Reply:
    final = True
    try:
        answer = await handle(body.request())
    except ColdframeError as error:
        answer = await failures.answer_to(body.asked, error)
        final = not may_run_again(error)
    except ClientDisconnect:
        if route.by_pieces or body.sha256 is not None:
            raise
        return Reply(499, None, b"", final=False)  # nobody reads it, and nothing was done
    return Reply(answer.status_code, answer.media_type, bytes(answer.body), body.sha256, final)


class _Body:
    """A request's body, of which the digest is taken as it is read."""

    def __init__(self, asked: Request) -> None:
        self.asked = asked
        self.taken = False
        self.sha256: str | None = None
        """Of all of it, once it has been read."""
        self._digest = hashlib.sha256()

    def request(self) -> Request:
        """Return the request for whoever reads its body."""
        self.taken = True
        return Request(self.asked.scope, self._receive)

    async def rest(self) -> str | None:
        """Read what nobody has read; return the digest of all.

        Raises:
            TooSlowError: it does not come.
        """
        while self.sha256 is None:
            try:
                async with asyncio.timeout(service_of(self.asked).settings.body_s):
                    message = await self._receive()
            except TimeoutError:
                raise TooSlowError("the body did not come to its end") from None
            if message["type"] != "http.request":
                raise ClientDisconnect
        return self.sha256

    async def _receive(self) -> Message:
        message = await self.asked.receive()
        if message["type"] == "http.request" and self.sha256 is None:
            self._digest.update(message.get("body", b""))
            if not message.get("more_body", False):
                self.sha256 = self._digest.hexdigest()
        return message
