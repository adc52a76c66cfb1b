"""The short way of commands answers, refuses and notes as the application does, word for word."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coldframe.gateway.exchange import Exchange
from coldframe.gateway.identity import Scope
from coldframe.gateway.keys import create_key, revoke_key
from coldframe.gateway.settings import GatewaySettings
from coldframe.node.node import Node
from coldframe.node.settings import NodeSettings
from tests.fixtures.short_way import Answer, Connection, Headers, Served, serving

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Served]:
    """A service without keys."""
    async with serving(tmp_path) as served:
        yield served


CASES: list[tuple[Any, Headers]] = [
    ({"command": "echo hi"}, {}),
    ({"command": "exit 3"}, {"Coldframe_Protocol": "1"}),
    ({"command": "true"}, {"Coldframe_Protocol": "1, 77"}),
    ({"command": "true"}, {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}),
    ({"command": "true"}, {"traceparent": "nonsense"}),
    ({"argv": ["/no/such/program"]}, {}),
    ({"command": "true"}, {"Coldframe_Protocol": "77"}),
    ({"command": "true"}, {"Coldframe_On_Behalf": "{}"}),
    (
        {"command": "true"},
        {"Coldframe_On_Behalf": '{"owner":"amber","scopes":["read"],"name":"x"}'},
    ),
    ({"command": "true"}, {"Authorization": "Bearer nonsense"}),
    ({"command": "true"}, {"Origin": "http://127.0.0.1"}),
    ({"command": "true"}, {"Host": "example.org"}),
    ({"command": "true"}, {"sandbox": "sb-none"}),
    ({"command": "true", "expected_version": 77}, {}),
    ({"command": "true", "argv": ["true"]}, {}),
    ({"command": "true", "operation_id": "a b"}, {}),
    (b"no json", {}),
    (b" ", {}),
    (b"\xff" * 100, {}),
    ({"command": "\udcff"}, {}),
]


async def test_both_ways_answer_and_note_the_same(service: Served) -> None:
    """A rule that held on one of them only would be a hole, or a surprise."""
    for body, headers in CASES:
        seen = []
        for way in ("short", "long"):
            service.noted()
            before = Counter(service.app.meters.requests)
            async with service.connection() as caller:
                ask: Callable[..., Any] = getattr(caller, way)
                answer: Answer = await ask(body, **headers)
                if answer.headers.get("connection") == "close":
                    assert await caller.reader.read() == b""
            counted = Counter(service.app.meters.requests) - before
            assert counted == {answer.status: 1}
            seen.append((answer.comparable(), service.noted()))
        short, long = seen
        assert short == long, (body, headers)
        assert len(short[1]) == 1


async def test_keys_are_asked_for_from_the_next_request_on(service: Served) -> None:
    """The connection that was let in before is nobody's key."""
    command = {"command": "true"}
    async with service.connection() as caller:
        assert (await caller.short(command)).status == 200
        key = await create_key(service.store, "amber", [Scope.EXEC])
        assert (await caller.short(command)).status == 401
    async with service.connection() as caller:
        bearer = {"Authorization": f"Bearer {key}"}
        foreign = await caller.short(command, **bearer)
        assert (foreign.status, foreign.json()["code"]) == (404, "sandbox_not_found")
    async with service.connection() as caller:
        reader = await create_key(service.store, "amber", [Scope.READ])
        assert (await caller.short(command, Authorization=f"Bearer {reader}")).status == 403
    async with service.connection() as caller:
        admin = await create_key(service.store, "ops", [Scope.ADMIN])
        bearer = {"Authorization": f"Bearer {admin}"}
        assert (await caller.short(command, **bearer)).status == 200
        await revoke_key(service.store, admin)
        assert (await caller.short(command, **bearer)).status == 401


async def test_revoked_key_ends_what_waits(service: Served) -> None:
    """Within a second or two, as on every other route; the command itself goes on."""
    admin = await create_key(service.store, "ops", [Scope.ADMIN])
    slow = {"command": "sleep 20", "operation_id": "slow"}
    async with service.connection() as caller:
        head, body = caller.request(slow, Authorization=f"Bearer {admin}")
        caller.writer.write(head + body)
        await service.app.taken.wait()
        await revoke_key(service.store, admin)
        assert (await caller.answer()).status == 401
    assert await service.node.poll_exec("slow") is None
    await service.node.cancel_exec("slow")


