"""Orchard's client, by its requests as they were measured, against real sandboxes of a service.

Its package is on no index; what it sends and reads is here: paths, fields, the order of calls, and
that it sends a command again whenever anything goes wrong.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from coldframe.images.store import ImageStore
from tests.fixtures.service import Service, serving
from tests.fixtures.waiting import wait_until

pytestmark = pytest.mark.root

IMAGE = "debian:bookworm"
JOB = {
    *("job_id", "sandbox_id", "command", "status", "stdout", "stderr", "exit_code"),
    *("created_at", "started_at", "completed_at", "error"),
}
SANDBOX = {
    *("sandbox_id", "namespace", "image", "pod_name", "block_network", "cpu", "memory"),
    *("created_at", "ready", "status", "status_message"),
}


@pytest.fixture(scope="module")
def orchard(tmp_path_factory: pytest.TempPathFactory, image_store: ImageStore) -> Iterator[Service]:
    """A service that answers Orchard's clients and asks for keys."""
    images = image_store.layers_directory.parent
    where = tmp_path_factory.mktemp("orchard")
    with serving(where, "native", "--compat", "orchard", images=images) as service:
        _coldframe(service, "key", "create", "--owner", "first")
        yield service


def _coldframe(service: Service, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "coldframe.cli.main", *words],
        env={**os.environ, "COLDFRAME_HOME": str(service.home)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.fixture(scope="module")
def key(orchard: Service) -> str:
    """A key of one owner."""
    return _coldframe(orchard, "key", "create", "--owner", "ml")


@pytest.fixture
def caller(orchard: Service, key: str) -> Iterator[httpx.Client]:
    """The client's HTTP session."""
    with httpx.Client(base_url=orchard.tcp, headers={"X-API-Key": key}, timeout=60) as session:
        yield session


@pytest.fixture
def box(caller: httpx.Client) -> Iterator[str]:
    """A sandbox, made as the client makes it."""
    made = caller.post("/sandboxes", json={"image": IMAGE, "block_network": True}).json()
    waited = caller.get(f"/sandboxes/{made['sandbox_id']}/wait", params={"timeout": 60}).json()
    assert waited["ready"], waited
    yield made["sandbox_id"]
    assert caller.delete(f"/sandboxes/{made['sandbox_id']}").status_code == 200


def _exec(caller: httpx.Client, box: str, command: str | list[str], **options: Any) -> Any:
    asked = {"command": command, "timeout_seconds": None, "cwd": None, "env": None}
    asked |= {"login_shell": False, "wait": True, **options}
    answer = caller.post(f"/sandboxes/{box}/exec", json=asked)
    answer.raise_for_status()
    return answer.json()


# --- the service ----------------------------------------------------------------------


def test_root_and_health_need_no_key_and_everything_else_does(orchard: Service) -> None:
    """401 without a key, 403 with a wrong one, in Orchard's shape; Coldframe's routes stay."""
    with httpx.Client(base_url=orchard.tcp) as stranger:
        assert stranger.get("/").json()["status"] == "running"
        assert stranger.get("/health").json() == {"status": "healthy"}
        for method, path in (
            *(("GET", "/resources"), ("POST", "/sandboxes"), ("GET", "/jobs/x")),
            *(("POST", "/sandboxes/x/exec"), ("DELETE", "/sandboxes/x"), ("GET", "/sandboxes/x")),
        ):
            missing = stranger.request(method, path)
            assert (missing.status_code, set(missing.json())) == (401, {"detail"}), path
            wrong = stranger.request(method, path, headers={"X-API-Key": "cf_wrong_key"})
            assert (wrong.status_code, set(wrong.json())) == (403, {"detail"}), path
        assert stranger.get("/v1/versions").status_code == 200
        assert stranger.get("/v1/sandboxes").json()["code"] == "not_authenticated"


def test_scope_that_is_lacking_is_403(orchard: Service, box: str) -> None:
    """A key that may only look makes nothing and runs nothing."""
    reader = _coldframe(orchard, "key", "create", "--owner", "ml", "--scope", "read")
    with httpx.Client(base_url=orchard.tcp, headers={"X-API-Key": reader}) as session:
        assert session.get(f"/sandboxes/{box}").status_code == 200
        refused = session.post(f"/sandboxes/{box}/exec", json={"command": "true"})
        assert (refused.status_code, "scope" in refused.json()["detail"]) == (403, True)
        assert session.post("/sandboxes", json={"image": IMAGE}).status_code == 403


def test_owners_do_not_see_each_other(orchard: Service, caller: httpx.Client, box: str) -> None:
    """Orchard has no tenancy; here another's sandbox and job are not found."""
    job_id = _exec(caller, box, "true")["job_id"]
    other = _coldframe(orchard, "key", "create", "--owner", "other")
    with httpx.Client(base_url=orchard.tcp, headers={"X-API-Key": other}) as stranger:
        assert stranger.get(f"/sandboxes/{box}").status_code == 404
        assert stranger.get(f"/jobs/{job_id}").status_code == 404
        assert stranger.post(f"/sandboxes/{box}/exec", json={"command": "true"}).status_code == 404
        assert stranger.delete(f"/sandboxes/{box}").status_code == 200  # as for what never was
        assert stranger.get("/resources").json()["sandbox_pods"] == []
    assert caller.get(f"/sandboxes/{box}").json()["ready"]


def test_resources_tell_what_there_is_and_what_is_taken(caller: httpx.Client, box: str) -> None:
    """Schedulers look here before they ask for more."""
    told = caller.get("/resources").json()
    assert told["status"] == "ok"
    assert told["total_capacity"]["cpu"] == len(os.sched_getaffinity(0))
    assert told["total_requested"] == {"cpu": 4.0, "memory_bytes": 16 << 30}
    assert [(pod["name"], pod["phase"]) for pod in told["sandbox_pods"]] == [(box, "Running")]
    (node,) = told["nodes"]
    assert node["capacity"] == told["total_capacity"] == told["total_allocatable"]
    free, whole = told["available"]["memory_bytes"], told["total_capacity"]["memory_bytes"]
    assert 0 < free < whole == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_terminal_on_a_node_that_takes_no_more_commands_closes_4503(
    tmp_path: Path, image_store: ImageStore
) -> None:
    """Its client tries again after 4503; after 4500 it gives the command up."""
    images, most = image_store.layers_directory.parent, "1"
    with serving(
        tmp_path, "native", "--compat", "orchard", images=images, COLDFRAME_MAX_RUNNING_EXECS=most
    ) as service:
        with httpx.Client(base_url=service.tcp, timeout=60) as caller:
            box = caller.post("/sandboxes", json={"image": IMAGE}).json()["sandbox_id"]
            caller.post(f"/sandboxes/{box}/exec", json={"command": ["sleep", "60"]})
        url = f"ws://{urlsplit(service.tcp).netloc}/sandboxes/{box}/exec/pty"
        with connect(url) as terminal, pytest.raises(ConnectionClosed) as closed:
            terminal.send(json.dumps({"type": "init", "cmd": ["true"]}))
            assert json.loads(terminal.recv())["type"] == "error"
            terminal.recv()
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 4503


# --- sandboxes ------------------------------------------------------------------------


def test_sandbox_has_every_field_and_the_quantities_asked_for(caller: httpx.Client) -> None:
    """Ids of the caller's choice, Kubernetes' quantities, the network open or not."""
    asked = {"image": IMAGE, "block_network": False, "sandbox_id": "app-1", "cpu": "500m"}
    made = caller.post("/sandboxes", json={**asked, "memory": "512Mi", "timeout": 90}).json()
    assert made == {
        **{"sandbox_id": "app-1", "namespace": "coldframe", "image": IMAGE, "cpu": "0.5"},
        **{"block_network": False, "memory": "512Mi", "timeout": 90, "status": "ready"},
    }
    told = caller.get("/sandboxes/app-1").json()
    assert set(told) == SANDBOX
    assert (told["ready"], told["status"], told["pod_name"][:3]) == (True, "ready", "sb-")
    assert time.time() - told["created_at"] < 60
    again = caller.post("/sandboxes", json=asked)
    assert (again.status_code, "app-1" in again.json()["detail"]) == (409, True)
    assert caller.delete("/sandboxes/app-1").json() == {
        "status": "deleted",
        "sandbox_id": "app-1",
    }
    assert caller.get("/sandboxes/app-1").status_code == 404
    assert caller.delete("/sandboxes/app-1").status_code == 200


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        ({}, 400),
        ({"image": "no/such-image:1"}, 404),
        ({"image": IMAGE, "cpu": "four"}, 400),
        ({"image": IMAGE, "memory": "-1Gi"}, 400),
        ({"image": IMAGE, "memory": "1" * 400}, 400),
        ({"image": "\ud800"}, 400),
        ({"image": IMAGE, "sandbox_id": "a/b"}, 400),
        ({"image": IMAGE, "timeout": 0}, 400),
    ],
)
def test_create_that_cannot_be_is_refused_in_words(
    caller: httpx.Client, asked: dict[str, Any], status: int
) -> None:
    """And leaves nothing: Orchard said pending, and failed minutes later."""
    refused = caller.post("/sandboxes", content=json.dumps(asked))
    assert refused.status_code == status
    assert refused.json()["detail"]


