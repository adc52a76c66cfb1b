"""Who may do what: keys, scopes, owners, quotas, the socket's users, web pages, odd requests."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from coldframe import ColdframeError, SandboxClient
from coldframe.gateway.failures import status_of
from coldframe.gateway.keys import authenticate
from coldframe.gateway.store import open_store
from coldframe.protocol.errors import (
    NotAuthenticatedError,
    NotPermittedError,
    OperationNotFoundError,
    QuotaError,
    SandboxNotFoundError,
    ServiceUnreachableError,
    UnsatisfiableError,
)
from coldframe.protocol.wire import read_error
from tests.fixtures.certificates import self_signed
from tests.fixtures.service import Service, serving
from tests.integration.gateway.conftest import http, until_logged

MakeKey = Callable[..., str]

OPEN_WITH_LITTLE_ROOM = """
import os, sys
from coldframe.gateway.store.sqlite import SqliteStore
from coldframe.protocol.errors import CapabilityError
os.chdir(sys.argv[1])
for room in range(16, 80, 4):
    with open("filling", "wb", buffering=0) as filling:
        try:
            while filling.write(bytes(1024)):
                pass
        except OSError:
            filling.truncate(max(0, filling.tell() - (room << 10)))
        os.fsync(filling.fileno())
    if (child := os.fork()) == 0:
        try:
            SqliteStore("sqlite:keys")
        except CapabilityError as error:
            os._exit("cannot be written" in str(error))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    for name in os.listdir("."):
        if name.startswith("keys"):
            os.unlink(name)
"""
"""Opens the keys with ever more KiB left, and prints how each child ended."""


def _command(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "coldframe.cli.main", *words],
        env={**os.environ, "COLDFRAME_HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def keyed_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service that asks for keys."""
    with serving(tmp_path_factory.mktemp("keyed"), "fake") as service:
        assert _command(service.home, "key", "create", "--owner", "first").returncode == 0
        yield service


@pytest.fixture
def make_key(keyed_service: Service) -> MakeKey:
    """Makes keys by the command line: `make_key(owner, *scopes)`."""

    def make(owner: str, *scopes: str) -> str:
        words = [word for scope in scopes for word in ("--scope", scope)]
        done = _command(keyed_service.home, "key", "create", "--owner", owner, *words)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return make


def test_requests_without_a_valid_key_get_nowhere(
    keyed_service: Service, make_key: MakeKey
) -> None:
    """Every route, whether it exists or not: a stranger learns nothing."""
    key = make_key("amber")
    routes = httpx.get(f"{keyed_service.tcp}/openapi.json").json()["paths"]
    wrong = [None, "nonsense", key[:-1] + ("0" if key[-1] != "0" else "1"), key + "0"]
    for path, operations in routes.items():
        if path in {"/healthz", "/v1/versions"}:
            continue
        for method in operations:
            target = path.replace("{", "x").replace("}", "x")
            for given in wrong:
                with http(keyed_service.tcp, given) as caller:
                    answer = caller.request(method, target)
                assert answer.status_code == 401, (method, path, answer.text)
                assert answer.json()["code"] == "not_authenticated"
    until_logged(keyed_service, "refused")
    assert not any(key.rpartition("_")[2] in line for line in keyed_service.log)


def test_revoked_key_is_refused_from_the_next_request_on(
    keyed_service: Service, make_key: MakeKey
) -> None:
    """A stolen key must stop at once, not with the next restart."""
    words = ("key", "create", "--owner", "amber", "--json")
    made = json.loads(_command(keyed_service.home, *words).stdout)
    key = made["key"]
    assert (made["id"], made["owner"]) == (key.split("_")[1], "amber")
    with http(keyed_service.tcp, key) as caller:
        assert caller.get("/v1/sandboxes").status_code == 200
        revoked = _command(keyed_service.home, "key", "revoke", "--json", key.split("_")[1])
        assert json.loads(revoked.stdout) == {"revoked": key.split("_")[1]}
        assert caller.get("/v1/sandboxes").status_code == 401
    listed = _command(keyed_service.home, "key", "ls").stdout.splitlines()
    mine = [line for line in listed if line.startswith(key.split("_")[1])]
    assert [line.split()[-1] for line in mine] == ["revoked"]