async def test_answer_is_late_once_and_the_same_again_gives_the_result(service: Served) -> None:
    """A caller that asks again joins the command that runs."""
    slow = {"command": "sleep 1.3; echo late", "operation_id": "late"}
    async with service.connection() as caller:
        assert (await caller.short(slow, "?wait_s=1")).status == 202
        assert (await caller.short(slow)).json()["exit_code"] == 0
        again = await caller.short(slow)
        assert again.json()["operation_id"] == "late"


async def test_nothing_is_kept_of_who_was_told_that_it_runs_on(service: Served) -> None:
    """Whoever asks for an hour whether it has ended must not fill the memory with its questions."""
    slow = {"command": "sleep 20", "operation_id": "slow"}
    async with service.connection() as caller:
        for _ in range(2):
            assert (await caller.short(slow, "?wait_s=1")).status == 202
    async with asyncio.timeout(20):
        while any(isinstance(one, Exchange) for one in gc.get_objects()):
            await asyncio.sleep(0.05)
            gc.collect()
    await service.node.cancel_exec("slow")


async def test_command_that_was_answered_needs_no_search_for_garbage(service: Served) -> None:
    """What is kept for replays is exempt from that search, and all that it leads to with it."""
    async with service.connection() as caller:
        gc.collect()
        gc.disable()
        try:
            for _ in range(5):
                assert (await caller.short({"argv": ["true"]})).status == 200
            left = sum(isinstance(one, Exchange) for one in gc.get_objects())
        finally:
            gc.enable()
    assert left <= 1  # the connection's last


