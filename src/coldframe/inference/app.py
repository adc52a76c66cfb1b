"""The proxy as an ASGI application: routes, streams, and who received what.

An answer is a turn only once all of it was handed over on a connection that was open.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from coldframe.inference.admin import Admin
from coldframe.inference.attempts import Attempt
from coldframe.inference.dialects import (
    CHAT,
    MESSAGES,
    Asked,
    Dialect,
    RefusedError,
    by_body,
    by_path,
)
from coldframe.inference.engine import is_text
from coldframe.inference.proxy import Outcome, Proxy
from coldframe.inference.wire import Receive, Scope, Send, read_body, send_json
from coldframe.protocol import strict_json
from coldframe.trajectories.calls import MAX_DEPTH, Declared

MAX_BODY_BYTES = 64 << 20
SEGMENT_HEADER = b"x-coldframe-segment"
"""`name=NAME; kind=main|sub_agent|compaction; owner=NAME`: what the conversation is."""
_LOOKS = 4
"""Turns of the event loop until a connection that the kernel knows as closed is told to us."""


class ProxyApp:
    """Serves a proxy; administration is answered only if there is a key for it."""

    def __init__(self, proxy: Proxy, admin: Admin | None = None) -> None:
        self.proxy, self.admin = proxy, admin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = dict(scope["headers"])
        path = scope["path"].rstrip("/")
        if path == "/health":
            await send_json(send, 200, {"status": "ok", "capture": self._level})
        elif self.admin is not None and path.startswith("/coldframe/"):
            await self.admin(scope, receive, send)
        else:
            dialect = by_path(path, headers) or CHAT
            try:
                await self._route(path, headers, scope["method"], receive, send)
            except RefusedError as refused:
                await _refuse(send, dialect, refused)

    @property
    def _level(self) -> str:
        return self.proxy.settings.capture.value

    async def _route(
        self, path: str, headers: dict[bytes, bytes], method: str, receive: Receive, send: Send
    ) -> None:
        attempt = self.proxy.by_key(_key(headers))
        if attempt is None:
            raise RefusedError(401, "this key is not that of an attempt, or no longer")
        head, _, last = path.rpartition("/")
        if method == "GET" and (last == "models" or head.endswith("/models")):
            named = None if last == "models" else last
            await send_json(send, 200, _models(self.proxy.settings.model, named))
            return
        if method != "POST":
            raise RefusedError(404, f"no such path: {method} {path}")
        body = await read_body(receive, MAX_BODY_BYTES)
        if body is None:
            return
        value = _parse(body)
        if path.endswith("/count_tokens"):
            await self._count(attempt, value, send)
            return
        dialect = by_path(path, headers)
        if dialect is None:
            if last not in ("", "v1"):
                raise RefusedError(404, f"no such path: {method} {path}")
            dialect = by_body(value)
        asked = dialect.ask(value, attempt.arguments)
        asked = replace(asked, declared=_declared(headers))
        if asked.model is not None and not is_text(asked.model):
            raise RefusedError(400, "model is no text")
        await _Exchange(self.proxy, attempt, dialect, asked, receive, send).run()

    async def _count(self, attempt: Attempt, value: dict[str, Any], send: Send) -> None:
        """Answer with the engine's own count, or say that there is none: it is not estimated."""
        asked = MESSAGES.ask(value, attempt.arguments).body
        names = ("messages", "tools")
        body = {"model": self.proxy.settings.model, **{k: asked[k] for k in names if k in asked}}
        count = await self.proxy.engine.count(body)
        if count is None:
            raise RefusedError(404, "the engine does not count tokens")
        await send_json(send, 200, {"input_tokens": count})


