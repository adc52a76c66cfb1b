"""HTTP connections with what uvicorn does not have: who may connect, bounds of heads."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import select
import socket
import struct
from collections.abc import Callable, Coroutine
from typing import Any, cast
from weakref import WeakMethod

from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from coldframe.gateway.exchange import Exchange, Taker
from coldframe.gateway.heads import Heads, ends_with_message
from coldframe.gateway.joined import Joined
from coldframe.gateway.lasting import LOST, Lasting
from coldframe.protocol.errors import ColdframeError, InvalidRequestError, NotPermittedError
from coldframe.protocol.wire import ERROR_TRAILER, error_body

log = logging.getLogger("coldframe.gateway")

_CREDENTIALS = struct.Struct("3i")
_LOOK_S = 5.0
"""How often a client is looked at of which nothing is read, since nobody takes what it has sent."""


def _refusal(status: int, error: ColdframeError) -> bytes:
    """Return the answer to what came to no request, as any error is answered."""
    told = json.dumps(error_body(error)).encode("ascii")
    head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
    return STATUS_LINE[status] + head % len(told) + told


_NO_HTTP = _refusal(400, InvalidRequestError("this is no request of HTTP, or has two readings"))
_NOT_YOU = _refusal(403, NotPermittedError("this socket is for root and the node's own user"))
_TOO_LARGE = _refusal(431, InvalidRequestError("the head of a request must be smaller than this"))


WHOLE = "coldframe.whole"
"""Key in the scope of a request whose body has come to its end."""
PEER = "coldframe.peer"
"""Key in the scope of a request: the pid of the process that asks by a unix socket, or None."""
BREAK_OFF = "coldframe.break_off"
"""Key in the scope of a request: a weak reference to what ends its answer with an error's body."""


Refused = Callable[[str, int], None]
"""Told who was turned away before there was a request, and with what status."""


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
    _clean = True
    """Whether all that came so far was whole requests, and not a byte behind them."""
    _between = False
    """Whether a request has come to its end since, and none has begun."""
    _in_head = True
    _head_size = 0
    """How much came since the last of a body: of a head, of trailers, of what frames chunks."""
    _late: asyncio.TimerHandle | None = None
    _pid: int | None = None
    _refused = False
    """Whether nothing more is read of it."""
    _begun = False
    """Whether uvicorn knows of it."""
    _idle_since: float | None = None
    """Since when all is answered, if the last of it was without the application."""
    _idle: asyncio.TimerHandle | None = None
    _look: asyncio.TimerHandle | None = None

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
        self._lost = asyncio.Event()
        self._heads = Heads(self.most_bytes)
        super().connection_made(cast(asyncio.Transport, Joined(stream)))
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._forget_clock()
        for timer in (self._idle, self._look):
            if timer is not None:
                timer.cancel()
        if self._begun:
            super().connection_lost(exc)
            self._lost.set()

    def eof_received(self) -> None:
        """Let a refused client go."""
        if self._begun:
            super().eof_received()

    def data_received(self, data: bytes) -> None:
        """Count what is no body."""
        self._idle_since = None
        if self._refused or self._take_known(data):
            return
        whole, self._clean, self._between = self._clean, False, False
        self._head_size += len(data)
        super().data_received(data)
        self._clean = self._between and ends_with_message(data, whole=whole)
        self._hand_on(data if whole and self._clean else None)
        if self._head_size > self.most_bytes:
            self._refuse(say=self._in_head or not self.cycle.response_started)
        elif self._in_head and self._head_size and self._late is None:  # most are there at once
            self._await_head()

    def on_message_begin(self) -> None:
        """Another request begins."""
        self._between = False
        super().on_message_begin()

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
            self._begin_cycle()

    def _begin_cycle(self) -> None:
        about = cast(dict[str, object], self.scope)
        about[BREAK_OFF], about[LOST] = WeakMethod(self._break_off), self._lost
        super().on_headers_complete()

    def _break_off(self, error: bytes) -> None:
        """End an answer in the middle and say why: a trailer, but no end of the message.

        So whoever does not know the trailer does not take what came for the whole.
        """
        cycle = self.cycle
        if cycle.chunked_encoding and not cycle.response_complete:
            self.transport.write(b"0\r\n%b: %b\r\n" % (ERROR_TRAILER.encode(), error))
        self.transport.close()

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

    def _take_known(self, data: bytes) -> bool:
        """Let a request be taken whose head is known, without the parser; False: it is not."""
        if not self._clean or self.is_answering():
            return False
        found = self._heads.find(data)
        if found is None:
            return False
        take, scope, body = found
        self._forget_clock()
        self._unset_keepalive_if_required()
        scope["state"] = self.app_state.copy()
        exchange = Exchange(self, scope, body)
        self.cycle = cast(RequestResponseCycle, exchange)
        take(exchange)
        return True

    def _hand_on(self, data: bytes | None) -> None:
        """Let a request that is whole be taken; one that is not is the application's after all.

        `data` is one request and nothing else, if it is given.
        """
        whole, self._whole = self._whole, None
        part, self._taker = self._taker, None
        if self.transport.is_closing():
            return
        if whole is not None:
            take, exchange = whole
            if data is not None:
                self._heads.learn(data, take, exchange.scope)
            take(exchange)
        if part is not None:
            body, self._body = self._body, b""
            self._begin_cycle()
            super().on_body(body)

    def on_body(self, body: bytes) -> None:
        """Leave out what came with a head that was refused."""
        self._head_size = 0
        if self._taker is not None:
            self._body += body
        elif not self._refused:
            super().on_body(body)
            if self.flow.read_paused and self._look is None:
                self._look = self.loop.call_later(_LOOK_S, self._on_look)

    def _on_look(self) -> None:
        """End it if its client has left, which is not told while nothing is read."""
        self._look = None
        if not self.flow.read_paused or self.transport.is_closing():
            return
        if _has_left(self.transport):
            self.transport.abort()
        else:
            self._look = self.loop.call_later(_LOOK_S, self._on_look)

    def on_message_complete(self) -> None:
        """The next head may come; its time begins with its first byte."""
        self._in_head = True
        self._head_size = 0
        self._between = not self.parser.should_upgrade()
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
        if self.pipeline or self.transport.is_closing():
            self.on_response_complete()
            return
        self.server_state.total_requests += 1
        self.flow.resume_reading()
        self._idle_since = self.loop.time()
        if self._idle is None:
            self._idle = self.loop.call_later(self.timeout_keep_alive, self._on_idle)

    def _on_idle(self) -> None:
        """Close it if nothing has come for long: one timer for many answers, most are no last."""
        self._idle = None
        if self._idle_since is None or self.transport.is_closing():
            return
        until = self._idle_since + self.timeout_keep_alive
        if until <= self.loop.time():
            self.timeout_keep_alive_handler()
        else:
            self._idle = self.loop.call_at(until, self._on_idle)

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

    def handle_websocket_upgrade(self) -> None:
        """Hand the connection on; take note if it is refused at once."""
        super().handle_websocket_upgrade()
        refused = cast(Lasting, self.transport.get_protocol()).refused
        if refused is not None:
            self._note(refused)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request."""
        del msg
        self._note(400)
        self.transport.write(_NO_HTTP)
        self.transport.close()

    def _note(self, status: int) -> None:
        self.tell(self.client[0] if self.client else "unix", status)

    def _forget_clock(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


def _has_left(transport: asyncio.Transport) -> bool:
    """Whether the other end has closed the connection."""
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
    return bool(poll.poll(0))


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
