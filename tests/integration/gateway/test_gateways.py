"""Two gateways before one node, their keys in a real Redis: they agree, whatever becomes of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from coldframe import AsyncSandboxClient, SandboxClient
from coldframe.images.store import ImageStore
from coldframe.protocol.errors import (
    ColdframeError,
    NotAuthenticatedError,
    NotPermittedError,
    OperationMismatchError,
    QuotaError,
    SandboxNotFoundError,
    ServiceUnreachableError,
    StoreUnreachableError,
)
from coldframe.protocol.tracing import traced
from tests.fixtures.certificates import self_signed
from tests.fixtures.redis import RedisServer, redis_running
from tests.fixtures.service import Service, serving
from tests.fixtures.waiting import until_asked, wait_until
from tests.integration.gateway.conftest import audit_lines, http, until_logged

IMAGE = "busybox"

pytestmark = pytest.mark.root


@dataclass
class Pair:
    """A node, two gateways before it, and the Redis that they share."""

    node: Service
    gateways: tuple[Service, Service]
    redis: RedisServer

    def key(self, owner: str, *scopes: str) -> str:
        """Make a key."""
        words = [word for scope in scopes for word in ("--scope", scope)]
        return self.command("key", "create", "--owner", owner, *words)

    def command(self, *words: str) -> str:
        """Run `coldframe` on the store of both."""
        return _coldframe(self.redis.url, *words)

    @contextlib.contextmanager
    def clients(self, key: str) -> Iterator[tuple[SandboxClient, SandboxClient]]:
        """A client of each gateway, with one key."""
        one, two = (SandboxClient(url=gateway.tcp, api_key=key) for gateway in self.gateways)
        try:
            yield one, two
        finally:
            with contextlib.suppress(ColdframeError):
                one.close()
            with contextlib.suppress(ColdframeError):
                two.close()


def _coldframe(store: str, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "coldframe.cli.main", *words],
        env={**os.environ, "COLDFRAME_STORE": store},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, image_store: ImageStore) -> Iterator[Pair]:
    """Real processes: a node, two gateways, a Redis server."""
    directory = tmp_path_factory.mktemp("pair")
    for name in ("node", "one", "two"):
        (directory / name).mkdir()
    with (
        redis_running(directory / "redis") as redis,
        serving(
            directory / "node",
            "native",
            images=image_store.layers_directory.parent,
            COLDFRAME_QUARANTINE_S="0.2",
        ) as node,
        _gateway(directory / "one", node, redis) as one,
        _gateway(directory / "two", node, redis) as two,
    ):
        yield Pair(node, (one, two), redis)


def _gateway(
    directory: Path, node: Service, redis: RedisServer
) -> contextlib.AbstractContextManager[Service]:
    return serving(directory, "fake", "--node", node.unix, "--store", redis.url)


def test_what_was_asked_by_one_gateway_is_answered_by_the_other(pair: Pair) -> None:
    """A client that is sent to another gateway in the middle must do nothing twice."""
    with pair.clients(pair.key("amber")) as (one, two):
        made = one.create_sandbox(IMAGE, operation_id="make", name="mine")
        again = two.create_sandbox(IMAGE, operation_id="make", name="mine")
        assert again.id == made.id
        with pytest.raises(OperationMismatchError):
            two.create_sandbox(IMAGE, operation_id="make", name="mine", cpu=2.0)

        first = made.exec("echo once >> ran; echo said", operation_id="run")
        second = again.exec("echo once >> ran; echo said", operation_id="run")
        assert (first.started_at, first.stdout) == (second.started_at, b"said\n")
        assert again.files.read("/ran") == b"once\n"

        made.renew(5000)
        assert two.get_sandbox("mine").info.expires_at == pytest.approx(time.time() + 5000, abs=30)
        version = two.get_sandbox(made.id).info.version
        with http(pair.gateways[1].tcp, pair.key("amber")) as caller:
            stale = caller.delete(f"/v1/sandboxes/{made.id}?expected_version={version - 1}")
        assert (stale.status_code, stale.json()["sandbox"]["version"]) == (409, version)
        made.delete()
        assert two.get_sandbox(made.id).info.state == "deleted"


async def test_quota_is_exact_over_two_gateways(pair: Pair) -> None:
    """Never one more than allowed, and no place lost to failures, deletes, leases or cancelling."""
    key = pair.key("tim")
    pair.command("key", "quota", "tim", "--sandboxes", "7", "--memory", "70GiB")
    clients = [AsyncSandboxClient(url=one.tcp, api_key=key) for one in pair.gateways]

    async def burst(count: int, **options: Any) -> list[str]:
        asked = (clients[n % 2].create_sandbox(IMAGE, **options) for n in range(count))
        got = await asyncio.gather(*asked, return_exceptions=True)
        refused = [one for one in got if isinstance(one, BaseException)]
        assert {type(one) for one in refused} <= {QuotaError}
        return [one.id for one in got if not isinstance(one, BaseException)]

    made = await burst(50)
    assert len(made) == 7
    with http(pair.gateways[1].tcp, key) as caller:
        over = caller.post("/v1/sandboxes", json={"image": IMAGE})
    assert (over.status_code, over.json()["code"]) == (429, "quota_exceeded")
    assert over.headers["retry-after"] == "1"
    with http(pair.gateways[1].tcp, key) as caller:
        mine = caller.get("/v1/resources").json()
    assert (mine["in_use"]["sandboxes"], mine["quota"]["sandboxes"], mine["node"]) == (7, 7, None)
    with http(pair.gateways[0].tcp, pair.key("root", "admin", "read")) as caller:
        whole = caller.get("/v1/resources").json()["node"]
    assert whole["in_use"]["sandboxes"] >= 7
    assert len(await clients[0].list_sandboxes()) == 7
    await asyncio.gather(*(clients[n % 2].delete_sandbox(one) for n, one in enumerate(made)))

    leased = await burst(50)
    assert len(leased) == 7
    for one in leased:
        await (await clients[0].get_sandbox(one)).renew(0.2)
    for one in leased:  # and the window after it
        await until_asked(partial(_is_deleted, clients[0], one))

    cancelled = [asyncio.ensure_future(clients[n % 2].create_sandbox(IMAGE)) for n in range(20)]
    await asyncio.sleep(0.01)
    for task in cancelled:
        task.cancel()
    for end in await asyncio.gather(*cancelled, return_exceptions=True):
        if not isinstance(end, BaseException):
            await end.delete()  # it was ready before
    clashing = (clients[n % 2].create_sandbox(IMAGE, name="same") for n in range(20))
    got = await asyncio.gather(*clashing, return_exceptions=True)
    (named,) = [one for one in got if not isinstance(one, BaseException)]
    await named.delete()
    await until_asked(partial(_has_none, clients[1]))

    assert len(await burst(50, memory_bytes=20 << 30)) == 3
    for client in clients:
        await client.close()


async def _is_deleted(client: AsyncSandboxClient, sandbox_id: str) -> bool:
    return (await client.get_sandbox(sandbox_id)).info.state == "deleted"


async def _has_none(client: AsyncSandboxClient) -> bool:
    return not await client.list_sandboxes()


def test_revoked_key_is_refused_by_both_gateways_at_once(pair: Pair) -> None:
    """A stolen key must not live on where nobody looked."""
    key = pair.key("amber")
    with (
        http(pair.gateways[0].tcp, key) as one,
        http(pair.gateways[1].tcp, key) as two,
    ):
        for caller in (one, two):
            assert caller.get("/v1/sandboxes").status_code == 200
        pair.command("key", "revoke", key.split("_")[1])
        for caller in (two, one):
            assert caller.get("/v1/sandboxes").status_code == 401


def test_revoking_a_key_ends_what_is_open_with_it(pair: Pair) -> None:
    """Else whoever stole it would go on listening, and typing, for as long as it likes."""
    key, other = pair.key("amber"), pair.key("amber")
    with pair.clients(other) as (kept, _), kept.create_sandbox(IMAGE) as sandbox:
        running = sandbox.start("cat", stdin_open=True, operation_id="typing")
        headers = {"Authorization": f"Bearer {key}"}
        address = pair.gateways[0].tcp
        uri = f"{address.replace('http', 'ws')}/v1/execs/typing/attach"
        ended: list[Any] = []

        def wait() -> None:
            with http(address, key) as caller:
                ended.append(caller.get("/v1/execs/typing?wait_s=30"))

        def listen() -> None:
            with (
                contextlib.suppress(httpx.RemoteProtocolError),
                httpx.stream("GET", f"{address}/v1/execs/typing/events", headers=headers) as told,
            ):
                ended.append(b"".join(told.iter_bytes()))

        with connect(uri, additional_headers=headers) as attached:
            attached.send(b"before\n")
            assert attached.recv() == b"\x01before\n"
            open_ones = [threading.Thread(target=one) for one in (wait, listen)]
            for one in open_ones:
                one.start()
            time.sleep(0.5)
            pair.command("key", "revoke", key.split("_")[1])
            with pytest.raises(ConnectionClosed):
                attached.recv(timeout=20)
            for one in open_ones:
                one.join(20)
        assert [one.status_code for one in ended if isinstance(one, httpx.Response)] == [401]
        running.write_stdin("after\n")
        running.close_stdin()
        assert running.wait().stdout == b"before\nafter\n"


def test_callers_of_a_gateway_are_told_apart_at_the_node(pair: Pair) -> None:
    """Owners, scopes and names mean behind a gateway what they mean before a node."""
    hers, his = pair.key("amber"), pair.key("blue", "read")
    with pair.clients(hers) as (amber, _), pair.clients(his) as (blue, _):
        sandbox = amber.create_sandbox(IMAGE, name="solver")
        with pytest.raises(SandboxNotFoundError):
            blue.get_sandbox(sandbox.id)
        with pytest.raises(NotPermittedError, match="'create'"):
            blue.create_sandbox(IMAGE)
        with pytest.raises(NotPermittedError, match="'admin'"):
            amber.ledger()
        assert sandbox.info.spec.labels["owner"] == "amber"
        forged = '{"owner":null,"scopes":["admin"],"name":"x","quota":null}'
        for gateway in (*pair.gateways, pair.node):
            with http(gateway.tcp, hers) as caller:
                answer = caller.get("/v1/ledger", headers={"Coldframe-On-Behalf": forged})
            assert answer.status_code in {401, 403}, answer.text
        for nonsense in ("{}", "x", '{"owner":null,"scopes":["exec"],"name":"x"}', "ö"):
            with http(pair.node.unix) as caller:
                headers = {"Coldframe-On-Behalf": nonsense.encode()}
                assert caller.get("/v1/sandboxes", headers=headers).status_code == 400
        no_quota = '{"owner":"green","scopes":["create"],"name":"x"}'
        with http(pair.node.unix) as caller:
            headers = {"Coldframe-On-Behalf": no_quota}
            answer = caller.post("/v1/sandboxes", json={"image": IMAGE}, headers=headers)
            assert (answer.status_code, "quota" in answer.text) == (400, True)
        sandbox.delete()


def test_everything_streams_through_a_gateway(pair: Pair) -> None:
    """Files, events, sockets: as fast as they are read, and byte for byte."""
    key = pair.key("amber")
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    with pair.clients(key) as (one, _), traced(trace), one.create_sandbox(IMAGE) as sandbox:
        assert sandbox.info.trace_id == trace
        noted = [audit_lines(home)[-1] for home in (pair.gateways[0].home, pair.node.home)]
        assert [(line["trace"], line["status"]) for line in noted] == [(trace, 201)] * 2
        content = os.urandom(20 << 20)
        sandbox.files.write("/big", content)
        assert sandbox.files.read("/big") == content
        sandbox.files.write(b"/\xff odd%41", b"odd")
        assert sandbox.files.read(b"/\xff odd%41") == b"odd"
        sandbox.exec("echo out; echo err >&2", operation_id="sse")
        with http(pair.gateways[0].tcp, key) as caller:
            told = caller.get("/v1/execs/sse/events").text
            part = caller.get(
                f"/v1/sandboxes/{sandbox.id}/files?path=/big", headers={"Range": "bytes=5-9"}
            )
            assert (part.status_code, part.content) == (206, content[5:10])
        assert "event: result" in told

        sandbox.start("read line; echo heard $line; sleep 0.1", stdin_open=True, operation_id="ws")
        uri = f"{pair.gateways[0].tcp.replace('http', 'ws')}/v1/execs/ws/attach"
        headers = {"Authorization": f"Bearer {key}"}
        with connect(uri, additional_headers=headers) as attached:
            attached.send(b"you\n")
            assert attached.recv() == b"\x01heard you\n"
        for path, refused, code in (
            ("execs/none/attach", headers, "operation_not_found"),
            ("execs/ws/attach", {}, "not_authenticated"),
        ):
            with pytest.raises(InvalidStatus) as raised:
                connect(uri.rpartition("/v1/")[0] + f"/v1/{path}", additional_headers=refused)
            assert json.loads(raised.value.response.body or b"")["code"] == code


def test_policies_patches_cancelling_and_traces_pass_a_gateway(pair: Pair) -> None:
    """What is asked of a gateway is asked of its node, and nobody else's is reached."""
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    with (
        pair.clients(pair.key("amber")) as (one, _),
        one.create_sandbox(IMAGE) as sandbox,
        http(pair.gateways[1].tcp, pair.key("amber")) as amber,
        http(pair.gateways[1].tcp, pair.key("blue")) as blue,
    ):
        policy = f"/v1/sandboxes/{sandbox.id}/network"
        assert amber.get(policy).json() == sandbox.info.spec.network.model_dump(mode="json")
        assert blue.get(policy).status_code == 404
        sandbox.start("setsid sleep 300 & sleep 300", operation_id="cancelled")
        assert blue.post("/v1/execs/cancelled/cancel").status_code == 404
        headers = {"traceparent": f"00-{trace}-00f067aa0ba902b7-01"}
        ends = [amber.post("/v1/execs/cancelled/cancel", headers=headers) for _ in range(2)]
        assert [end.json()["reason"] for end in ends] == ["signal", "signal"]
        assert sandbox.processes() == ()
        sandbox.files.write("/one", b"1\n")
        diff = "--- a/one\n+++ b/one\n@@ -1 +1 @@\n-1\n+2\n"
        patch = f"/v1/sandboxes/{sandbox.id}/patch?root=/"
        assert blue.post(patch, content=diff).status_code == 404
        assert [amber.post(patch, content=diff).status_code for _ in range(2)] == [200, 422]
        assert sandbox.files.read("/one") == b"2\n"
        told = ends[0].headers.get_list("traceparent")
        assert [one.split("-")[1] for one in told] == [trace]