@pytest.mark.parametrize(
    "asked",
    [
        {"command": "echo \ud800"},
        {"command": ["echo", "\udc80"]},
        {"command": "true", "env": {"A": "\ud800"}},
        {"command": "true", "cwd": "/\udfff"},
    ],
)
def test_command_that_is_no_text_is_refused_and_not_run(
    caller: httpx.Client, box: str, asked: dict[str, Any]
) -> None:
    """What JSON cannot say again is no fault of the service's."""
    refused = caller.post(f"/sandboxes/{box}/exec", content=json.dumps({**asked, "wait": True}))

    assert refused.status_code == 400
    assert "no text" in refused.json()["detail"]


def test_quota_is_503_with_retry_after(orchard: Service) -> None:
    """The client waits and asks again only for 503."""
    small = _coldframe(orchard, "key", "create", "--owner", "small")
    _coldframe(orchard, "key", "quota", "small", "--sandboxes", "1")
    with httpx.Client(base_url=orchard.tcp, headers={"X-API-Key": small}, timeout=60) as session:
        first = session.post("/sandboxes", json={"image": IMAGE}).json()["sandbox_id"]
        refused = session.post("/sandboxes", json={"image": IMAGE})
        assert refused.status_code == 503
        assert float(refused.headers["retry-after"]) > 0
        assert session.delete(f"/sandboxes/{first}").status_code == 200
        second = session.post("/sandboxes", json={"image": IMAGE})
        assert second.status_code == 200
        session.delete(f"/sandboxes/{second.json()['sandbox_id']}")


