"""Whoever reaches the proxy can send it heads, before any key is asked for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from coldframe.inference.app import ProxyApp
from coldframe.inference.heads import MOST_BYTES
from coldframe.inference.server import serving

_CHUNKED = b"POST /v1 HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
_LINE = b"X: " + b"a" * 8000 + b"\r\n"


async def _answer(scope: Any, receive: Any, send: Any) -> None:
    size = 0
    while True:
        message = await receive()
        size += len(message.get("body", b""))
        if not message.get("more_body"):
            break
    body = b"%d" % size
    head = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture
async def port() -> AsyncIterator[int]:
    async with serving(cast(ProxyApp, _answer)) as url:
        yield int(url.rsplit(":")[-1])


async def _said(port: int, begin: bytes) -> bytes:
    """Send a beginning and then lines without end, until nothing more is taken."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(begin)
    sent = 0
    try:
        while sent < 64 * MOST_BYTES and not writer.is_closing():
            writer.write(_LINE)
            sent += len(_LINE)
            await writer.drain()
            await asyncio.sleep(0)
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        assert sent < 64 * MOST_BYTES, "all of it was taken"
        writer.close()


@pytest.mark.parametrize(
    "begin",
    [b"POST /v1 HTTP/1.1\r\n", _CHUNKED + b"0\r\n", _CHUNKED + b"2\r\nhi\r\n0\r\n"],
    ids=["head", "trailers", "trailers-after-a-body"],
)
async def test_heads_and_trailers_without_end_are_refused(port: int, begin: bytes) -> None:
    """They would fill the memory of the proxy, and so end every attempt that it carries."""
    assert (await _said(port, begin)).partition(b"\r\n")[0] in {b"HTTP/1.1 431 Too Large", b""}


async def test_large_bodies_and_many_requests_of_one_connection_are_taken(port: int) -> None:
    """What counts is no body, and ends with each message."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    size = 20 * MOST_BYTES
    for _ in range(3):
        writer.write(b"POST /v1 HTTP/1.1\r\nHost: x\r\n")
        writer.write(b"X: %b\r\n" % (b"a" * (MOST_BYTES // 2)))
        writer.write(b"Content-Length: %d\r\n\r\n" % size + bytes(size))
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert await reader.readexactly(len(str(size))) == b"%d" % size
    writer.close()