def test_key_is_not_in_the_store(keyed_service: Service, make_key: MakeKey) -> None:
    """Who reads the file must not be able to use a key, and only its owner reads it."""
    secret = make_key("amber").rpartition("_")[2]

    for file in keyed_service.home.glob("gateway.sqlite*"):
        assert secret.encode() not in file.read_bytes()
        assert bytes.fromhex(secret) not in file.read_bytes()
    assert (keyed_service.home / "gateway.sqlite").stat().st_mode & 0o077 == 0


def test_first_answer_is_given_to_nobody_who_may_not_ask(
    keyed_service: Service, make_key: MakeKey
) -> None:
    """A replay that does nothing still tells what was done."""
    may = {
        "exec": make_key("amber", "exec", "read", "create"),
        "read": make_key("amber", "read"),
        "another": make_key("birch", "exec", "read", "create"),
    }
    with http(keyed_service.tcp, may["exec"]) as caller:
        made = caller.post("/v1/sandboxes", json={"image": "any"}).json()["id"]
        for method, below, scope in (
            ("DELETE", f"{made}/processes", "exec"),
            ("PUT", f"{made}/lease", "create"),
            ("DELETE", made, "create"),
        ):
            asked = {"json": {"ttl_s": 60}} if below.endswith("lease") else {}
            key = {"Idempotency-Key": f"first-{below[-5:]}"}
            told = caller.request(method, f"/v1/sandboxes/{below}", headers=key, **asked)
            assert told.status_code == 200, told.text
            for name, status in (("exec", 200), ("read", 403), ("another", 404)):
                with http(keyed_service.tcp, may[name]) as other:
                    answer = other.request(method, f"/v1/sandboxes/{below}", headers=key, **asked)
                assert answer.status_code == status, (below, name, answer.text)
                assert (answer.json() == told.json()) is (status == 200)
            with http(keyed_service.tcp, make_key("amber", *{"exec", "create"} - {scope})) as less:
                answer = less.request(method, f"/v1/sandboxes/{below}", headers=key, **asked)
            assert answer.status_code == 403, answer.text