@dataclass
class _Exchange:
    """One call, from its request to its mark in the journal."""

    proxy: Proxy
    attempt: Attempt
    dialect: Dialect
    asked: Asked
    receive: Receive
    send: Send
    begun: bool = False

    async def run(self) -> None:
        self.gone = asyncio.ensure_future(_disconnected(self.receive))
        asking = asyncio.ensure_future(self.proxy.ask(self.attempt, self.asked))
        try:
            while not asking.done():
                wait = self.proxy.settings.keep_alive_s if self.asked.stream else None
                await asyncio.wait(
                    {asking, self.gone}, timeout=wait, return_when=asyncio.FIRST_COMPLETED
                )
                if self.gone.done():
                    self.attempt.event("gone", "the client left before there was an answer")
                    return
                if not asking.done():
                    await self._begin_stream()
                    await self._send(self.dialect.keep_alive)
            await self._deliver(asking.result())
        except RefusedError as refused:
            if not self.begun:
                raise
            await self._send(self.dialect.error_event(refused))
            await self._send(b"", more=False)
        finally:
            self.gone.cancel()
            asking.cancel()
            # The engine sees its client leave before anything else is done here.
            with contextlib.suppress(asyncio.CancelledError, RefusedError):
                await asking

    async def _deliver(self, outcome: Outcome) -> None:
        if await self._left():
            self.attempt.event("gone", "the client left before there was an answer")
            return
        if outcome.evidence is None:
            await self._answer(outcome)
            await self._send(b"", more=False)
            return
        call, place = self.proxy.record(self.attempt, self.dialect, self.asked, outcome)
        delivered = False
        try:
            await self._answer(outcome)
            await self._send(b"")  # returns once what was written before has gone out
            # Without a look at what came since: who has its answer may close at once.
            delivered = not self.gone.done()
        finally:
            self.attempt.handed_over(call, place, delivered=delivered)
        # Only now is the exchange over: before, that the connection is closed would look the same.
        await self._send(b"", more=False)

    async def _answer(self, outcome: Outcome) -> None:
        shown = self.dialect.answer(outcome.answer, self.asked)
        if not self.asked.stream:
            content = json.dumps(shown, separators=(",", ":")).encode()
            await self._begin(b"application/json", (b"content-length", b"%d" % len(content)))
            await self._send(content)
            return
        await self._begin_stream()
        # In one piece: nothing is gained by pretending that it comes in slowly.
        await self._send(b"".join(self.dialect.events(shown, self.asked)))

    async def _left(self) -> bool:
        for _ in range(_LOOKS):
            await asyncio.sleep(0)
        return self.gone.done()

    async def _begin_stream(self) -> None:
        await self._begin(b"text/event-stream", (b"cache-control", b"no-store"))

    async def _begin(self, kind: bytes, *more: tuple[bytes, bytes]) -> None:
        if not self.begun:
            self.begun = True
            headers = [(b"content-type", kind), *more]
            await self.send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _send(self, content: bytes, *, more: bool = True) -> None:
        await self.send({"type": "http.response.body", "body": content, "more_body": more})


async def _disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _key(headers: dict[bytes, bytes]) -> str | None:
    given = headers.get(b"x-api-key")
    if given is None:
        kind, _, given = headers.get(b"authorization", b"").partition(b" ")
        if kind.lower() != b"bearer":
            return None
    return given.decode("latin-1").strip()


def _declared(headers: dict[bytes, bytes]) -> Declared | None:
    """Return what a harness that knows it says of its conversation.

    Raises:
        RefusedError: it says something that cannot be.
    """
    given = headers.get(SEGMENT_HEADER)
    if given is None:
        return None
    pairs = [one.partition("=") for one in given.decode("latin-1").split(";") if one.strip()]
    said = {name.strip(): value.strip() for name, _, value in pairs}
    if len(said) < len(pairs):
        raise RefusedError(400, f"header {SEGMENT_HEADER.decode()}: says one thing twice")
    try:
        return Declared.model_validate(said)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        name = SEGMENT_HEADER.decode()
        raise RefusedError(400, f"header {name}: {field}: {first['msg']}") from None


def _parse(body: bytes) -> dict[str, Any]:
    try:
        value = strict_json.parse(body, depth=MAX_DEPTH)
    except strict_json.NotStrictError as error:
        raise RefusedError(400, f"the request {error}") from None
    if not isinstance(value, dict):
        raise RefusedError(400, "the request is no JSON object")
    return value


def _models(model: str, named: str | None) -> dict[str, Any]:
    """Return what both providers' clients read: any name that is asked for is answered by it."""

    def one(name: str) -> dict[str, Any]:
        both = {"id": name, "created": 0, "created_at": "1970-01-01T00:00:00Z"}
        return {
            **both,
            "object": "model",
            "owned_by": "coldframe",
            "type": "model",
            "display_name": name,
        }

    if named is not None:
        return one(named)
    return {
        "object": "list",
        "data": [one(model)],
        "has_more": False,
        "first_id": model,
        "last_id": model,
    }


async def _refuse(send: Send, dialect: Dialect, refused: RefusedError) -> None:
    more = []
    if refused.wait_s is not None:
        more.append((b"retry-after", b"%d" % max(1, math.ceil(refused.wait_s))))
    await send_json(send, refused.status, dialect.error(refused), *more)
