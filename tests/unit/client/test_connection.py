"""An answer is the same, however it comes; who has said too much is not asked again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

import pytest

from coldframe.client._connection import Address, open_connection
from coldframe.client._http import Http
from coldframe.protocol.errors import ServiceUnreachableError
from tests.fixtures.waiting import until

Answers = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]

WHOLE = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nA: b\r\n\r\nhello"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nA: b\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"
)


@contextlib.asynccontextmanager
async def served(answers: Answers) -> AsyncIterator[tuple[Http, list[Any]]]:
    """A client of a server that answers so, and that server's connections."""
    connections: list[Any] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        try:
            await answers(reader, writer)
        finally:
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1") as server:
        http = Http(Address(*server.sockets[0].getsockname()), ())
        try:
            yield http, connections
        finally:
            http.close()


async def _asked(reader: asyncio.StreamReader) -> bytes:
    return (await reader.readuntil(b"\r\n\r\n"))[:-4]


def in_pieces(answers: Sequence[Sequence[bytes]]) -> Answers:
    """Answer one request after the other, each in such pieces."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for pieces in answers:
            await _asked(reader)
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(0.002)  # a read of its own

    return serve


@pytest.mark.parametrize("answer", [WHOLE, CHUNKED])
async def test_answer_is_the_same_wherever_it_is_cut(answer: bytes) -> None:
    """Where a network cuts is nobody's choice."""
    cuts = [[answer[:at], answer[at:]] for at in range(1, len(answer))]
    async with served(in_pieces([[answer], *cuts])) as (http, connections):
        for _ in range(len(answer)):
            got = await http.request("GET", "/", within_s=20)
            assert (got.status, got.body, got.headers["a"]) == (200, b"hello", "b")
    assert len(connections) == 1


@pytest.mark.parametrize("size", [0, 1, len(WHOLE) - 1])
async def test_answer_that_ends_in_the_middle_is_none(size: int) -> None:
    """Half a result must not pass for one."""
    async with served(in_pieces([[WHOLE[:size]]])) as (http, _):
        with pytest.raises(ServiceUnreachableError, match="lost before the answer"):
            await http.request("GET", "/", within_s=20)


@pytest.mark.parametrize("length", [b"five", b"-5", b"", b"5, 5"])
async def test_answer_of_no_length_is_none(length: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """And is no fault of the event loop's, which would only be logged."""
    answer = WHOLE.replace(b"length: 5", b"length: " + length)
    async with served(in_pieces([[answer]])) as (http, _):
        with pytest.raises(ServiceUnreachableError):
            await http.request("GET", "/", within_s=20)
    assert not caplog.records


async def test_refusal_of_a_connection_is_an_answer() -> None:
    """Who may not connect is told so, before it has asked and without another word."""
    refusal = b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(refusal)
        await reader.read()

    async with served(refuse) as (http, _):
        for _ in range(20):
            assert (await http.request("GET", "/", within_s=20)).status == 403


async def test_answer_that_does_not_come_in_time_is_lost() -> None:
    """A service that hangs must not hold its client; what is asked later has time of its own."""

    async def hang_then_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(20):
            await _asked(reader)
            await asyncio.sleep(0.06)
            writer.write(WHOLE)
        await _asked(reader)
        writer.write(WHOLE[:30])
        await reader.read()

    async with served(hang_then_answer) as (http, _):
        for _ in range(20):
            assert (await http.request("GET", "/", within_s=1)).body == b"hello"
        with pytest.raises(ServiceUnreachableError, match="TimeoutError"):
            await http.request("GET", "/", within_s=1)


@pytest.mark.parametrize("more", [b"x", WHOLE])
async def test_connection_that_said_more_than_was_asked_is_not_used_again(more: bytes) -> None:
    """The surplus would be taken for the answer to the next request."""

    async def say_more(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _asked(reader)
        writer.write(WHOLE)
        await answered.wait()
        writer.write(more)
        with contextlib.suppress(ConnectionResetError):
            await reader.read()
        gone.set()

    answered, gone = asyncio.Event(), asyncio.Event()
    async with served(say_more) as (http, connections):
        await http.request("GET", "/", within_s=20)
        answered.set()
        async with asyncio.timeout(20):
            await gone.wait()
        answered.clear()
        await http.request("GET", "/", within_s=20)
        answered.set()
    assert len(connections) == 2


async def test_stream_and_requests_take_turns_on_one_connection() -> None:
    """What was read in pieces leaves nothing behind for what comes whole."""
    async with served(in_pieces([[WHOLE], [CHUNKED], [WHOLE]])) as (http, connections):
        assert (await http.request("GET", "/", within_s=20)).body == b"hello"
        async with http.stream("GET", "/") as (head, pieces):
            assert head.status == 200
            assert b"".join([piece async for piece in pieces]) == b"hello"
        assert (await http.request("GET", "/", within_s=20)).body == b"hello"
    assert len(connections) == 1


async def test_pieces_that_come_in_one_turn_of_the_loop_are_one_answer() -> None:
    """Some loops read on before they let anybody else run."""

    async def silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()

    async with await asyncio.start_server(silent, "127.0.0.1") as server:
        address = Address(*server.sockets[0].getsockname())
        for at in range(1, len(CHUNKED)):
            connection = await open_connection(address, None)
            asked = asyncio.ensure_future(connection.answer(b"", "GET", 20))
            await asyncio.sleep(0)
            connection.data_received(CHUNKED[:at])
            connection.data_received(CHUNKED[at:])
            assert (await asked).body == b"hello"
            connection.close()


async def test_content_that_fails_is_what_its_request_fails_of() -> None:
    """A file that cannot be read is no service that cannot be reached."""

    async def fails() -> AsyncIterator[bytes]:
        yield b"begun"
        raise OSError("the disk of the source")

    async def hears(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()

    async with served(hears) as (http, _):
        with pytest.raises(OSError, match="the disk of the source"):
            async with http.stream("PUT", "/", fails()):
                pass


async def test_connections_that_are_kept_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A burst of a thousand requests must not hold a thousand descriptors for good."""
    monkeypatch.setattr("coldframe.client._http._KEPT", 2)
    all_there = asyncio.Barrier(5)

    async def together(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _asked(reader)
        await all_there.wait()
        writer.write(WHOLE)
        await reader.read()

    async with served(together) as (http, connections):
        await asyncio.gather(*(http.request("GET", "/") for _ in range(5)))
        await until(lambda: sum(one.is_closing() for one in connections) == 3)
