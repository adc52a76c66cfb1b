"""The little of ASGI that the proxy needs."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from coldframe.inference.dialects import RefusedError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


async def read_body(receive: Receive, limit: int) -> bytes | None:
    """Return a request's body; None if its client left.

    Raises:
        RefusedError: it is over the limit.
    """
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if len(body) > limit:
            raise RefusedError(413, f"the request is over {limit} bytes")
        if not message.get("more_body"):
            return bytes(body)


async def send_json(send: Send, status: int, value: Any, *headers: tuple[bytes, bytes]) -> None:
    """Send a whole answer."""
    await send_bytes(send, status, json.dumps(value).encode(), b"application/json", *headers)


async def send_bytes(
    send: Send, status: int, content: bytes, kind: bytes, *headers: tuple[bytes, bytes]
) -> None:
    """Send a whole answer."""
    head = [(b"content-type", kind), (b"content-length", b"%d" % len(content)), *headers]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": content})