def test_heartbeat_shortens_the_lease_to_its_own(caller: httpx.Client, box: str) -> None:
    """Who stops to say that it lives is gone within three minutes, not two hours."""
    info = caller.get(
        f"/v1/sandboxes/{box}", headers={"Authorization": f"Bearer {caller.headers['x-api-key']}"}
    ).json()
    assert info["expires_at"] - time.time() > 7000
    assert caller.post(f"/sandboxes/{box}/heartbeat").json() == {"status": "ok", "sandbox_id": box}
    info = caller.get(
        f"/v1/sandboxes/{box}", headers={"Authorization": f"Bearer {caller.headers['x-api-key']}"}
    ).json()
    assert 150 < info["expires_at"] - time.time() <= 180
    assert caller.post("/sandboxes/none/heartbeat").status_code == 404


# --- commands -------------------------------------------------------------------------


def test_exec_that_is_waited_for_is_the_whole_job(caller: httpx.Client, box: str) -> None:
    """The client takes it for done when its status says so."""
    job = _exec(caller, box, "pwd; echo $A; echo err >&2; exit 3", env={"A": "b c"})
    assert set(job) == JOB
    assert (job["status"], job["exit_code"], job["error"]) == ("failed", 3, None)
    assert (job["stdout"], job["stderr"]) == ("/workspace\nb c\n", "err\n")
    assert job["created_at"] <= job["started_at"] <= job["completed_at"]
    assert _exec(caller, box, "pwd", cwd="/etc")["stdout"] == "/etc\n"
    assert _exec(caller, box, "exit 0")["status"] == "succeeded"
    assert _exec(caller, box, "kill -9 $$")["exit_code"] == -9
    assert caller.get(f"/jobs/{job['job_id']}").json() == job
    assert caller.get(f"/jobs/{job['job_id']}/wait").json() == job


