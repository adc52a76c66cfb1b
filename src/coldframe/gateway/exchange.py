"""A request that a connection has read whole, and its answer without an application between.

What uvicorn makes for any request (a cycle, an event, a task, messages) costs as much as all else
that is done for a command.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Message, Scope
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

_CLOSE = (b"connection", b"close")


class Connection(Protocol):
    """What an exchange needs of its connection."""

    flow: FlowControl

    def send(self, data: bytes) -> None:
        """Send now."""

    def answered(self, *, close: bool) -> None:
        """Go on to the next request, or close."""

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something that a stop waits for."""


class Exchange:
    """Stands where uvicorn has its cycle, so that the next request waits for its turn."""

    message_event = asyncio.Event()
    """uvicorn sets it at the end of a connection; nobody waits for it."""

    def __init__(self, connection: Connection, scope: Scope, body: bytes) -> None:
        self.scope, self.body = scope, body
        self.connection = connection
        self.keep_alive = True
        self.disconnected = False
        self.response_complete = False

    def answer(self, response: Response, then: Callable[[], None]) -> None:
        """Send an answer, at once if the connection takes it; call `then` when it is sent."""
        if type(response) is not Response or self.connection.flow.write_paused:
            self.connection.spawn(self._deliver(response, then))
            return
        head = self._head(response.status_code, response.raw_headers)
        self._send_last(head + bytes(response.body))
        then()

    async def _deliver(self, response: Response, then: Callable[[], None]) -> None:
        """Send one that comes in pieces, or to somebody who reads slowly."""
        try:
            await response(self.scope, _receive_nothing, self._send)
        finally:
            then()

    async def _send(self, message: Message) -> None:
        await self.connection.flow.drain()
        if message["type"] == "http.response.start":
            if not self.disconnected:
                self.connection.send(self._head(message["status"], message["headers"]))
        elif not message.get("more_body"):
            self._send_last(message["body"])
        elif not self.disconnected:
            self.connection.send(message["body"])

    def _head(self, status: int, headers: list[tuple[bytes, bytes]]) -> bytes:
        if _CLOSE in headers:
            self.keep_alive = False
        elif not self.keep_alive:
            headers = [*headers, _CLOSE]
        lines = [b"%b: %b\r\n" % header for header in headers]
        return b"".join((STATUS_LINE[status], *lines, b"\r\n"))

    def _send_last(self, data: bytes) -> None:
        self.response_complete = True
        if not self.disconnected:
            self.connection.send(data)
            self.connection.answered(close=not self.keep_alive)


Taker = Callable[[Exchange], None]
"""Answers a request without the application."""


async def _receive_nothing() -> Message:
    raise NotImplementedError("the request was read before it was answered")