@pytest.mark.root
def test_full_disk_is_said_and_does_not_kill_who_opens_the_keys(tmp_path: Path) -> None:
    """SQLite maps a file: where its blocks are smaller than a page, a full disk is SIGBUS."""
    disk, image = tmp_path / "disk", tmp_path / "image"
    disk.mkdir()
    with image.open("wb") as file:
        file.truncate(8 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-b", "1024", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(disk)], check=True)
    try:
        done = subprocess.run(
            [sys.executable, "-c", OPEN_WITH_LITTLE_ROOM, str(disk)],
            capture_output=True,
            text=True,
            check=True,
        )
        ends = {int(line) for line in done.stdout.split()}
        assert ends == {0, 1}, done.stdout  # negative: killed by that signal
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def _refusal(uri: str, headers: dict[str, str]) -> ColdframeError:
    """The error in the answer to a WebSocket's handshake: typed, as that of any request."""
    with pytest.raises(InvalidStatus) as refused:
        connect(uri, additional_headers=headers)
    answer = refused.value.response
    error = read_error(bytes(answer.body or b""), answer.status_code)
    assert isinstance(error, ColdframeError)
    assert answer.status_code == status_of(error)
    return error


def test_scope_that_is_lacking_is_named(keyed_service: Service, make_key: MakeKey) -> None:
    """A key for looking must not be able to run anything."""
    with SandboxClient(url=keyed_service.tcp, api_key=make_key("green")) as owner:
        sandbox = owner.create_sandbox("any")
        with SandboxClient(url=keyed_service.tcp, api_key=make_key("green", "read")) as reader:
            seen = reader.get_sandbox(sandbox.id)
            assert seen.files.list("/") is not None
            with pytest.raises(NotPermittedError, match="'exec'"):
                seen.exec("true")
            with pytest.raises(NotPermittedError, match="'exec'"):
                seen.files.write("/x", "x")
            with pytest.raises(NotPermittedError, match="'create'"):
                seen.delete()
            with pytest.raises(NotPermittedError, match="'create'"):
                reader.create_sandbox("any")
            with pytest.raises(NotPermittedError, match="'admin'") as refused:
                reader.ledger()
        remedy = str(refused.value).rpartition(": coldframe ")[2]
        made = _command(keyed_service.home, *remedy.split())
        assert made.returncode == 0, made.stderr
        with SandboxClient(url=keyed_service.tcp, api_key=made.stdout.strip()) as allowed:
            assert allowed.ledger().live >= 1
        key = make_key("green", "read")
        sandbox.exec("true", operation_id="eves")
        with http(keyed_service.tcp, key) as looking:
            assert looking.get(f"/v1/sandboxes/{sandbox.id}/network").status_code == 200
            assert looking.post("/v1/execs/eves/cancel").status_code == 403
        for path in ("execs/eves/attach", f"sandboxes/{sandbox.id}/ports/1/websocket"):
            uri = f"{keyed_service.tcp.replace('http', 'ws')}/v1/{path}"
            for headers, kind in (
                ({"Authorization": f"Bearer {key}"}, NotPermittedError),
                ({}, NotAuthenticatedError),
            ):
                assert isinstance(_refusal(uri, headers), kind)
        sandbox.delete()


def test_name_that_is_too_long_with_its_owners_tag_is_refused(
    keyed_service: Service, make_key: MakeKey
) -> None:
    """It would be a host name that no kernel takes; the caller is told what fits."""
    with http(keyed_service.tcp, make_key("green")) as caller:
        answers = [
            caller.post("/v1/sandboxes", json={"image": "any", "name": "x" * length})
            for length in (52, 53)
        ]
        assert [one.status_code for one in answers] == [201, 400]
        assert "at most 52 characters" in answers[1].json()["message"]
        caller.delete(f"/v1/sandboxes/{answers[0].json()['id']}")


def test_owners_neither_see_nor_guess_nor_block_each_other(
    keyed_service: Service, make_key: MakeKey
) -> None:
    """Another's sandbox, operation and name are as if they had never been."""
    with (
        SandboxClient(url=keyed_service.tcp, api_key=make_key("amber")) as amber,
        SandboxClient(url=keyed_service.tcp, api_key=make_key("blue")) as blue,
    ):
        hers = amber.create_sandbox("any", name="solver", operation_id="create-7")
        assert hers.exec("echo hers", operation_id="run-7").text == "hers\n"
        assert (hers.name, hers.info.spec.labels["owner"]) == ("solver", "amber")

        with pytest.raises(SandboxNotFoundError) as real:
            blue.get_sandbox(hers.id)
        with pytest.raises(SandboxNotFoundError) as made_up:
            blue.get_sandbox("sb-000000-0000000000")
        assert str(real.value).replace(hers.id, "") == str(made_up.value).replace(
            "sb-000000-0000000000", ""
        )
        for refused in (
            lambda: blue.get_sandbox("solver"),
            lambda: blue.delete_sandbox(hers.id),
        ):
            with pytest.raises(SandboxNotFoundError):
                refused()
        assert blue.list_sandboxes() == blue.list_sandboxes({"owner": "amber"}) == ()

        with http(keyed_service.tcp, make_key("blue")) as caller:
            with hers.session(operation_id="shell-7") as session:
                assert session.exec("echo hers", operation_id="said-7").operation_id == "said-7"
                assert (session.refresh().id, hers.sessions()[0].id) == ("shell-7", "shell-7")
                said = {"command": "true"}
                assert caller.post("/v1/sessions/shell-7/execs", json=said).status_code == 404
                assert caller.get("/v1/sessions/shell-7").status_code == 404
                assert caller.delete("/v1/sessions/shell-7?kill=true").status_code == 404
            assert caller.get(f"/v1/sandboxes/{hers.id}/sessions").status_code == 404
            assert caller.get(f"/v1/sandboxes/{hers.id}/network").status_code == 404
            assert caller.post("/v1/execs/run-7/cancel").status_code == 404
            patch = f"/v1/sandboxes/{hers.id}/patch"
            assert caller.post(patch, content="--- a\n").status_code == 404

        for words, unknown in (
            ("no exec has the operation id 'none'", lambda: hers.attach("none").wait()),
            ("'solver' belongs", lambda: amber.create_sandbox("any", name="solver")),
            ("'run-7' was used", lambda: hers.exec("echo other", operation_id="run-7")),
        ):
            with pytest.raises(ColdframeError, match=words):  # as she wrote them, untagged
                unknown()

        his = blue.create_sandbox("any", name="solver", operation_id="create-7")
        assert his.id != hers.id
        with pytest.raises(OperationNotFoundError):
            his.attach("run-7").wait()
        assert his.exec("echo his", operation_id="run-7").text == "his\n"
        assert his.attach("run-7").wait().operation_id == "run-7"
        assert hers.exec("echo hers", operation_id="run-7").text == "hers\n"
        forged = blue.create_sandbox("any", labels={"owner": "amber"})
        assert [sandbox.id for sandbox in amber.list_sandboxes()] == [hers.id]
        assert {sandbox.id for sandbox in blue.list_sandboxes()} == {his.id, forged.id}


def test_quota_refuses_what_is_over_it_and_no_answer_that_is_there(
    keyed_service: Service, make_key: MakeKey
) -> None:
    """One owner's mistake must leave room for the others; a replay is nothing new."""
    done = _command(keyed_service.home, "key", "quota", "tim", "--sandboxes", "2", "--cpu", "3")
    assert done.returncode == 0
    said = _command(keyed_service.home, "key", "quota", "tim").stdout
    assert said == "tim may have at once: sandboxes 2, processors 3.0\n"
    shown = _command(keyed_service.home, "key", "quota", "tim", "--json").stdout
    assert json.loads(shown) == {
        **{"sandboxes": 2, "cpu": 3.0},
        **{"memory_bytes": None, "disk_bytes": None},
    }
    assert _command(keyed_service.home, "key", "quota", "tim", "--cpu", "nan").returncode == 2
    key = make_key("tim")
    with SandboxClient(url=keyed_service.tcp, api_key=key) as tim:
        with pytest.raises(UnsatisfiableError, match="cpu"):  # not even alone, whoever waits
            tim.create_sandbox("any", cpu=3.5)
        first = tim.create_sandbox("any", cpu=1.0, operation_id="a")
        tim.create_sandbox("any", cpu=1.0)
        with pytest.raises(QuotaError, match="sandboxes"):
            tim.create_sandbox("any", cpu=0.5)
        with http(keyed_service.tcp, key) as caller:
            answer = caller.post("/v1/sandboxes", json={"image": "any"})  # 4 processors
        assert (answer.status_code, answer.json()["code"]) == (422, "unsatisfiable")
        assert "retry-after" not in answer.headers
        assert tim.create_sandbox("any", cpu=1.0, operation_id="a").id == first.id
        with http(keyed_service.tcp, key) as caller:
            answer = caller.post("/v1/sandboxes", json={"image": "any", "cpu": 1.0})
        assert (answer.status_code, answer.json()["code"]) == (429, "quota_exceeded")
        assert answer.headers["retry-after"] == "1"
        with http(keyed_service.tcp, key) as caller:
            mine = caller.get("/v1/resources").json()
        assert (mine["in_use"]["sandboxes"], mine["in_use"]["cpu"]) == (2, 2.0)
        assert (mine["quota"]["sandboxes"], mine["quota"]["cpu"]) == (2, 3.0)
        assert mine["node"] is None  # what all others have is not this owner's to know
        first.delete()
        tim.create_sandbox("any", cpu=0.5)
        assert _command(keyed_service.home, "key", "quota", "tim", "--free").returncode == 0
        tim.create_sandbox("any", cpu=64.0)


def test_owner_lists_the_commands_of_own_sandboxes_alone_by_own_ids(
    keyed_service: Service, make_key: MakeKey
) -> None:
    """A command line may hold a secret, and an id of another's is half a way to its output."""
    with (
        SandboxClient(url=keyed_service.tcp, api_key=make_key("amber")) as amber,
        SandboxClient(url=keyed_service.tcp, api_key=make_key("blue")) as blue,
        http(keyed_service.tcp, make_key("blue")) as caller,
    ):
        hers = amber.create_sandbox("any", name="listed")
        his = blue.create_sandbox("any", name="listed")
        for sandbox, said in ((hers, "echo hers"), (his, "echo his")):
            sandbox.exec(said, operation_id="one")
            (listed,) = sandbox.commands()
            assert (listed.operation_id, listed.command_line) == ("one", said)
        named = caller.get("/v1/sandboxes/listed/execs").json()
        assert [one["command_line"] for one in named] == ["echo his"]
        unknown = caller.get("/v1/sandboxes/sb-000000-0000000000/execs")
        refused = caller.get(f"/v1/sandboxes/{hers.id}/execs")
        assert (refused.status_code, unknown.status_code) == (404, 404)
        assert refused.text.replace(hers.id, "sb-000000-0000000000") == unknown.text
        hers.delete()
        assert caller.get(f"/v1/sandboxes/{hers.id}/execs").status_code == 404
        his.delete()


def test_texts_of_a_sandbox_have_an_end(keyed_service: Service, make_key: MakeKey) -> None:
    """A node holds them as long as it knows a sandbox, also after its end."""
    with http(keyed_service.tcp, make_key("lea")) as caller:
        for given in (
            {"labels": {f"label-{number}": "" for number in range(65)}},
            {"labels": {"long": "x" * (17 << 10)}},
            {"env": {"LONG": "x" * (2 << 20)}},
            *({name: "x" * (30 << 20)} for name in ("image", "workdir", "user")),
        ):
            answer = caller.post("/v1/sandboxes", json={"image": "any"} | given)
            assert (answer.status_code, answer.json()["code"]) == (400, "invalid_request")
            assert "at most" in answer.json()["message"]
            assert len(answer.content) < 1000
        for name, empty in (("labels", {"": "x"}), ("user", ""), ("workdir", "")):
            answer = caller.post("/v1/sandboxes", json={"image": "any", name: empty})
            assert (answer.status_code, answer.json()["code"]) == (400, "invalid_request")
            assert f"{name}: " in answer.json()["message"]


def test_large_answers_of_one_owner_are_bounded_while_nobody_reads_them(
    keyed_service: Service, make_key: MakeKey
) -> None:
    """Each holds a window and its text: slow readers of one result must not fill the memory."""
    key = make_key("max")
    with SandboxClient(url=keyed_service.tcp, api_key=key) as client:
        sandbox = client.create_sandbox("any")
        words = "head -c 50000000 /dev/zero"
        sandbox.exec(words, window_bytes=60 << 20, operation_id="large")
        head = f"GET /v1/execs/large HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {key}\r\n\r\n"
        address = keyed_service.tcp.removeprefix("http://").rpartition(":")
        with contextlib.ExitStack() as slow:
            firsts = []
            for _ in range(4):  # 150 MB each: three fit
                one = slow.enter_context(socket.create_connection((address[0], int(address[2]))))
                one.sendall(head.encode())
                firsts.append(one.recv(1 << 16))
            assert [first[9:12] for first in firsts] == [b"200", b"200", b"200", b"429"]
            assert b"retry-after: 1" in firsts[3]
            with http(keyed_service.tcp, make_key("moe")) as other:
                assert other.get("/v1/sandboxes").status_code == 200
        latest = time.monotonic() + 20
        with http(keyed_service.tcp, key) as caller:
            while caller.get("/v1/execs/large").status_code != 200:  # they have gone
                assert time.monotonic() < latest
        sandbox.delete()


def test_keyless_service_is_loopback_only_and_takes_nothing_from_web_pages(
    service: Service, tmp_path: Path
) -> None:
    """A page in the browser of whoever runs it could else make sandboxes."""
    assert any("no keys" in line for line in service.log)
    with http(service.tcp) as caller:
        assert caller.get("/v1/sandboxes").status_code == 200
        for headers in (
            {"Origin": "http://evil.example"},
            {"Host": "evil.example"},
            {"Referer": f"{service.tcp}/p/token/"},
            {"Sec-Fetch-Site": "same-origin"},
        ):
            answer = caller.get("/v1/sandboxes", headers=headers)
            assert (answer.status_code, answer.json()["code"]) == (401, "not_authenticated")

    refused = _command(tmp_path, "serve", "--listen", "0.0.0.0:0")
    assert refused.returncode == 2
    assert "key" in refused.stderr


@pytest.mark.root
def test_another_user_is_turned_away_from_the_socket(service: Service) -> None:
    """Whoever may use the socket may be root in every sandbox."""
    path = Path(service.unix.removeprefix("unix:"))
    for directory in path.parents:
        if directory.stat().st_mode & 0o001 == 0 and directory != Path("/"):
            directory.chmod(directory.stat().st_mode | 0o711)
    mode = path.stat().st_mode
    assert mode & 0o077 == 0
    path.chmod(0o777)
    try:
        script = (
            "import os, socket\n"
            "os.setgid(65534); os.setuid(65534)\n"
            "s = socket.socket(socket.AF_UNIX)\n"
            f"s.connect({str(path)!r})\n"
            "print(s.recv(1000))\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=False
        )
    finally:
        path.chmod(mode)
    assert "403" in done.stdout and "not_permitted" in done.stdout, done
    until_logged(service, "user 65534 refused")
    told = (service.home / "audit" / "audit.jsonl").read_text()
    assert '"status":403,"peer":"uid 65534"' in told


def _raw(service: Service, data: bytes, wait_s: float = 5.0) -> bytes:
    """Send bytes as they are; return what comes until the end or `wait_s`."""
    host, port = service.tcp.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=wait_s) as connection:
        connection.sendall(data)
        got = b""
        try:
            while piece := connection.recv(65536):
                got += piece
        except TimeoutError:
            pass
        return got