def test_exec_that_is_not_waited_for_is_asked_about(caller: httpx.Client, box: str) -> None:
    """Polling, and one long wait."""
    begun = _exec(caller, box, "until [ -e go ]; do sleep 0.02; done; echo gone", wait=False)
    assert (set(begun), begun["status"]) == ({"job_id", "status"}, "queued")
    assert caller.get(f"/jobs/{begun['job_id']}").json()["status"] in {"queued", "running"}
    early = caller.get(f"/jobs/{begun['job_id']}/wait", params={"timeout": 1}).json()
    assert (early["status"], early["exit_code"]) == ("running", None)
    _exec(caller, box, "touch go")  # beside the first: they do not wait for each other
    job = caller.get(f"/jobs/{begun['job_id']}/wait", params={"timeout": 30}).json()
    assert (job["status"], job["stdout"]) == ("succeeded", "gone\n")
    assert caller.get("/jobs/none").status_code == 404
    assert caller.post("/sandboxes/none/exec", json={"command": "true"}).status_code == 404


def test_deadline_ends_the_command_and_nothing_else(caller: httpx.Client, box: str) -> None:
    """In Orchard it killed the agent in the sandbox, and `cmd &` defeated it."""
    began = time.monotonic()
    job = _exec(caller, box, "echo begun; sleep 300 & sleep 300", timeout_seconds=1)
    assert (job["status"], job["exit_code"], job["stdout"]) == ("failed", 124, "begun\n")
    assert job["error"] == "Command timed out after 1s"
    assert "timed out after 1s and was killed" in job["stderr"]
    assert time.monotonic() - began < 100
    assert _exec(caller, box, "pgrep -c sleep || true")["stdout"].strip() in {"0", ""}


def test_what_runs_on_does_not_hold_the_answer(caller: httpx.Client, box: str) -> None:
    """A server in the background that holds stdout."""
    began = time.monotonic()
    job = _exec(caller, box, "sleep 100 & echo started")
    assert (job["status"], job["stdout"]) == ("succeeded", "started\n")
    assert time.monotonic() - began < 60


def test_list_is_an_argv_and_a_missing_directory_an_error(caller: httpx.Client, box: str) -> None:
    """Orchard joined lists with blanks, and went to / where there was no directory."""
    assert _exec(caller, box, ["printf", "%s|", "a b", "$HOME"])["stdout"] == "a b|$HOME|"
    lost = _exec(caller, box, "pwd", cwd="/none")
    assert (lost["status"], lost["exit_code"], lost["stdout"]) == ("failed", None, "")
    assert "/none" in lost["error"]
    missing = _exec(caller, box, ["no-such-program"])
    assert (missing["status"], missing["exit_code"]) == ("failed", 127)


def test_login_shell_reads_what_bash_reads(caller: httpx.Client, box: str) -> None:
    """Images activate their environments in ~/.bashrc."""
    assert _exec(caller, box, "echo 'export FROM_RC=yes' > ~/.bashrc")["status"] == "succeeded"
    job = _exec(caller, box, "echo $FROM_RC", login_shell=True)
    assert (job["stdout"], job["stderr"]) == ("yes\n", "")
    assert _exec(caller, box, "echo [$FROM_RC]")["stdout"] == "[]\n"


