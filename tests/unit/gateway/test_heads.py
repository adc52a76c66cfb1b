"""What a connection remembers of heads changes nothing but the price."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Sequence
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from coldframe.gateway.exchange import Exchange, Taker
from coldframe.gateway.heads import Heads
from coldframe.gateway.lasting import LOST
from coldframe.gateway.protocol import BREAK_OFF, bounded

BODIES = (b'{"argv":["true"]}', b'{"command":"exit 3"}', b'{"command":"echo hello"}', b"\r\n")
ODD_LENGTHS = (b"0%b", b"+%b", b" %b", b"%b ", b"%b\t", b"%b,%b", b"%b\r\n 1", b"0x%b", b"")
ODD_LINES = (
    b"",
    b"Content-Length: %b\r\n",
    b"content-length: %b\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Connection: close\r\n",
    b"Connection: Upgrade\r\nUpgrade: h2c\r\n",
    b"Expect: 100-continue\r\n",
    b"X: \r\n folded\r\n",
    b"X: Content-Length: 7\r\n",
    b"Coldframe-Protocol: 1, 77\r\n",
    b"Authorization: Bearer nonsense\r\n",
    b"Authorization: a\r\nAuthorization: b\r\n",
    b"traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01\r\n",
)


def request(rng: random.Random, *, odd: float) -> bytes:
    """A request for a command, by chance another than usual."""
    body = rng.choice(BODIES)
    length = b"%d" % len(body)
    told = rng.choice(ODD_LENGTHS) if rng.random() < odd / 4 else b"%b"
    told = told.replace(b"%b", length)
    line = (rng.choice(ODD_LINES) if rng.random() < odd else b"").replace(b"%b", length)
    query = b"" if rng.random() < 0.8 else b"?wait_s=30"
    name = rng.choice((b"content-length", b"CONTENT-LENGTH")) if rng.random() < odd / 4 else b""
    lines = [b"Host: 127.0.0.1\r\n", line, (name or b"Content-Length") + b": " + told + b"\r\n"]
    if rng.random() < odd / 2:
        rng.shuffle(lines)
    first = b"POST /v1/sandboxes/a/execs%b HTTP/1.1\r\n" % query
    before = rng.choice((b"\r\n", b"\n", b"x")) if rng.random() < odd / 4 else b""
    return before + first + b"".join(lines) + b"\r\n" + body


def conversation(rng: random.Random) -> list[bytes]:
    """Pieces, each of which a connection reads at once."""
    look = b"GET /v1/versions HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    pieces: list[bytes] = []
    for _ in range(rng.randint(5, 15)):
        kind = rng.random()
        asked = request(rng, odd=0.15)
        if kind < 0.7:
            pieces.append(asked)
        elif kind < 0.8:
            at = rng.randrange(1, len(asked))
            pieces += [asked[:at], asked[at:]]
        elif kind < 0.85:
            pieces.append(asked + request(rng, odd=0.1))
        elif kind < 0.9:
            pieces.append(asked + rng.choice((b"\r\n", b"\r", b"\n", b"P", look)))
        else:
            pieces.append(look)
    return pieces


class Wire(asyncio.Transport):
    """A fake of a connection's other end: keeps what is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.sent, self.closed = b"", False

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        """Keep it."""
        self.sent += bytes(data)

    def is_closing(self) -> bool:
        """See `asyncio.Transport`."""
        return self.closed

    def close(self) -> None:
        """See `asyncio.Transport`."""
        self.closed = True

    def pause_reading(self) -> None:
        """Nothing is read of it by itself."""

    def resume_reading(self) -> None:
        """Nothing is read of it by itself."""