def test_smuggled_and_oversized_heads_are_refused(service: Service) -> None:
    """Two lengths have two readings: behind a proxy the second is somebody else's request."""
    both = (
        b"POST /v1/sandboxes HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 4\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /v1/sandboxes HTTP/1.1\r\nHost: x\r\n\r\n"
    )
    assert b" 200 " not in _raw(service, both, 2.0).split(b"\r\n")[0]
    lengths = (
        b"POST /v1/sandboxes HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n"
    )
    assert _raw(service, lengths, 2.0).startswith(b"HTTP/1.1 400")
    large = b"GET / HTTP/1.1\r\n" + b"X-A: " + b"a" * 100_000 + b"\r\n\r\n"
    assert b" 431 " in _raw(service, large)
    with http(service.tcp) as caller:
        assert caller.get("/v1/versions").status_code == 200


def test_path_tricks_reach_no_other_route(service: Service) -> None:
    """An encoded slash or dots must not lead past a check that another route makes."""
    for path in ("/v1/sandboxes/..%2f..%2fmetrics", "/v1//sandboxes", "/healthz/../v1/sandboxes"):
        answer = _raw(
            service,
            f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode(),
        )
        assert answer.split(b" ")[1] == b"404", (path, answer)


def test_slow_heads_are_cut_and_cost_others_nothing(tmp_path: Path) -> None:
    """Connections that never ask must not hold what others need."""
    with serving(tmp_path, "fake") as service:
        host, port = service.tcp.removeprefix("http://").split(":")
        slow = [socket.create_connection((host, int(port))) for _ in range(200)]
        for connection in slow:
            connection.sendall(b"GET /v1/sandboxes HTTP/1.1\r\nHost: 127")
        with http(service.tcp) as caller:
            assert caller.get("/v1/versions").status_code == 200
        assert not any(select.select(slow, [], [], 0))  # none of them is cut yet
        slow[0].settimeout(30)
        assert slow[0].recv(100) == b""
        for connection in slow:
            connection.close()


