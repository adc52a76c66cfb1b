"""Connections of which nothing is read for long, because a sandbox takes nothing."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from websockets.asyncio.client import connect

from coldframe.gateway import protocol
from coldframe.gateway.context import hung_up
from coldframe.gateway.lasting import Lasting
from coldframe.gateway.protocol import bounded

PING_S, PATIENCE_S = 0.05, 2.0
MESSAGES = [bytes([number]) * (1 << 20) for number in range(8)]


@asynccontextmanager
async def served(app: ASGIApp) -> AsyncIterator[str]:
    """The authority of an application whose WebSockets are pinged often."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        app,
        http=bounded(1 << 16, 5.0, lambda _who, _status: None),
        ws=Lasting,
        lifespan="off",
        log_config=None,
        ws_ping_interval=PING_S,
        ws_ping_timeout=PATIENCE_S,
    )
    server = uvicorn.Server(config)
    serving = asyncio.ensure_future(server.serve([listener]))
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        await serving


async def test_client_that_waits_for_room_is_not_taken_for_dead() -> None:
    """Its answers to pings lie behind what nobody has taken yet."""
    heard: list[bytes] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        await asyncio.sleep(1.5 * PATIENCE_S)  # as long as a command that reads nothing
        while len(heard) < len(MESSAGES):
            heard.append((await receive())["bytes"])
        await asyncio.sleep(4 * PING_S)  # and is pinged again
        await send({"type": "websocket.send", "text": "whole"})
        await send({"type": "websocket.close", "code": 1000})

    async with served(app) as at, connect(f"ws://{at}", ping_interval=None) as client:
        for message in MESSAGES:
            await client.send(message)
        assert await client.recv() == "whole"
    assert heard == MESSAGES


async def test_client_that_leaves_while_nothing_is_read_is_missed() -> None:
    """Else what it was attached to is held until its command ends."""
    missed = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        await receive()
        await hung_up(scope)
        missed.set()

    async with served(app) as at:
        client = await connect(f"ws://{at}", ping_interval=None)
        for message in MESSAGES[:2]:
            await client.send(message)
        client.transport.abort()
        async with asyncio.timeout(10):
            await missed.wait()


async def test_request_whose_client_leaves_while_nothing_is_read_is_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The end of the connection lies behind what nobody takes."""
    monkeypatch.setattr(protocol, "_LOOK_S", 0.1)
    begun, missed = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        await hung_up(scope)
        missed.set()

    async with served(app) as at:
        host, _, port = at.partition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"
        writer.write(head + bytes(200_000))
        await writer.drain()
        await begun.wait()
        await asyncio.sleep(0.3)
        assert not missed.is_set()
        writer.close()
        async with asyncio.timeout(10):
            await missed.wait()
