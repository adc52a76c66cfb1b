"""The routes as a client sees them that knows only the document."""

from __future__ import annotations

import base64
import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

import coldframe
from coldframe import (
    InvalidRequestError,
    Sandbox,
    SandboxClient,
    SandboxNotFoundError,
)
from coldframe.protocol.errors import SandboxGoneError
from tests.fixtures.restart import Services, accounted
from tests.fixtures.service import Service, serving
from tests.integration.gateway.conftest import http, until_logged


def _create(caller: httpx.Client, key: str | None = None, **spec: object) -> httpx.Response:
    headers = {} if key is None else {"Idempotency-Key": key}
    return caller.post("/v1/sandboxes", json={"image": "any", **spec}, headers=headers)


def test_create_with_a_key_makes_one_sandbox_however_often_it_is_asked(
    caller: httpx.Client,
) -> None:
    """A client that lost the answer must not pay for two."""
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: _create(caller, "make-1"), range(4)))

    assert {answer.status_code for answer in answers} == {201}
    assert len({answer.json()["id"] for answer in answers}) == 1
    other = _create(caller, "make-1", cpu=2.0)
    assert (other.status_code, other.json()["code"]) == (409, "operation_mismatch")


def test_operation_id_that_is_none_is_refused_and_smuggles_no_header(
    remote: SandboxClient, caller: httpx.Client
) -> None:
    """An id comes from a program's data: it must not become a line of the request."""
    for odd in ("a\r\nX: y", "", "a/b", "ä", "x" * 129):
        with pytest.raises(InvalidRequestError, match="operation id"):
            remote.create_sandbox("any", operation_id=odd)
    answer = _create(caller, "a/b")
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_request")


def test_list_pages_through_what_the_labels_name(caller: httpx.Client) -> None:
    """Each sandbox is on one page, and none of others'."""
    made = [_create(caller, labels={"run": "7"}).json()["id"] for _ in range(5)]
    _create(caller, labels={"run": "8"})

    found, cursor = [], None
    for _ in range(3):
        asked = {"label": "run=7", "limit": 2} | ({"cursor": cursor} if cursor else {})
        page = caller.get("/v1/sandboxes", params=asked).json()
        found += [one["id"] for one in page["sandboxes"]]
        cursor = page["next_cursor"]

    assert (found, cursor) == (made, None)


def test_labels_of_any_text_are_found_again_through_a_service(remote: SandboxClient) -> None:
    """In a query `=`, `&`, `%` and bytes that are no text must stay what they were."""
    for labels in ({"a": ""}, {"a": "b=c"}, {"ü &#%3D+": "%00\n 名"}, {"\udcff": "\udcfe"}):
        with remote.create_sandbox("any", labels=labels) as sandbox:
            assert [one.id for one in remote.list_sandboxes(labels)] == [sandbox.id]


def test_name_that_no_sandbox_can_have_reaches_no_other_route(remote: SandboxClient) -> None:
    """`box/execs` is no name, and must not be asked for as the commands of `box`."""
    remote.create_sandbox("any", name="box")
    for name in ("", ".", "..", "../box", "box/execs", "box?", "\ud800"):
        with pytest.raises(SandboxNotFoundError):
            remote.get_sandbox(name)
        with pytest.raises(SandboxNotFoundError):
            remote.delete_sandbox(name)


@pytest.mark.parametrize("what", ["tar_down", "iterate"])
@pytest.mark.parametrize("way", ["unix", "tcp", "gateway"])
def test_answer_that_ends_with_its_sandbox_says_so_and_is_a_line_of_the_log(
    service: Service, tmp_path: Path, way: str, what: str
) -> None:
    """A sandbox may end while its files are read: no fault of the service's, which is there."""
    with contextlib.ExitStack() as stack:
        asked = service
        if way == "gateway":
            asked = stack.enter_context(serving(tmp_path, "fake", "--node", service.unix))
        url = service.tcp if way == "tcp" else asked.unix
        client = stack.enter_context(SandboxClient(url=url))
        sandbox = client.create_sandbox("any")
        sandbox.exec("head -c 64000000 /dev/zero > large")
        directory = sandbox.info.workdir
        path = directory if what == "tar_down" else f"{directory}/large"
        pieces = getattr(sandbox.files, what)(path)
        next(pieces)
        sandbox.delete()
        with pytest.raises(SandboxGoneError):
            list(pieces)

        until_logged(asked, "the answer was cut short")  # and the fixture looks for tracebacks