def test_client_that_leaves_a_gateway_leaves_nothing_at_the_node(pair: Pair) -> None:
    """Who goes away in the middle of a create, or of a stream, holds nothing up."""
    key = pair.key("amber")
    with pair.clients(key) as (one, _), one.create_sandbox(IMAGE) as sandbox:
        sandbox.start("while :; do echo x; sleep 0.05; done", operation_id="long")
        address = pair.gateways[0].tcp
        headers = {"Authorization": f"Bearer {key}"}
        for _ in range(5):
            with httpx.stream("GET", f"{address}/v1/execs/long/events", headers=headers) as going:
                next(going.iter_bytes())
        sandbox.attach("long").kill()


def test_emptied_redis_loses_no_sandbox_and_opens_no_door(pair: Pair) -> None:
    """What is true of sandboxes is the node's; what is lost is who may ask."""
    with pair.clients(pair.key("amber")) as (one, two):
        sandbox = one.create_sandbox(IMAGE, operation_id="kept")
        sandbox.start("sleep 1; echo lived", operation_id="going")
        with pair.redis.client() as redis:
            redis.flushall()

        with pytest.raises(NotAuthenticatedError):
            one.get_sandbox(sandbox.id)
        for gateway in pair.gateways:
            with http(gateway.tcp) as caller:
                assert caller.get("/v1/sandboxes").status_code == 401
        with SandboxClient(url=pair.node.unix) as node:
            assert node.get_sandbox(sandbox.id).info.state == "ready"
            assert node.ledger().balanced

    with pair.clients(pair.key("amber")) as (one, two):
        assert two.create_sandbox(IMAGE, operation_id="kept").id == sandbox.id
        result = two.get_sandbox(sandbox.id).attach("going").wait()
        assert result.stdout == b"lived\n"
        two.delete_sandbox(sandbox.id)