def test_image_without_bash_has_its_own_shell(caller: httpx.Client) -> None:
    """Orchard's agent and its bash do not run on musl."""
    made = caller.post("/sandboxes", json={"image": "busybox:latest"}).json()["sandbox_id"]
    job = _exec(caller, made, "echo hi; exit 4")
    assert (job["stdout"], job["exit_code"]) == ("hi\n", 4)
    caller.delete(f"/sandboxes/{made}")


def test_large_output_is_cut_in_the_middle_and_says_so(caller: httpx.Client, box: str) -> None:
    """60 MB came back in one answer; now it is bounded, and nothing is cut silently."""
    job = _exec(caller, box, "head -c 30000000 /dev/zero | tr '\\0' x; echo end")
    assert len(job["stdout"]) < 9 << 20
    assert "bytes omitted" in job["stdout"]
    assert job["stdout"].endswith("end\n")


def test_command_sent_again_after_a_lost_connection_runs_once(
    orchard: Service, caller: httpx.Client, key: str, box: str
) -> None:
    """In one evaluation 297 of 613 trials had a command sent twice."""
    command = "echo run >> log; until [ -e go ]; do sleep 0.02; done; cat log"
    asked: dict[str, object] = {"command": command, "timeout_seconds": None}
    asked |= {"cwd": None, "env": None, "login_shell": False}
    body = json.dumps({**asked, "wait": True}).encode()
    url = urlsplit(orchard.tcp)
    with closing(socket.create_connection((url.hostname, url.port))) as line:
        line.sendall(
            b"POST /sandboxes/%s/exec HTTP/1.1\r\nHost: x\r\nX-API-Key: %s\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
            % (box.encode(), key.encode(), len(body), body)
        )
        wait_until(lambda: "run" in _exec(caller, box, "cat log || true")["stdout"])
    again = caller.post(f"/sandboxes/{box}/exec", json=asked).json()  # without wait, as it does
    _exec(caller, box, "touch go")
    job = caller.get(f"/jobs/{again['job_id']}/wait").json()
    assert job["stdout"] == "run\n"
    anew = _exec(caller, box, command)
    assert anew["stdout"] == "run\nrun\n"  # one that was answered is asked for anew


def test_patch_is_applied_by_git_or_says_that_there_is_none(caller: httpx.Client, box: str) -> None:
    """Whatever lines are in it: Orchard's ended at the line PATCH_EOF."""
    patch = "--- /dev/null\n+++ b/new\n@@ -0,0 +1,3 @@\n+a\n+PATCH_EOF\n+b\n"
    done = caller.post(f"/sandboxes/{box}/apply_patch", json={"patch": patch}).json()
    assert set(done) == {"success", "stdout", "stderr", "exit_code", "error"}
    assert (done["success"], done["exit_code"], done["error"]) == (True, 0, None), done
    assert _exec(caller, box, "cat new")["stdout"] == "a\nPATCH_EOF\nb\n"
    twice = caller.post(f"/sandboxes/{box}/apply_patch", json={"patch": patch}).json()
    assert (twice["success"], "already exists" in twice["stderr"]) == (False, True)

    bare = caller.post("/sandboxes", json={"image": "busybox:latest"}).json()["sandbox_id"]
    none = caller.post(f"/sandboxes/{bare}/apply_patch", json={"patch": patch}).json()
    assert (none["success"], "no git" in none["error"]) == (False, True)
    caller.delete(f"/sandboxes/{bare}")


# --- files ----------------------------------------------------------------------------