def test_answer_that_ends_in_the_middle_is_whole_to_nobody(
    remote: SandboxClient, service: Service
) -> None:
    """Why it ended is said in a trailer; who does not know of it must not miss that it did."""
    sandbox = remote.create_sandbox("any")
    sandbox.exec("head -c 64000000 /dev/zero > large")
    target = f"/v1/sandboxes/{sandbox.id}/archive?path={sandbox.info.workdir}"
    with http(service.tcp) as caller, caller.stream("GET", target) as answer:
        pieces = answer.iter_raw()
        next(pieces)
        sandbox.delete()
        with pytest.raises(httpx.RemoteProtocolError):
            list(pieces)


def test_delete_twice_is_fine_and_a_stale_version_gets_the_present_state(
    caller: httpx.Client,
) -> None:
    """Who acts on what was true before must see what is true now."""
    sandbox = _create(caller).json()
    url = f"/v1/sandboxes/{sandbox['id']}"

    stale = caller.delete(url, params={"expected_version": sandbox["version"] - 1})
    assert (stale.status_code, stale.json()["code"]) == (409, "conflict")
    assert stale.json()["sandbox"]["version"] == sandbox["version"]
    assert [caller.delete(url).json()["state"] for _ in range(2)] == ["deleted", "deleted"]
    gone = caller.post(f"{url}/execs", json={"argv": ["true"]})
    assert (gone.status_code, gone.json()["code"]) == (410, "sandbox_gone")
    assert caller.get("/v1/sandboxes/sb-000000-0000000000").status_code == 404


def test_wait_for_a_state_answers_in_the_moment_of_the_change(caller: httpx.Client) -> None:
    """Polling costs both sides; waiting costs nobody."""
    sandbox = _create(caller).json()
    url = f"/v1/sandboxes/{sandbox['id']}"
    timer = threading.Timer(0.3, lambda: caller.delete(url))
    timer.start()

    began = time.monotonic()
    seen = caller.get(url, params={"state": "deleted", "wait_s": 20}).json()

    assert seen["state"] == "deleted"
    assert 0.2 < time.monotonic() - began < 18
    timer.join()
    waited = _create(caller).json()
    same = caller.get(f"/v1/sandboxes/{waited['id']}", params={"state": "paused", "wait_s": 0.1})
    assert same.json()["state"] == "ready"


def test_exec_that_outlasts_its_wait_is_asked_for_again(
    caller: httpx.Client, served: Sandbox
) -> None:
    """No request is held open for as long as a command may run."""
    url = f"/v1/sandboxes/{served.id}/execs"
    wanted = {"command": "echo first; sleep 1; echo done", "operation_id": "long-1"}

    first = caller.post(url, params={"wait_s": 0.2}, json=wanted)
    assert (first.status_code, first.json()["operation_id"]) == (202, "long-1")
    assert caller.get("/v1/execs/long-1").json() == {"operation_id": "long-1", "started": True}
    again = caller.post(url, params={"wait_s": 30}, json=wanted)
    polled = caller.get("/v1/execs/long-1")

    assert again.status_code == polled.status_code == 200
    assert base64.urlsafe_b64decode(again.json()["out"]["head"]) == b"first\ndone\n"
    assert polled.json() == again.json()


def test_output_is_read_from_a_cursor(caller: httpx.Client, served: Sandbox) -> None:
    """A lost connection goes on where it was, without a byte twice."""
    served.exec("printf 0123456789", operation_id="out-1")

    part = caller.get("/v1/execs/out-1/output/stdout", params={"cursor": 3, "max_bytes": 4})

    assert part.content == b"3456"
    assert (part.headers["coldframe-offset"], part.headers["coldframe-eof"]) == ("3", "0")
    rest = caller.get("/v1/execs/out-1/output/stdout", params={"cursor": 7})
    assert (rest.content, rest.headers["coldframe-eof"]) == (b"789", "1")


@pytest.mark.parametrize("last", ["9" * 5000 + "-0", "0-" + "9" * 5000, "-", "1", "1-\xb2"])
def test_event_id_that_is_none_is_refused(caller: httpx.Client, served: Sandbox, last: str) -> None:
    """It is the client's fault, not one of the service's."""
    url = f"/v1/execs/{served.exec('true').operation_id}/events"

    refused = caller.get(url, headers={"last-event-id": last.encode("latin-1")})

    assert (refused.status_code, refused.json()["code"]) == (400, "invalid_request")