def test_redis_that_is_killed_stops_no_command_and_lets_nobody_in(pair: Pair) -> None:
    """503 with when to try again; what was running ends as it would have."""
    key = pair.key("amber")
    with pair.clients(key) as (one, two):
        sandbox = one.create_sandbox(IMAGE, operation_id="before")
        results: list[Any] = []
        waiting = threading.Thread(
            target=lambda: results.append(
                sandbox.exec(": > /begun; sleep 1.5; echo done", operation_id="on")
            )
        )
        waiting.start()
        wait_until(lambda: sandbox.files.exists("/begun"))
        pair.redis.kill()
        try:
            for gateway in pair.gateways:
                with http(gateway.tcp, key) as caller:
                    answer = caller.get("/v1/sandboxes")
                assert (answer.status_code, answer.json()["code"]) == (503, "store_unreachable")
                assert answer.json()["retryable"] is True
                assert str(pair.redis.port) not in answer.text  # whoever asks is a stranger
                until_logged(gateway, f"127.0.0.1:{pair.redis.port}")
                assert answer.headers["retry-after"] == "1"
                with http(gateway.unix) as caller:  # needs no key
                    assert caller.get("/v1/sandboxes").status_code == 200
            with pytest.raises(StoreUnreachableError, match="what runs goes on"):
                two.create_sandbox(IMAGE)
            waiting.join(30)
            assert [result.stdout for result in results] == [b"done\n"]
        finally:
            pair.redis.start()
        again = two.create_sandbox(IMAGE, operation_id="before")
        assert again.id == sandbox.id
        assert again.exec(": > /begun; sleep 1.5; echo done", operation_id="on").stdout == b"done\n"
        again.delete()