def test_files_go_in_come_out_and_are_listed(caller: httpx.Client, box: str) -> None:
    """Bytes in base64, directories made on the way, relative paths where commands start."""
    content = bytes(range(256)) * 100
    sent = {"path": "/data/sub/f.bin", "content": base64.b64encode(content).decode()}
    assert caller.post(f"/sandboxes/{box}/files", json=sent).json() == {
        **{"success": True, "path": "/data/sub/f.bin", "size": len(content)}
    }
    got = caller.get(f"/sandboxes/{box}/files", params={"path": "/data/sub/f.bin"}).json()
    assert (base64.b64decode(got["content"]), got["size"]) == (content, len(content))
    caller.post(f"/sandboxes/{box}/files", json={"path": "rel", "content": ""})
    assert _exec(caller, box, "ls /workspace; ln -s /data /data/loop; ln -s none /data/dead")[
        "stdout"
    ] == ("rel\n")
    told = caller.get(f"/sandboxes/{box}/files/list", params={"path": "/data"}).json()
    assert told["path"] == "/data"
    assert [(one["name"], one["type"]) for one in told["files"]] == [
        *(("dead", "file"), ("loop", "directory"), ("sub", "directory"))
    ]
    assert all(set(one) == {"name", "type", "size", "modified"} for one in told["files"])
    time.strptime(told["files"][0]["modified"], "%Y-%m-%dT%H:%M:%S")


def test_files_that_cannot_be_are_refused(caller: httpx.Client, box: str) -> None:
    """404 for what is not there, and never a file of the host."""
    for path in ("/files", "/files/list"):
        answer = caller.get(f"/sandboxes/{box}{path}", params={"path": "/none"})
        assert answer.status_code == 404
    assert caller.get(f"/sandboxes/{box}/files", params={"path": "/etc"}).status_code == 409
    odd = caller.post(f"/sandboxes/{box}/files", json={"path": "/x", "content": "!"})
    assert (odd.status_code, "base64" in odd.json()["detail"]) == (400, True)
    _exec(caller, box, "ln -s /proc/1/root/etc/hostname /leak")
    leak = caller.get(f"/sandboxes/{box}/files", params={"path": "/leak"})
    assert 400 <= leak.status_code < 500


# --- services -------------------------------------------------------------------------


def test_service_is_reached_by_its_url_until_it_is_revoked(
    caller: httpx.Client, orchard: Service, box: str
) -> None:
    """A URL for clients that can show no key; to take it back counts at once, and for good."""
    server = "mkdir -p www && echo page > www/index.html && sleep 1 && cd www"
    _exec(caller, box, f"{server} && python3 -m http.server 8000", wait=False)
    asked = {"port": 8000, "wait_ready": True, "health_path": "/", "ready_timeout": 30}
    made = caller.post(f"/sandboxes/{box}/services", json={**asked, "ttl_seconds": 60}).json()
    assert set(made) == {"sandbox_id", "port", "url", "expires_at"}
    assert 0 < made["expires_at"] - time.time() <= 61
    with httpx.Client(follow_redirects=True) as anybody:
        assert anybody.get(made["url"]).text == "page\n"
        assert anybody.get(f"{made['url']}/index.html").text == "page\n"
        assert caller.get(f"/sandboxes/{box}/services").json()["ports"] == [8000]
        gone = caller.delete(f"/sandboxes/{box}/services/8000").json()
        assert gone == {"status": "revoked", "sandbox_id": box, "port": 8000}
        assert anybody.get(f"{made['url']}/index.html").status_code >= 400
    assert caller.get(f"/sandboxes/{box}/services").json()["ports"] == []
    assert caller.delete(f"/sandboxes/{box}/services/8000").status_code == 404
    assert made["url"].rpartition("/")[2] not in (orchard.home / "ports.revoked").read_text()


def test_service_that_cannot_be_is_refused(caller: httpx.Client, box: str) -> None:
    """Nothing that answers, no port, no path."""
    silent = {"port": 9, "wait_ready": True, "ready_timeout": 1}
    assert caller.post(f"/sandboxes/{box}/services", json=silent).status_code == 408
    for wrong in ({"port": 0}, {"port": 80, "health_path": "/x\r\nA: b"}, {}):
        assert caller.post(f"/sandboxes/{box}/services", json=wrong).status_code == 400
    assert caller.post("/sandboxes/none/services", json={"port": 80}).status_code == 404
    assert caller.get(f"/sandboxes/{box}/services").json()["ports"] == []