@pytest.mark.parametrize("cursor", ["nan/x", "inf/x", "-inf/x", "1", "x/y"])
def test_place_in_the_list_that_is_none_is_refused(caller: httpx.Client, cursor: str) -> None:
    """An empty page would pass for the last one."""
    refused = caller.get("/v1/sandboxes", params={"cursor": cursor})

    assert (refused.status_code, refused.json()["code"]) == (400, "invalid_request")


def test_files_are_raw_bytes_with_ranges(caller: httpx.Client, served: Sandbox) -> None:
    """A gibibyte in JSON would be a gibibyte and a third, three times in memory."""
    url = f"/v1/sandboxes/{served.id}/files"
    content = bytes(range(256)) * 8192

    sent = caller.put(url, params={"path": "/data"}, content=content)
    assert (sent.status_code, sent.json()) == (201, {"bytes": len(content)})
    assert caller.get(url, params={"path": "/data"}).content == content
    part = caller.get(url, params={"path": "/data"}, headers={"Range": "bytes=5-9"})
    assert (part.status_code, part.content) == (206, content[5:10])
    assert part.headers["content-range"] == f"bytes 5-9/{len(content)}"
    for asked, first in (("bytes=-3", len(content) - 3), ("bytes=-9999999", 0)):
        end = caller.get(url, params={"path": "/data"}, headers={"Range": asked})
        assert (end.status_code, end.content) == (206, content[first:])
        told = f"bytes {first}-{len(content) - 1}/{len(content)}"
        assert end.headers["content-range"] == told
    for asked, status in (("bytes=9999999-", 416), ("bytes=-0", 416), ("bytes=-", 400)):
        none = caller.get(url, params={"path": "/data"}, headers={"Range": asked})
        assert none.status_code == status
    missing = caller.get(url, params={"path": "/none"})
    assert (missing.status_code, missing.json()["code"]) == (404, "path_not_found")
    odd = caller.put(f"{url}?path=/odd-%ff", content=b"x")
    assert odd.status_code == 201
    names = caller.get(f"{url}/list", params={"path": "/"}).json()
    assert b"odd-\xff" in {base64.urlsafe_b64decode(one["name"]) for one in names}


def test_upload_that_is_cut_short_changes_nothing(
    caller: httpx.Client, served: Sandbox, remote: SandboxClient
) -> None:
    """Half a file under the right name would be taken for the whole."""
    served.files.write("/kept", "before")

    def half() -> object:
        yield b"x" * 100_000
        raise InterruptedError

    with pytest.raises(InterruptedError):
        caller.put(f"/v1/sandboxes/{served.id}/files", params={"path": "/kept"}, content=half())  # type: ignore[arg-type]

    assert served.files.read("/kept") == b"before"
    assert [entry.name for entry in served.files.list("/") if b"kept" in entry.name] == [b"kept"]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "execs", {"command": "true", "kill_bytes": 1 << 64}),
        ("POST", "execs", {"command": "true", "spool_bytes": 1 << 64}),
        ("POST", "execs", {"command": "true", "deadline_s": 1e300}),
        ("PUT", "guard", {"path": "/", "operation_id": "x", "names": [], "size_bytes": 1 << 64}),
        ("PUT", "guard", {"path": "/", "operation_id": "x", "names": [], "owner": [1 << 32, 0]}),
        ("POST", "files/directory?path=/x", {"uid": 1 << 32}),
        ("POST", "sessions", {"spool_bytes": 1 << 64}),
    ],
)
def test_number_that_the_kernel_cannot_hold_is_refused(
    caller: httpx.Client, served: Sandbox, method: str, path: str, body: dict[str, object]
) -> None:
    """It would be a fault of the service, found where the frame is packed."""
    answer = caller.request(method, f"/v1/sandboxes/{served.id}/{path}", json=body)
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_request")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("PATCH", "/v1/sandboxes", 405),
        ("GET", "/v1/sandboxes?limit=0", 400),
        ("GET", "/v1/sandboxes?label=x", 400),
        ("GET", "/v1/sandboxes?cursor=x", 400),
        ("POST", "/v1/sandboxes", 400),
        ("GET", "/v1/execs/op-none", 404),
        ("GET", "/v1/execs/op-none?wait_s=61", 400),
        ("GET", "/v1/execs/op-none/output/stdfoo", 400),
    ],
)
def test_refusal_is_an_error_of_ours(
    caller: httpx.Client, method: str, path: str, status: int
) -> None:
    """A client reads one kind of error, whatever was wrong."""
    answer = caller.request(method, path)

    assert answer.status_code == status
    assert {"code", "message", "retryable", "side", "execution"} <= answer.json().keys()