def test_key_of_a_create_gives_the_first_answer_or_is_refused_and_never_makes_a_second(
    tmp_path: Path,
) -> None:
    """Also when its sandbox has ended, for another body, and when it is too old to be known."""
    for name in ("node", "one", "two"):
        (tmp_path / name).mkdir()
    head = {"Idempotency-Key": "make"}
    with (
        serving(tmp_path / "node", "fake", COLDFRAME_RESULT_TTL_S="4") as node,
        serving(tmp_path / "one", "fake", "--node", node.unix) as one,
        serving(tmp_path / "two", "fake", "--node", node.unix) as two,
        http(one.tcp) as first,
        http(two.tcp) as second,
    ):
        made = first.post("/v1/sandboxes", json={"image": IMAGE}, headers=head)
        assert made.status_code == 201
        assert first.delete(f"/v1/sandboxes/{made.json()['id']}").status_code == 200
        again = second.post("/v1/sandboxes", json={"image": IMAGE}, headers=head)
        assert (again.status_code, again.json()) == (201, made.json())
        other = second.post("/v1/sandboxes", json={"image": IMAGE, "cpu": 1.0}, headers=head)
        assert (other.status_code, other.json()["code"]) == (409, "operation_mismatch")
        replay = partial(first.post, "/v1/sandboxes", json={"image": IMAGE}, headers=head)
        wait_until(lambda: not replay().is_success)
        for caller in (first, second):
            late = caller.post("/v1/sandboxes", json={"image": IMAGE}, headers=head)
            assert (late.status_code, late.json()["code"]) == (410, "operation_expired")
            assert late.json()["retryable"] is False
        for wrong in ("a b", "x" * 200, ""):
            answer = first.post(
                "/v1/sandboxes", json={"image": IMAGE}, headers={"Idempotency-Key": wrong}
            )
            assert (answer.status_code, answer.json()["code"]) == (400, "invalid_request")
        assert first.get("/v1/ledger").json()["created"] == 1