def test_urls_that_expired_make_room_for_others(caller: httpx.Client, box: str) -> None:
    """A sandbox has eight ports with URLs at once: those that lead nowhere are none."""
    for port in range(1, 9):
        made = caller.post(f"/sandboxes/{box}/services", json={"port": port, "ttl_seconds": 1})
        assert made.status_code == 200
    more = {"port": 9, "ttl_seconds": 60}
    wait_until(lambda: caller.post(f"/sandboxes/{box}/services", json=more).status_code == 200)
    wait_until(lambda: caller.get(f"/sandboxes/{box}/services").json()["ports"] == [9])


# --- terminals ------------------------------------------------------------------------


@contextmanager
def _terminal(orchard: Service, box: str, key: str) -> Iterator[ClientConnection]:
    url = orchard.tcp.replace("http", "ws", 1)
    with connect(f"{url}/sandboxes/{box}/exec/pty?api_key={key}") as socket:
        yield socket


def _send(socket: ClientConnection, kind: str, **fields: Any) -> None:
    socket.send(json.dumps({"type": kind, **fields}))


def _init(socket: ClientConnection, *cmd: str, **fields: Any) -> dict[str, Any]:
    given = {"env": {}, "cwd": None, "rows": 24, "cols": 80, "login_shell": False, **fields}
    _send(socket, "init", cmd=list(cmd), **given)
    return dict(json.loads(socket.recv(timeout=20)))


def _until(socket: ClientConnection, done: Callable[[bytes], bool]) -> bytes:
    seen = b""
    while not done(seen):
        frame = json.loads(socket.recv(timeout=20))
        assert frame["type"] == "stdout", (frame, seen)
        seen += base64.b64decode(frame["data"])
    return seen


def test_terminal_takes_keys_signals_and_sizes(orchard: Service, key: str, box: str) -> None:
    """A bash as a person would use it."""
    with _terminal(orchard, box, key) as socket:
        ready = _init(socket, "bash", "--norc", rows=30, cols=100, env={"PS1": ""})
        assert (ready["type"], ready["pid"] > 1) == ("ready", True)
        stdin = base64.b64encode(b"stty size; pwd; tty\n").decode()
        _send(socket, "stdin", data=stdin)
        _until(socket, lambda seen: b"30 100" in seen and b"/workspace" in seen and b"pts" in seen)
        _send(socket, "resize", rows=50, cols=120)
        _send(socket, "stdin", data=base64.b64encode(b"stty size\n").decode())
        _until(socket, lambda seen: b"50 120" in seen)
        _send(socket, "nonsense")
        socket.send("no json")
        socket.send("[" * 99_999)
        _send(socket, "stdin", data=base64.b64encode(b"exit 7\n").decode())
        last = None
        with pytest.raises(ConnectionClosed):
            while True:
                last = json.loads(socket.recv(timeout=20))
        assert last == {"type": "exit", "code": 7}


def test_terminal_signal_is_a_negative_code(orchard: Service, key: str, box: str) -> None:
    """As the client documents it."""
    with _terminal(orchard, box, key) as socket:
        assert _init(socket, "sleep", "300")["type"] == "ready"
        _send(socket, "signal", sig="KILL")
        assert json.loads(socket.recv(timeout=20)) == {"type": "exit", "code": -9}


@pytest.mark.parametrize("how", ["close", "vanish"])
def test_terminal_that_is_left_ends_its_command(
    orchard: Service, caller: httpx.Client, key: str, box: str, how: str
) -> None:
    """What ignores the hang-up is killed."""
    with _terminal(orchard, box, key) as socket:
        _init(socket, "bash", "-c", "trap '' TERM HUP; echo on; while :; do sleep 0.1; done")
        _until(socket, lambda seen: b"on" in seen)
        if how == "close":
            _send(socket, "close")
        else:
            socket.socket.close()
        wait_until(lambda: _exec(caller, box, ["pgrep", "-c", "bash"])["stdout"].strip() == "0")