def test_sdk_that_asks_for_a_route_of_another_time_is_told_of_versions(
    caller: httpx.Client,
) -> None:
    """Two installations of one machine: it looked as if the caller had asked for nonsense."""
    newer = caller.post("/v1/sandboxes/x/new-thing", headers={"Coldframe-Protocol": "1"})

    assert (newer.status_code, newer.json()["code"]) == (404, "version_mismatch")
    assert coldframe.__version__ in newer.json()["message"]
    assert caller.post("/v1/sandboxes/x/new-thing").json()["code"] == "invalid_request"


def test_body_beyond_the_bound_is_refused_before_it_is_read(caller: httpx.Client) -> None:
    """One client must not fill the memory of all."""
    answer = caller.post("/v1/sandboxes", content=b"x" * (33 << 20))

    assert (answer.status_code, answer.json()["code"]) == (413, "too_large")


def test_health_is_a_sandbox_that_was_made_once_for_all_who_ask(caller: httpx.Client) -> None:
    """A service that answers but can make nothing is not well."""
    before = caller.get("/v1/ledger").json()["created"]

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: caller.get("/healthz"), range(16)))

    assert {answer.status_code for answer in answers} == {200}
    assert caller.get("/v1/ledger").json()["created"] - before <= 1


@pytest.mark.root
def test_service_without_an_image_is_not_well(tmp_path: Path) -> None:
    """A load balancer must send nobody there; whoever looks reads what to do."""
    images = tmp_path / "none"
    images.mkdir()
    with accounted(Services(tmp_path, images)) as services:
        services.start()
        transport = httpx.HTTPTransport(uds=services.url.removeprefix("unix:"))
        with httpx.Client(transport=transport, base_url="http://node", timeout=60) as requests:
            answer = requests.get("/healthz")
        assert answer.status_code == 503
        assert "coldframe image bootstrap debian:bookworm" in answer.json()["message"]


def test_metrics_have_states_queues_latencies_and_the_ledger(
    caller: httpx.Client, served: Sandbox
) -> None:
    """What pages somebody at night must be there by its name."""
    served.exec("echo kept")
    process = served.start("sleep 60")

    lines = caller.get("/metrics").text.splitlines()

    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert float(values['coldframe_sandboxes{image="any",state="ready"}']) >= 1
    assert float(values["coldframe_spool_bytes"]) > 0
    ledger = caller.get("/v1/ledger").json()
    for term in ("created", "deleted", "expired", "failed", "lost", "live", "leaked"):
        assert float(values[f'coldframe_ledger{{term="{term}"}}']) == ledger[term]
    for what in ("boot", "exec"):
        quantiles = [
            float(values[f'coldframe_{what}_seconds{{quantile="{which}"}}'])
            for which in ("0.5", "0.95", "0.99")
        ]
        assert quantiles[0] > 0 and quantiles == sorted(quantiles)
    assert values['coldframe_queue_depth{queue="commands"}'] == "0.0"
    assert float(values['coldframe_answers_total{status="201"}']) >= 1
    process.signal(9)
    process.wait()


def test_metrics_count_commands_that_nobody_waited_for(
    caller: httpx.Client, served: Sandbox
) -> None:
    """Those that take long are asked for in other ways: left out, the quantiles would be a lie."""

    def counted() -> float:
        lines = caller.get("/metrics").text.splitlines()
        return float(dict(line.rsplit(" ", 1) for line in lines)["coldframe_exec_seconds_count"])

    before = counted()
    list(served.stream("true"))
    served.start("true").wait()
    served.exec("true")
    with served.session() as session:
        session.exec("true")

    assert counted() == before + 4


def test_client_of_another_protocol_is_refused(caller: httpx.Client) -> None:
    """Behaviour that differs must not be found out one by one."""
    answer = caller.get("/v1/capabilities", headers={"Coldframe-Protocol": "0"})

    assert (answer.status_code, answer.json()["code"]) == (400, "version_mismatch")
    assert caller.get("/v1/versions").json()["protocol"] == 1


def test_peers_agree_on_the_newest_version_that_both_speak(caller: httpx.Client) -> None:
    """A client that is ahead goes on with an older service, and knows as what."""
    for offered in ("99, 1", "1,2", "1 , x"):
        answer = caller.get("/v1/capabilities", headers={"Coldframe-Protocol": offered})
        assert (answer.status_code, answer.headers["coldframe-protocol"]) == (200, "1")
    for offered in ("2, 3", "", "11", "-1"):
        answer = caller.get("/v1/capabilities", headers={"Coldframe-Protocol": offered})
        assert (answer.status_code, answer.json()["code"]) == (400, "version_mismatch")
