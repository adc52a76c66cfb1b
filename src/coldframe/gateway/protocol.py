"""HTTP connections with what uvicorn does not have: who may connect, bounds of heads."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import socket
import struct
import termios
from collections.abc import Callable, Coroutine
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from coldframe.gateway.exchange import Exchange

log = logging.getLogger("coldframe.gateway")

_CREDENTIALS = struct.Struct("3i")
_COUNT = struct.Struct("i")
_LITTLE = 64 * 1024
_TOO_LARGE = b"HTTP/1.1 431 Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_NOT_YOU = b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


WHOLE = "coldframe.whole"
"""Key in the scope of a request whose body has come to its end."""
PEER = "coldframe.peer"
"""Key in the scope of a request: the pid of the process that asks by a unix socket, or None."""


class Joined:
    """A transport that sends what is written in one turn of the event loop by one call.

    The head and the body of an answer are written apart; each would wake the client by itself.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._waiting: list[bytes] = []
        self.written = 0
        """How many bytes have been given to the transport."""

    def write(self, data: bytes) -> None:
        """Send soon, and in order."""
        if len(data) > _LITTLE:
            self.write_now(data)
            return
        if not self._waiting:
            self._loop.call_soon(self.flush)
        self._waiting.append(data)

    def flush(self) -> None:
        """Send now what waits."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._pass(b"".join(waiting))

    def write_now(self, data: bytes) -> None:
        """Send at once."""
        self.flush()
        self._pass(data)

    def _pass(self, data: bytes) -> None:
        self.written += len(data)
        self._transport.write(data)

    def owed(self) -> int:
        """Return of how much the client's kernel has not said that it is there."""
        fd = self._transport.get_extra_info("socket").fileno()
        (in_kernel,) = _COUNT.unpack(fcntl.ioctl(fd, termios.TIOCOUTQ, bytes(_COUNT.size)))
        return int(in_kernel) + self._transport.get_write_buffer_size()

    def is_closing(self) -> bool:
        """Whether it is closed, or will be."""
        return self._transport.is_closing()

    def close(self) -> None:
        """Close once all is sent."""
        self.flush()
        self._transport.close()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Hand the connection on, as for a WebSocket."""
        self.flush()
        self._transport.set_protocol(protocol)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


Refused = Callable[[str, int], None]
"""Told who was turned away before there was a request, and with what status."""


Taker = Callable[[Exchange], None]
"""Answers a request without the application."""
Shortcut = Callable[[bytes], Taker | None]
"""Gives what takes a POST to a URL, if anything does."""


def bounded(
    head_bytes: int, head_s: float, refused: Refused, express: Shortcut | None = None
) -> type[Bounded]:
    """Return a connection class whose heads are at most so large and take at most so long."""

    class Made(Bounded):
        most_bytes, most_s = head_bytes, head_s
        tell = staticmethod(refused)
        shortcut = staticmethod(express or (lambda _: None))

    return Made


class Bounded(HttpToolsProtocol):
    """See `bounded`."""

    most_bytes: int
    most_s: float
    tell: Refused
    shortcut: Shortcut
    _taker: Taker | None = None
    """Gets the request that is being read, if it is whole at the end of what was received."""
    _body = b""
    """What has come of it."""
    _whole: tuple[Taker, Exchange] | None = None
    """One that is whole."""
    _in_head = True
    _head_size = 0
    """How much came since the last of a body: of a head, of trailers, of what frames chunks."""
    _late: asyncio.TimerHandle | None = None
    _pid: int | None = None
    _refused = False
    """Whether nothing more is read of it."""
    _begun = False
    """Whether uvicorn knows of it."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Turn away other users of a unix socket, and start the clock."""
        stream = cast(asyncio.Transport, transport)
        self._pid, uid = _peer(stream)
        if uid is not None and uid not in {0, os.geteuid()}:
            log.warning("unix socket: user %d refused: only root and the node's own user", uid)
            self._refused = True
            self.tell(f"uid {uid}", 403)
            stream.write(_NOT_YOU)
            stream.close()
            return
        self._begun = True
        super().connection_made(cast(asyncio.Transport, Joined(stream)))
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._forget_clock()
        if self._begun:
            super().connection_lost(exc)

    def eof_received(self) -> None:
        """Let a refused client go."""
        if self._begun:
            super().eof_received()

    def data_received(self, data: bytes) -> None:
        """Count what is no body."""
        if self._refused:
            return
        self._head_size += len(data)
        super().data_received(data)
        self._hand_on()
        if self._head_size > self.most_bytes:
            self._refuse(say=self._in_head or not self.cycle.response_started)
        elif self._in_head and self._head_size and self._late is None:  # most are there at once
            self._await_head()

    def on_headers_complete(self) -> None:
        """Stop the clock; the body has bounds of its own. Say which process asks."""
        cast(dict[str, object], self.scope)[PEER] = self._pid
        self._in_head = False
        self._head_size = 0
        self._forget_clock()
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > self.most_bytes:
            self._refuse(say=True)
            return
        self.headers = self.headers.copy()  # those of the scope are no place for trailers
        self._taker = self._find_taker()
        if self._taker is None:
            super().on_headers_complete()

    def _find_taker(self) -> Taker | None:
        """Return what answers the request whose head has come; None: the application does."""
        parser = self.parser
        if (
            parser.get_method() != b"POST"
            or parser.get_http_version() != "1.1"
            or parser.should_upgrade()
            or not parser.should_keep_alive()
            or self.expect_100_continue
            or self.is_answering()
        ):
            return None
        return self.shortcut(self.url)

    def _hand_on(self) -> None:
        """Let a request that is whole be taken; one that is not is the application's after all."""
        whole, self._whole = self._whole, None
        part, self._taker = self._taker, None
        if self.transport.is_closing():
            return
        if whole is not None:
            take, exchange = whole
            take(exchange)
        if part is not None:
            body, self._body = self._body, b""
            super().on_headers_complete()
            super().on_body(body)

    def on_body(self, body: bytes) -> None:
        """Leave out what came with a head that was refused."""
        self._head_size = 0
        if self._taker is not None:
            self._body += body
        elif not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The next head may come; its time begins with its first byte."""
        self._in_head = True
        self._head_size = 0
        if self._taker is not None:
            path, _, query = self.url.partition(b"?")
            about = {"method": "POST", "path": path.decode("ascii"), "query_string": query}
            scope: dict[str, Any] = {**self.scope, **about}
            exchange = Exchange(self, scope, self._body)
            self._whole = self._taker, exchange
            self._taker, self._body = None, b""
            self.cycle = cast(RequestResponseCycle, exchange)
        elif not self._refused:
            super().on_message_complete()
            cast(dict[str, object], self.scope)[WHOLE] = True

    def send(self, data: bytes) -> None:
        """See `Connection`."""
        cast(Joined, self.transport).write_now(data)

    def answered(self, *, close: bool) -> None:
        """See `Connection`."""
        if close:
            self.transport.close()
        self.on_response_complete()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """See `Connection`."""
        task = self.loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def on_response_complete(self) -> None:
        """Send it at once, not in another turn of the loop."""
        cast(Joined, self.transport).flush()
        super().on_response_complete()

    def is_answering(self) -> bool:
        """Whether a request waits for the end of its answer."""
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, *, say: bool) -> None:
        """Read nothing more. `say` so: else it has its answer, or part of it."""
        self._refused = True
        self._note(431)
        if say:
            self.transport.write(_TOO_LARGE)
        self.transport.close()

    def _await_head(self) -> None:
        self._late = asyncio.get_running_loop().call_later(self.most_s, self._on_late)

    def _on_late(self) -> None:
        self._late = None
        if not self.transport.is_closing():
            if self._head_size:
                self._note(408)
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request."""
        self._note(400)
        super().send_400_response(msg)

    def _note(self, status: int) -> None:
        self.tell(self.client[0] if self.client else "unix", status)

    def _forget_clock(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class Lasting(WebSocketsSansIOProtocol):
    """A WebSocket that goes on while commands come to their end, and is closed after them."""

    async def send(self, message: Any) -> None:
        """Send; a handshake that was answered by a refusal is over, too."""
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and self.close_sent:
            self.handshake_complete = True  # else uvicorn reports a fault of ours

    def shutdown(self) -> None:
        """Leave it open: whoever is attached to a command is still to hear the rest of it."""
        if not self.handshake_complete:
            super().shutdown()

    def end(self) -> None:
        """Close it: the service ends."""
        super().shutdown()

    def is_answering(self) -> bool:
        """Whether more may be said on it."""
        return not self.transport.is_closing()


def _peer(transport: asyncio.Transport) -> tuple[int | None, int | None]:
    """Return process and user at the other end of a unix socket as the kernel knows them.

    None, None: TCP. The process alone is None where this one could not see it.
    """
    connection: Any = transport.get_extra_info("socket")
    if connection is None or connection.family != socket.AF_UNIX:
        return None, None
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid or None, uid