def test_terminal_that_cannot_be_says_why(orchard: Service, key: str, box: str) -> None:
    """Strangers and unknown sandboxes by the code of the close; what cannot start by a frame."""
    for path, shown, code in ((box, "cf_wrong_key", 4401), ("none", key, 4404)):
        with _terminal(orchard, path, shown) as socket, pytest.raises(ConnectionClosed) as closed:
            socket.recv(timeout=20)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == code
        last = (orchard.home / "audit" / "audit.jsonl").read_text().splitlines()[-1]
        told = json.loads(last)
        assert (told["method"], told["status"]) == ("WEBSOCKET", 403), "refused, not opened"
    for first in ('{"type":"stdin"}', "no json", '{"type":"init","cmd":[]}', "[" * 99_999):
        with _terminal(orchard, box, key) as socket:
            socket.send(first)
            assert json.loads(socket.recv(timeout=20))["type"] == "error"
            with pytest.raises(ConnectionClosed) as closed:
                socket.recv(timeout=20)
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 4400
    with _terminal(orchard, box, key) as socket:
        failed = _init(socket, "no-such-program")
        assert (failed["type"], "no-such-program" in failed["message"]) == ("error", True)


def test_terminal_takes_its_key_as_a_subprotocol(orchard: Service, key: str, box: str) -> None:
    """For clients that keep secrets out of URLs."""
    url = orchard.tcp.replace("http", "ws", 1)
    protocols: Any = [f"api_key.{key}"]
    with connect(f"{url}/sandboxes/{box}/exec/pty", subprotocols=protocols) as socket:
        assert _init(socket, "true")["type"] == "ready"


# --- in all ---------------------------------------------------------------------------


async def test_many_at_once_each_get_their_own(orchard: Service, key: str) -> None:
    """A burst as its benchmark makes it; the ledger is compared at the end."""
    async with httpx.AsyncClient(
        base_url=orchard.tcp, headers={"X-API-Key": key}, timeout=120
    ) as session:

        async def one(number: int) -> str:
            made = (await session.post("/sandboxes", json={"image": IMAGE})).json()
            box = made["sandbox_id"]
            ran = await session.post(
                f"/sandboxes/{box}/exec", json={"command": f"echo {number}", "wait": True}
            )
            await session.delete(f"/sandboxes/{box}")
            return str(ran.json()["stdout"])

        found = await asyncio.gather(*(one(number) for number in range(50)))
    assert found == [f"{number}\n" for number in range(50)]


def test_compat_goes_with_a_node_of_its_own(tmp_path: Path) -> None:
    """Refused before anything is opened."""
    for words in (("--compat", "other"), ("--compat", "orchard", "--node", "unix:/x")):
        ran = subprocess.run(
            [
                sys.executable,
                "-m",
                "coldframe.cli.main",
                "serve",
                "--listen",
                "127.0.0.1:0",
                *words,
            ],
            env={**os.environ, "COLDFRAME_HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
        assert (ran.returncode, "--compat" in ran.stderr) == (2, True), ran.stderr


def test_key_that_is_revoked_ends_its_terminal(orchard: Service, box: str) -> None:
    """Whoever loses a key has lost what is open with it, too."""
    lost = _coldframe(orchard, "key", "create", "--owner", "ml")
    with _terminal(orchard, box, lost) as socket:
        assert _init(socket, "sleep", "300")["type"] == "ready"
        _coldframe(orchard, "key", "revoke", lost.split("_")[1])
        with pytest.raises(ConnectionClosed):
            while True:  # at most how its command was ended
                assert json.loads(socket.recv(timeout=20))["type"] == "exit"