async def test_trace_of_a_command_is_not_that_of_what_follows_it(service: Served) -> None:
    """What comes by the same connection is asked by a browser, perhaps, for something else."""
    async with service.connection() as caller:
        trace = f"00-{TRACE}-00f067aa0ba902b7-01"
        assert (await caller.short({"command": "true"}, traceparent=trace)).status == 200
        caller.writer.write(b"GET /p/nonsense/ HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert (await caller.answer()).status == 404
        assert (await caller.short({"command": "true"})).status == 200
    assert [line["trace"] for line in service.noted()] == [TRACE, None, None]


async def test_stop_answers_who_waits_at_once(service: Served) -> None:
    """Nobody is to wait for a service that wants to end."""
    slow = {"command": "sleep 20", "operation_id": "slow"}
    async with service.connection() as caller:
        head, body = caller.request(slow)
        caller.writer.write(head + body)
        await service.app.taken.wait()
        service.app.answer_now()
        assert (await caller.answer()).status == 202
    await service.node.cancel_exec("slow")


async def test_requests_in_one_piece_are_answered_in_their_order(service: Served) -> None:
    """Whoever sends the next before the answer gets answers in the order of the questions."""
    async with service.connection() as caller:
        one = b"".join(caller.request({"command": "sleep 0.1; echo one"}))
        two = b"".join(caller.request({"command": "echo two"}))
        look = b"GET /v1/versions HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        caller.writer.write(one + look + two + look + one[:-4])
        answers = [await caller.answer() for _ in range(4)]
        assert [one.status for one in answers] == [200] * 4
        assert "protocol" in answers[1].json()
        sizes = [answers[at].json()["duration_s"] for at in (0, 2)]
        assert sizes[0] > sizes[1]
        caller.writer.write(one[-4:])
        assert (await caller.answer()).status == 200


async def test_answers_to_who_does_not_read_are_not_heaped_up(service: Served) -> None:
    """Its next request is not read before the answer to the last is on its way."""
    loud = {"command": "yes | head -c 1000000", "operation_id": "loud"}
    async with service.connection() as caller:
        request = b"".join(caller.request(loud))
        assert (await caller.short(loud)).status == 200
        caller.writer.transport.pause_reading()  # type: ignore[attr-defined]
        caller.writer.write(request * 50)
        counts = [-1, service.app.short]
        while counts[-1] != counts[-2]:
            await asyncio.sleep(0.3)
            counts.append(service.app.short)
        assert counts[-1] < 40
        caller.writer.transport.resume_reading()  # type: ignore[attr-defined]
        for _ in range(50):
            answer = await caller.answer()
            assert answer.json()["out"]["total_bytes"] == 1000000


@pytest.mark.parametrize("end", ["\r\nConnection: close", "\r\nExpect: 100-continue"])
async def test_what_is_asked_in_another_way_goes_through_the_application(
    service: Served, end: str
) -> None:
    """What the short way does not know is not taken for what it knows."""
    async with service.connection() as caller:
        head, body = caller.request({"command": "true"})
        caller.writer.write(head.replace(b"\r\nHost", end.encode() + b"\r\nHost") + body)
        async with asyncio.timeout(60):
            got = await caller.reader.readuntil(b"\r\n\r\n")
        assert got.startswith((b"HTTP/1.1 200", b"HTTP/1.1 100"))
        assert service.app.short == 0


async def test_client_that_goes_away_leaves_its_command_running(service: Served) -> None:
    """It asks again by the operation id."""
    async with service.connection() as caller:
        head, body = caller.request({"command": "sleep 0.2; echo on", "operation_id": "on"})
        caller.writer.write(head + body)
        await service.app.taken.wait()
    assert (await service.node.wait_exec("on")).exit_code == 0
    async with service.connection() as caller:
        assert (await caller.short({"command": "sleep 0.2; echo on", "operation_id": "on"})).status


async def test_body_that_is_larger_than_allowed_is_refused(tmp_path: Path) -> None:
    """However it comes."""
    settings = GatewaySettings(audit=tmp_path / "audit", json_bytes=1000)
    async with serving(tmp_path, settings) as service:
        async with service.connection() as caller:
            answer = await caller.short({"command": "x" * 2000})
        assert (answer.status, answer.json()["code"]) == (413, "too_large")


def in_chunks(caller: Connection, trailers: bytes) -> bytes:
    """A request that is whole but for the end of its trailers."""
    head, _ = caller.request(b"")
    chunked = head.replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    return chunked + b'13\r\n{"command": "true"}\r\n0\r\n' + trailers


async def test_trailers_are_no_headers(service: Served) -> None:
    """A proxy before us may have looked at the headers alone."""
    behalf = b'Coldframe-On-Behalf: {"owner":"amber","scopes":["admin"],"name":"x"}\r\n'
    for cut in (None, -1):
        async with service.connection() as caller:
            sent = in_chunks(caller, behalf + b"\r\n")
            caller.writer.write(sent[:cut])
            await asyncio.sleep(0.05)
            caller.writer.write(sent[len(sent) if cut is None else cut :])
            assert (await caller.answer()).status == 200
    assert [line["owner"] for line in service.noted()] == [None, None]


@pytest.mark.parametrize("lines", [b"x: " + b"y" * 1000 + b"\r\n", b"y" * 1000])
async def test_trailers_are_bounded_as_heads_are(service: Served, lines: bytes) -> None:
    """Also after the answer, and by whoever has no key: they would be kept in memory."""
    for path in ("", "/healthz"):
        async with service.connection() as caller, asyncio.timeout(20):
            sent = in_chunks(caller, b"x: ")
            first, _, rest = sent.partition(b"\r\n")
            caller.writer.write((b"POST %b HTTP/1.1" % path.encode() if path else first) + b"\r\n")
            caller.writer.write(rest)
            with pytest.raises(ConnectionError):
                while True:
                    caller.writer.write(lines)
                    await caller.writer.drain()
        refused = [line for line in service.noted() if line["status"] == 431]
        assert len(refused) == 1


class Broken(Node):
    """A node with a fault."""

    def begin_exec(self, *_: Any) -> Callable[[], None]:
        """Fail as nobody foresaw."""
        raise ZeroDivisionError("secret detail")


async def test_fault_is_logged_whole_and_told_in_a_sentence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As on every other way (`test_faults`): and no further request goes into the connection."""
    node = Broken(NodeSettings(home=tmp_path, runtime="fake"))
    async with serving(tmp_path, node=node) as service, service.connection() as caller:
        answer = await caller.short({"command": "true"})
        assert (answer.status, answer.json()["code"]) == (500, "internal")
        assert answer.headers["connection"] == "close"
        assert await caller.reader.read() == b""
    assert b"secret" not in answer.body
    assert "ZeroDivisionError: secret detail" in caplog.text


async def test_fault_at_the_door_is_answered_and_leaves_nobody_behind(service: Served) -> None:
    """A key that a newer Coldframe wrote: the node still leaves when it is idle."""
    key = await create_key(service.store, "amber", [Scope.EXEC])
    record = await service.store.find_key(key.split("_")[1])
    assert record is not None
    odd = replace(record, id="0" * 12, scopes=("unheard-of",))
    await service.store.add_key(odd)
    bearer = {"Authorization": f"Bearer cf_{odd.id}_{key.split('_')[2]}"}
    async with service.connection() as caller:
        answer = await caller.short({"command": "true"}, **bearer)
        assert (answer.status, answer.json()["code"]) == (500, "internal")
        assert await caller.reader.read() == b""
    await service.node.delete(service.sandbox_id)
    async with asyncio.timeout(60):
        await service.doors.until_idle(0.1)
