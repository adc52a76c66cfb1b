"""What becomes of sandboxes, from a cursor on; and the trace that goes with everything."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from coldframe import (
    AsyncSandboxClient,
    CursorExpiredError,
    Sandbox,
    SandboxClient,
    SandboxEvent,
)
from coldframe.images.base import Image
from coldframe.images.store import ImageStore
from coldframe.protocol import tracing
from tests.fixtures.service import Service, serving
from tests.fixtures.waiting import wait_until
from tests.integration.gateway.conftest import http

LIFE = ["requested", "provisioning", "ready", "terminating", "deleted"]


def _of(
    events: Iterator[SandboxEvent], sandbox_id: str, count: int = len(LIFE)
) -> list[SandboxEvent]:
    """The first events of a sandbox."""
    mine = (event for event in events if event.sandbox_id == sandbox_id)
    return list(itertools.islice(mine, count))


def test_every_transition_is_told_in_order_and_again_from_any_cursor(
    remote: SandboxClient,
) -> None:
    """Who follows must miss nothing, also after a pause."""
    sandbox = remote.create_sandbox("any")
    sandbox.delete()

    seen = _of(remote.events("oldest"), sandbox.id)

    assert [event.state for event in seen] == LIFE
    assert [event.version for event in seen] == [1, 2, 3, 4, 5]
    assert all(a.at <= b.at for a, b in itertools.pairwise(seen))
    assert _of(remote.events(seen[1].cursor), sandbox.id, 3) == seen[2:]


def test_who_waits_is_told_in_the_moment(service: Service, remote: SandboxClient) -> None:
    """Without a cursor from now on; nobody polls."""
    heard: list[SandboxEvent] = []
    last: list[str] = []

    def follow(events: Iterator[SandboxEvent]) -> None:
        for event in events:
            heard.append(event)
            if [event.sandbox_id, event.state] == [*last, LIFE[-1]]:
                return

    def begun() -> bool:
        remote.create_sandbox("any").delete()
        return bool(heard)

    before = remote.create_sandbox("any")
    before.delete()
    with SandboxClient(url=service.unix) as other:
        follower = threading.Thread(target=follow, args=(other.events(),))
        follower.start()
        wait_until(begun)
        sandbox = remote.create_sandbox("any")
        last.append(sandbox.id)
        sandbox.delete()
        follower.join(20)
    assert [event.state for event in heard if event.sandbox_id == sandbox.id] == LIFE
    assert before.id not in {event.sandbox_id for event in heard}


def test_node_of_this_process_tells_the_same(client: SandboxClient) -> None:
    """The SDK is one."""
    sandbox = client.create_sandbox("any")
    sandbox.delete()
    assert [event.state for event in _of(client.events("oldest"), sandbox.id)] == LIFE


def test_events_of_a_browser_go_on_from_the_last_id(
    caller: httpx.Client, remote: SandboxClient
) -> None:
    """EventSource does so by itself."""
    sandbox = remote.create_sandbox("any")
    sandbox.delete()
    wanted = {"Accept": "text/event-stream"}

    def read(
        parameters: dict[str, str], headers: dict[str, str], count: int
    ) -> list[tuple[str, str]]:
        with caller.stream("GET", "/v1/events", params=parameters, headers=headers) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            ids, found = "", []
            for line in answer.iter_lines():
                name, _, value = line.partition(": ")
                if name == "id":
                    ids = value
                elif name == "data" and json.loads(value)["sandbox_id"] == sandbox.id:
                    found.append((ids, json.loads(value)["state"]))
                if len(found) == count:
                    break
            return found

    seen = read({"cursor": "oldest"}, wanted, 5)
    assert [state for _, state in seen] == LIFE
    assert read({}, {**wanted, "Last-Event-ID": seen[2][0]}, 2) == seen[3:]


def test_cursor_that_is_too_old_is_told_where_to_go_on(tmp_path: Path) -> None:
    """Silence would look as if nothing had happened."""
    with (
        serving(tmp_path, "fake", COLDFRAME_EVENT_COUNT="8") as service,
        SandboxClient(url=service.unix) as client,
        http(service.unix) as caller,
    ):
        first = caller.get("/v1/events").json()["next_cursor"]
        for _ in range(3):
            client.create_sandbox("any").delete()
        answer = caller.get("/v1/events", params={"cursor": first})
        assert (answer.status_code, answer.json()["code"]) == (410, "cursor_expired")
        with pytest.raises(CursorExpiredError) as raised:
            next(iter(client.events(first)))
        assert raised.value.oldest == answer.json()["oldest"]
        kept = caller.get("/v1/events", params={"cursor": answer.json()["oldest"]}).json()["events"]
        assert [event["state"] for event in kept] == [*LIFE[2:], *LIFE]
        stream = {"Accept": "text/event-stream"}
        assert caller.get(f"/v1/events?cursor={first}", headers=stream).status_code == 410
        garbage = caller.get("/v1/events?cursor=x", headers=stream)
        assert (garbage.status_code, garbage.json()["code"]) == (400, "invalid_request")


async def test_trace_goes_from_the_caller_to_the_deletion(service: Service) -> None:
    """One id finds everything that was done for a task."""
    trace_id = tracing.new_trace_id()
    async with AsyncSandboxClient(url=service.tcp) as client:
        with tracing.traced(trace_id):
            sandbox = await client.create_sandbox("any")
            result = await sandbox.exec("true")
            started = await (await sandbox.start("true")).wait()
        other = await sandbox.exec("true")
        await sandbox.delete()
        events = []
        async for event in client.events("oldest"):
            events += [event] if event.sandbox_id == sandbox.id else []
            if len(events) == len(LIFE):
                break
    assert {result.trace_id, started.trace_id, sandbox.info.trace_id} == {trace_id}
    assert other.trace_id is None
    assert {event.trace_id for event in events} == {trace_id}
    audit = (service.home / "audit" / "audit.jsonl").read_text().splitlines()
    traced = [json.loads(line) for line in audit if trace_id in line]
    assert len(traced) >= 3


def test_trace_of_a_synchronous_caller_is_its_own(remote: SandboxClient) -> None:
    """Threads of one client work at different tasks."""
    found = {}

    def work(trace_id: str) -> None:
        with tracing.traced(trace_id), remote.create_sandbox("any") as sandbox:
            found[trace_id] = sandbox.exec("true").trace_id

    ids = [tracing.new_trace_id() for _ in range(4)]
    threads = [threading.Thread(target=work, args=(one,)) for one in ids]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {one: one for one in ids}


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00-0-0-00",
        f"00-{'0' * 32}-{'1' * 16}-01",
        f"ff-{'1' * 32}-{'1' * 16}-01",
        f"00-{'A' * 32}-{'1' * 16}-01",
        f"00-{'1' * 32}-{'0' * 16}-01",
        "x" * 3000,
        f"00-{'1' * 32}-{'1' * 16}-01-more",
    ],
)
def test_trace_that_is_none_is_left_out(caller: httpx.Client, served: Sandbox, header: str) -> None:
    """A header of a stranger's must not get into records."""
    answer = caller.post(
        f"/v1/sandboxes/{served.id}/execs",
        json={"command": "true"},
        headers={"traceparent": header},
    )
    assert (answer.status_code, answer.json()["trace_id"]) == (200, None)