class Talk:
    """One connection of a service that notes how each request was understood."""

    def __init__(self, patience: random.Random) -> None:
        self.understood: list[tuple[str, dict[str, Any], bytes]] = []
        self._patience = patience
        self._waiting: list[Exchange] = []
        self._refusals: list[int] = []

    async def hear(self, pieces: Sequence[bytes]) -> tuple[bytes, bool, list[Any]]:
        """Let it read these, one after the other; return all that came of it."""
        connection, wire = self.begin()
        for piece in pieces:
            if not wire.closed:
                connection.data_received(piece)
            for _ in range(20):
                await asyncio.sleep(0)
            if self._patience.random() < 0.8:
                self.answer()
        self.answer()
        connection.connection_lost(None)
        await asyncio.gather(*connection.tasks)
        return wire.sent, wire.closed, [*self.understood, self._refusals]

    def begin(self) -> tuple[HttpToolsProtocol, Wire]:
        """Connect."""
        kind = bounded(4096, 60, lambda _, status: self._refusals.append(status), self._shortcut)
        config = Config(self._application, interface="asgi3", log_config=None)
        connection, wire = kind(config, ServerState(), {"x": 1}), Wire()
        connection.connection_made(wire)
        return connection, wire

    def answer(self) -> None:
        """Answer what has taken the short way and was not answered at once."""
        while self._waiting:
            self._waiting.pop(0).answer(Response(b"short"), lambda: None)

    def _shortcut(self, url: bytes) -> Taker | None:
        return self._take if b"execs" in url else None

    def _take(self, exchange: Exchange) -> None:
        self._note("short", exchange.scope, exchange.body)
        exchange.scope["state"]["identity"] = "whoever asked"
        self._waiting.append(exchange)
        if self._patience.random() < 0.8:
            self.answer()

    async def _application(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientDisconnect):
            self._note("application", scope, await Request(scope, receive).body())
        await Response(b"long")(scope, receive, send)

    def _note(self, way: str, scope: Scope, body: bytes) -> None:
        about = {**scope, "headers": [*scope["headers"]], "state": {**scope["state"]}}
        for own in (BREAK_OFF, LOST):  # of this connection
            about.pop(own, None)
        self.understood.append((way, about, body))


async def test_heads_that_are_known_mean_what_the_parser_made_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What two readers take for different requests is how one is smuggled past the door."""
    find, found = Heads.find, 0

    def counted(self: Heads, data: bytes) -> Any:
        nonlocal found
        known = find(self, data)
        found += known is not None
        return known

    for seed in range(1500):
        pieces = conversation(random.Random(seed))
        monkeypatch.setattr(Heads, "find", counted)
        known = await Talk(random.Random(seed)).hear(pieces)
        monkeypatch.setattr(Heads, "find", lambda *_: None)
        parsed = await Talk(random.Random(seed)).hear(pieces)
        assert known == parsed, (seed, pieces)
    assert found > 1000


class Patient(random.Random):
    """Answers nothing by itself."""

    def random(self) -> float:
        """See `random.Random`."""
        return 1.0


async def test_connection_is_closed_when_it_was_idle_for_long_and_not_before() -> None:
    """A client that is gone for good holds no descriptor; one whose command takes long stays."""
    talk = Talk(Patient())
    connection, wire = talk.begin()
    connection.timeout_keep_alive = idle_s = 0.2  # type: ignore[assignment]
    for _ in range(3):
        connection.data_received(whole(path=b"/execs"))
        await asyncio.sleep(2 * idle_s)
        assert not wire.closed
        talk.answer()
    began = time.monotonic()
    async with asyncio.timeout(20):
        while not wire.closed:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert time.monotonic() - began > idle_s / 2
    connection.connection_lost(None)


def whole(
    length: bytes = b"2", line: bytes = b"", body: bytes = b"{}", path: bytes = b"/"
) -> bytes:
    """A request."""
    return (
        b"POST "
        + path
        + b" HTTP/1.1\r\n"
        + line
        + b"Content-Length: "
        + length
        + b"\r\n\r\n"
        + body
    )


def learned(line: bytes = b"", count: int = 1) -> Heads:
    """Of so many requests, each with another line."""
    heads = Heads(4096)
    for number in range(count):
        headers = [(b"content-length", b"2")]
        heads.learn(whole(line=line % number if count > 1 else line), print, {"headers": headers})
    return heads


@pytest.mark.parametrize("length", [b"02", b"+2", b"2 ", b"1", b"3", b"", b"0", b"2\r\nX: y"])
def test_length_that_is_written_or_meant_otherwise_is_not_known(length: bytes) -> None:
    """The parser may refuse it, or find another request behind this one."""
    heads = learned()
    assert heads.find(whole()) is not None
    assert heads.find(whole(length)) is None


def test_length_is_that_of_the_request_and_all_else_that_of_the_head() -> None:
    """Else one body would be taken for as long as the last."""
    found = learned().find(whole(b"3", body=b"[1]"))
    assert found == (print, {"headers": [(b"content-length", b"3")]}, b"[1]")


def test_few_and_small_heads_are_kept() -> None:
    """Any number of connections may be open."""
    assert len(learned(b"X: %d\r\n", count=1000)._known) <= 8
    assert not learned(b"X: " + b"x" * 3000 + b"\r\n")._known
