"""A WebSocket of a browser's, joined message by message with one to a port of a sandbox."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.types import Message, Receive, Scope, Send
from websockets.client import ClientProtocol
from websockets.datastructures import Headers as SocketHeaders
from websockets.exceptions import InvalidHandshake
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Response
from websockets.protocol import Event, State
from websockets.typing import Subprotocol
from websockets.uri import parse_uri

from coldframe.gateway.context import hung_up, until_one_ends
from coldframe.gateway.proxy_headers import Headers, Passage
from coldframe.protocol.errors import PortUnreachableError

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]

_PIECE = 1 << 16
LARGEST_MESSAGE = 16 << 20
_DATA = frozenset({Opcode.TEXT, Opcode.BINARY, Opcode.CONT})
_NOT_SENT = frozenset({1005, 1006, 1015})
"""Codes that stand for a close without one."""


async def carry(
    scope: Scope,
    receive: Receive,
    send: Send,
    passage: Passage,
    connection: Connection,
) -> None:
    """Join both until one closes; the other is closed with the same code.

    Raises:
        PortUnreachableError: there is no WebSocket; nothing was sent.
    """
    inner = _Inner(scope, passage, connection)
    response = await inner.open()
    if response is None:
        raise PortUnreachableError(f"port {passage.port} does not answer by WebSocket")
    if (await receive())["type"] != "websocket.connect":
        return
    cookies = [(b"set-cookie", value.encode()) for value in response.get_all("set-cookie")]
    headers = [one for one in passage.outward(cookies) if one[0] == b"set-cookie"]
    await send({"type": "websocket.accept", "subprotocol": inner.subprotocol, "headers": headers})
    async with until_one_ends(inner.tell(send), inner.hear(receive), hung_up(scope)):
        pass


class _Inner:
    """The side of the sandbox."""

    def __init__(self, scope: Scope, passage: Passage, connection: Connection) -> None:
        self._reader, self._writer = connection
        target = passage.target(scope["raw_path"], scope["query_string"])
        uri = parse_uri(f"ws://localhost:{passage.port}{target.decode('ascii')}")
        wanted = [Subprotocol(one) for one in scope["subprotocols"]]
        self._protocol = ClientProtocol(uri, subprotocols=wanted or None, max_size=LARGEST_MESSAGE)
        self._headers: Headers = [
            one for one in passage.inward(scope["headers"]) if one[0] != b"host"
        ]
        self._early: list[Event] = []
        """What came with the answer to the handshake."""
        self._frames: list[bytes] = []
        self._text = False

    @property
    def subprotocol(self) -> str | None:
        """What the sandbox chose."""
        return self._protocol.subprotocol

    async def open(self) -> SocketHeaders | None:
        """Shake hands; return the headers of the answer. None: it is no WebSocket."""
        request = self._protocol.connect()
        for name, value in self._headers:
            request.headers[name.decode("ascii")] = value.decode("latin-1")
        self._protocol.send_request(request)
        with contextlib.suppress(ConnectionError, InvalidHandshake):
            await self._flush()
            more = True
            while self._protocol.state is State.CONNECTING and more:
                more = await self._receive()
            self._early = self._protocol.events_received()
            if self._early and self._protocol.handshake_exc is None:
                response = self._early.pop(0)
                return response.headers if isinstance(response, Response) else None
        return None

    async def tell(self, send: Send) -> None:
        """Pass on what the sandbox says until it closes."""
        with contextlib.suppress(ConnectionError):
            more = True
            while more:
                events, self._early = [*self._early, *self._protocol.events_received()], []
                for event in events:
                    message = self._assembled(event)
                    if message is not None:
                        await send(message)
                more = await self._receive()
        closed = self._protocol.close_rcvd or self._protocol.close_sent
        code = CloseCode.INTERNAL_ERROR if closed is None else closed.code
        reason = "" if closed is None else closed.reason
        if code in _NOT_SENT:
            code = CloseCode.NORMAL_CLOSURE
        await send({"type": "websocket.close", "code": int(code), "reason": reason})

    def _assembled(self, event: Event) -> Message | None:
        if not isinstance(event, Frame) or event.opcode not in _DATA:
            return None
        if event.opcode is not Opcode.CONT:
            self._text = event.opcode is Opcode.TEXT
        self._frames.append(bytes(event.data))
        if not event.fin:
            return None
        data, self._frames = b"".join(self._frames), []
        if self._text:
            return {"type": "websocket.send", "text": data.decode("utf-8", "replace")}
        return {"type": "websocket.send", "bytes": data}

    async def hear(self, receive: Receive) -> None:
        """Pass on what the browser says until it closes."""
        with contextlib.suppress(ConnectionError):
            while (message := await receive())["type"] == "websocket.receive":
                data = message.get("bytes")
                if data is not None:
                    self._protocol.send_binary(data)
                else:
                    self._protocol.send_text(message["text"].encode())
                await self._flush()
            code = message.get("code") or 1005
            if code in _NOT_SENT:
                self._protocol.send_close(CloseCode.GOING_AWAY)
            else:
                self._protocol.send_close(code, message.get("reason") or "")
            await self._flush()

    async def _receive(self) -> bool:
        """Read once; False at the end."""
        data = await self._reader.read(_PIECE)
        if data:
            self._protocol.receive_data(data)
        else:
            self._protocol.receive_eof()
        await self._flush()
        return bool(data) and not self._protocol.close_expected()

    async def _flush(self) -> None:
        for piece in self._protocol.data_to_send():
            if piece:
                self._writer.write(piece)
        await self._writer.drain()