def test_gateway_reaches_its_node_by_tls_with_an_administrators_key(tmp_path: Path) -> None:
    """On another machine: nobody between may listen, and nobody else may speak for others."""
    for name in ("node", "front"):
        (tmp_path / name).mkdir()
    cert, private = self_signed(tmp_path)
    tls = ("--tls-cert", str(cert), "--tls-key", str(private))
    with serving(tmp_path / "node", "fake", *tls) as node:
        store = f"sqlite:{node.home / 'gateway.sqlite'}"
        admin = _coldframe(store, "key", "create", "--owner", "gate", "--scope", "admin")
        known = {"COLDFRAME_API_KEY": admin, "SSL_CERT_FILE": str(cert)}
        with serving(tmp_path / "front", "fake", "--node", node.tcp, **known) as front:
            fronts = f"sqlite:{front.home / 'gateway.sqlite'}"
            key = _coldframe(fronts, "key", "create", "--owner", "amber")
            with SandboxClient(url=front.tcp, api_key=key) as client:
                sandbox = client.create_sandbox("any")
                assert sandbox.info.spec.labels == {"owner": "amber"}
                sandbox.start("read x; echo $x", stdin_open=True, operation_id="ws")
                uri = f"{front.tcp.replace('http', 'ws')}/v1/execs/ws/attach"
                headers = {"Authorization": f"Bearer {key}"}
                with connect(uri, additional_headers=headers) as attached:
                    attached.send(b"you\n")
                    assert attached.recv() == b"\x01you\n"
                with pytest.raises(NotPermittedError, match="'admin'"):
                    client.ledger()
                sandbox.delete()
        lines = audit_lines(node.home)
        assert {line["owner"] for line in lines if line["route"] == "/v1/sandboxes"} == {"amber"}
        assert admin.rpartition("_")[2] not in "".join(front.log)