CONNECT = """python3 -c "
import socket
for _ in range(3):
    try: socket.create_connection(('169.254.169.254', 80)).recv(1)
    except OSError: pass
" """


@pytest.mark.root
def test_network_and_tampering_are_told_to_whom_they_belong(
    tmp_path: Path, image_store: ImageStore, debian_image: Image
) -> None:
    """Who watches many sandboxes must see an attack in the moment, and nobody else may."""
    images = image_store.layers_directory.parent
    with serving(tmp_path, "native", images=images) as service:
        keys = {owner: _key(service.home, owner) for owner in ("amber", "blue")}
        with (
            SandboxClient(url=service.tcp, api_key=keys["amber"]) as amber,
            SandboxClient(url=service.tcp, api_key=keys["blue"]) as blue,
            amber.create_sandbox(debian_image.name, network="web.example") as sandbox,
        ):
            heard: list[SandboxEvent] = []
            follower = threading.Thread(
                target=lambda: heard.extend(
                    itertools.islice(amber.events("oldest", kind="egress"), 4)
                )
            )
            follower.start()
            sandbox.exec(CONNECT)
            sandbox.exec("mkdir /guarded; echo 'echo planted > /guarded/word' > /script")
            sandbox.guard("/guarded", "vouched", ["word"])
            sandbox.exec("sh /script; echo mine > /guarded/word", user=0, operation_id="vouched")
            refused = sandbox.guard_report().refused
            sandbox.guard_report()
            sandbox.unguard()
            follower.join(20)

            asked = [event.egress for event in heard if event.egress is not None]
            assert len(asked) == 4
            assert asked == list(sandbox.egress_events().events[:4])
            assert {(one.address, one.decision) for one in asked[-3:]} == {
                ("169.254.169.254", "refused")
            }
            told = list(amber.events("oldest", follow=False, kind="tamper"))
            assert [event.tamper for event in told] == list(refused)
            assert {event.sandbox_id for event in (*told, *heard)} == {sandbox.id}
            for kind in ("state", "egress", "tamper"):
                assert list(blue.events("oldest", follow=False, kind=kind)) == []
            with pytest.raises(CursorExpiredError):  # each kind has its own
                next(iter(amber.events(told[0].cursor, kind="state")))


def _key(home: Path, owner: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "coldframe.cli.main", "key", "create", "--owner", owner],
        env={**os.environ, "COLDFRAME_HOME": str(home)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()