def test_service_speaks_tls_with_the_certificate_that_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key on the open network would be anybody's; and so would a service that is not checked."""
    cert, key = self_signed(tmp_path)
    options = ("--tls-cert", str(cert), "--tls-key", str(key))
    with serving(tmp_path, "fake", *options) as service:
        assert service.tcp.startswith("https://")
        with pytest.raises(
            ServiceUnreachableError, match=r"certificate of .* is not trusted.*SSL_CERT_FILE"
        ):
            SandboxClient(url=service.tcp).list_sandboxes()
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))
        with SandboxClient(url=service.tcp) as client, client.create_sandbox("any") as sandbox:
            assert sandbox.exec("echo tls").text == "tls\n"
            sandbox.files.write("/big", b"x" * 3_000_000)
            assert len(sandbox.files.read("/big")) == 3_000_000
    wrong = _command(tmp_path, "serve", "--tls-cert", str(key), "--tls-key", str(key))
    assert (wrong.returncode, "PEM" in wrong.stderr) == (2, True)


async def test_unknown_and_wrong_keys_are_refused_in_the_same_words(tmp_path: Path) -> None:
    """Words that differ would tell which ids there are."""
    said = set()
    async with open_store(None, tmp_path) as store:
        for given in (f"cf_{'0' * 12}_{'0' * 64}", "cf_x", "Ω"):
            with pytest.raises(NotAuthenticatedError) as raised:
                await authenticate(store, f"Bearer {given}")
            said.add(str(raised.value))

    assert len(said) == 1
    assert issubclass(NotAuthenticatedError, ColdframeError)