def test_command_outlives_the_gateway_that_it_was_asked_by(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway is nobody's only way; what it was waiting for is there by another."""
    monkeypatch.setattr("coldframe.client._calls._RESTART_S", 1.0)
    key = pair.key("amber")
    with _gateway(tmp_path, pair.node, pair.redis) as doomed:
        client = SandboxClient(url=doomed.tcp, api_key=key)
        sandbox = client.create_sandbox(IMAGE, operation_id="outlives")
        lost: list[BaseException] = []

        def ask() -> None:
            try:
                sandbox.exec("echo begun >> /n; sleep 2; cat /n", operation_id="asked")
            except ColdframeError as error:
                lost.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        wait_until(lambda: sandbox.files.exists("/n"))
        doomed.process.kill()
        doomed.process.wait()
        asking.join(60)
        assert [type(error) for error in lost] == [ServiceUnreachableError]
        with contextlib.suppress(ColdframeError):
            client.close()
    with SandboxClient(url=pair.gateways[1].tcp, api_key=key) as other:
        same = other.create_sandbox(IMAGE, operation_id="outlives")
        assert same.id == sandbox.id
        result = same.exec("echo begun >> /n; sleep 2; cat /n", operation_id="asked")
        assert result.stdout == b"begun\n"
        same.delete()


def test_node_that_is_gone_is_said_by_its_gateway(tmp_path: Path) -> None:
    """Not a fault of the gateway's, and not for ever."""
    (tmp_path / "node").mkdir()
    (tmp_path / "front").mkdir()
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(serving(tmp_path / "node", "fake"))
        front = stack.enter_context(serving(tmp_path / "front", "fake", "--node", node.unix))
        with http(front.unix) as caller:
            assert caller.get("/v1/sandboxes").status_code == 200
            node.process.terminate()
            assert node.process.wait(60) == 0
            answer = caller.get("/v1/sandboxes")
            assert (answer.status_code, answer.json()["code"]) == (503, "service_unreachable")
            assert (answer.json()["execution"], answer.headers["retry-after"]) in {
                ("not_executed", "1"),
                ("perhaps_executed", "1"),
            }
        front.process.terminate()
        assert front.process.wait(60) == 0


def test_gateway_that_may_not_speak_for_others_does_not_start(tmp_path: Path, pair: Pair) -> None:
    """Else every request would fail by itself, with nobody to say why."""

    def serve(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "coldframe.cli.main", "serve", *words],
            env={**os.environ, "COLDFRAME_HOME": str(tmp_path), **environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    listening = ("--listen", "127.0.0.1:0")
    key = pair.key("amber")
    refused = serve("--node", pair.gateways[0].tcp, *listening, COLDFRAME_API_KEY=key)
    assert (refused.returncode, "'admin'" in refused.stderr) == (2, True), refused.stderr
    nowhere = serve("--node", "unix:/nowhere", *listening)
    assert nowhere.returncode != 0
    assert "/nowhere" in nowhere.stderr
    assert serve("--node", pair.node.unix).returncode == 2
    with pytest.raises(ServiceUnreachableError):
        SandboxClient(url="unix:/nowhere").list_sandboxes()
