"""What the audit log of a real service says, and what nobody can make it say."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from coldframe import ColdframeError, SandboxClient
from tests.fixtures.service import Service, serving
from tests.fixtures.waiting import wait_until
from tests.integration.gateway.conftest import audit_lines, http

FIELDS = {"time", "trace", "key", "owner", "method", "route", "sandbox", "status", "peer"}


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service that asks for keys."""
    with serving(tmp_path_factory.mktemp("audited"), "fake") as service:
        yield service


@pytest.fixture
def make_key(audited: Service) -> Callable[..., str]:
    """Makes keys: `make_key(owner, *scopes)`."""

    def make(owner: str, *scopes: str) -> str:
        words = [word for scope in scopes for word in ("--scope", scope)]
        done = subprocess.run(
            [sys.executable, "-m", "coldframe.cli.main", "key", "create", "--owner", owner, *words],
            env={**os.environ, "COLDFRAME_HOME": str(audited.home)},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    return make


def test_changes_and_refusals_are_lines_and_looks_are_not(
    audited: Service, make_key: Callable[..., str]
) -> None:
    """Who did what to which sandbox, from where, and how it was answered."""
    key = make_key("amber")
    with SandboxClient(url=audited.tcp, api_key=key) as amber, http(audited.tcp, key) as caller:
        sandbox = amber.create_sandbox("any", env={"SECRET": "hunter2"})
        sandbox.exec("echo hunter2")
        sandbox.files.write("/hunter2", "hunter2")
        sandbox.files.read("/hunter2")
        trace = "4bf92f3577b34da6a3ce929d0e0e4736"
        head = {"traceparent": f"00-{trace}-00f067aa0ba902b7-01"}
        assert caller.get("/v1/ledger", headers=head).status_code == 403
        assert caller.get("/v1/sandboxes/sb-none").status_code == 404
        sandbox.delete()
    with http(audited.tcp, key[:-1] + "x") as caller:
        assert caller.get(f"/v1/sandboxes/{sandbox.id}").status_code == 401

    lines = [line for line in audit_lines(audited.home) if line["key"] == key.split("_")[1]]
    command = lines.pop(0)
    assert (command["method"], command["route"]) == ("COMMAND", "key create")
    assert (command["owner"], command["peer"]) == ("amber", f"uid {os.getuid()}")
    one = "/v1/sandboxes/{sandbox_id}"
    assert [(line["method"], line["route"], line["status"]) for line in lines] == [
        ("POST", "/v1/sandboxes", 201),
        ("POST", f"{one}/execs", 200),
        ("PUT", f"{one}/files", 201),
        ("GET", "/v1/ledger", 403),
        ("GET", one, 404),
        ("DELETE", one, 200),
    ]
    assert {line["owner"] for line in lines} == {"amber"}
    assert {line["peer"] for line in lines} == {"127.0.0.1"}
    assert [line["sandbox"] for line in lines] == [
        *(sandbox.id, sandbox.id, sandbox.id, None, "sb-none", sandbox.id)
    ]
    assert [line["trace"] for line in lines] == [None, None, None, trace, None, None]
    assert all(line.keys() == FIELDS for line in lines)
    assert all(abs(line["time"] - time.time()) < 600 for line in lines)
    refused = audit_lines(audited.home)[-1]
    assert (refused["key"], refused["owner"], refused["status"]) == (None, None, 401)
    assert (refused["route"], refused["sandbox"]) == (one, sandbox.id)
    text = (audited.home / "audit" / "audit.jsonl").read_text()
    assert "hunter2" not in text
    assert key.rpartition("_")[2] not in text
    assert (audited.home / "audit").stat().st_mode & 0o077 == 0


def test_nothing_that_is_sent_forges_a_line(audited: Service, make_key: Callable[..., str]) -> None:
    """Line ends, quotes and escapes in paths, headers and methods stay data."""
    key = make_key("mal")
    before = len(audit_lines(audited.home))
    logged = len(audited.log)
    evil = '%0a{"key":"root","status":200}%0a%22%5c%00%1b[31m%e2%80%a8'
    heads = [
        f"DELETE /v1/sandboxes/{evil} HTTP/1.1",
        f"POST /v1/sandboxes/{evil}/execs HTTP/1.1",
        f"DELETE /{evil} HTTP/1.1",
        f"DELETE /v1/sandboxes/{'a' * 5000} HTTP/1.1",
        "DELETE /v1/sandboxes/\xff\xfe HTTP/1.1",
        f"PROPFIND{'X' * 300} /v1/sandboxes HTTP/1.1",
    ]
    host, port = audited.tcp.removeprefix("http://").split(":")
    for head in heads:
        for authorization in (f"Bearer {key}", 'Bearer x"\\n{'):
            with socket.create_connection((host, int(port)), timeout=10) as connection:
                request = (
                    f"{head}\r\nHost: 127.0.0.1\r\nAuthorization: {authorization}\r\n"
                    'traceparent: 00-{"key":"root"}\r\nConnection: close\r\n'
                    "Content-Length: 0\r\n\r\n"
                )
                connection.sendall(request.encode("latin-1"))
                while connection.recv(65536):
                    pass

    lines = audit_lines(audited.home)[before:]
    no_http = [line for line in lines if line["method"] == "-"]
    assert [line["status"] for line in no_http] == [400] * 4
    assert len(lines) == len(heads) * 2
    key_id = key.split("_")[1]
    for line in lines:
        assert line.keys() == FIELDS
        assert line["key"] in {None, key_id}
        assert line["status"] >= 400
        assert line["trace"] is None
        assert len(line["sandbox"] or "") <= 64
        assert len(line["method"]) <= 64
    shown = "".join(audited.log[logged:])
    assert "root" not in shown
    assert "\x1b" not in shown


def test_flood_of_wrong_keys_is_cheap_and_hides_nobody_elses_refusal(
    audited: Service, make_key: Callable[..., str]
) -> None:
    """Counted, not written; who holds a key is served meanwhile and logged."""
    key = make_key("amber", "read")
    before, logged = len(audit_lines(audited.home)), len(audited.log)
    with http(audited.tcp, "nonsense") as stranger, http(audited.tcp, key) as reader:
        began = time.monotonic()
        for _ in range(1500):
            assert stranger.delete("/v1/sandboxes/sb-1").status_code == 401
        took = time.monotonic() - began
        assert reader.delete("/v1/sandboxes/sb-1").status_code == 403
        refused = 1500

        def all_told() -> bool:
            """Whether the next refusal that is written told of all that were not."""
            nonlocal refused
            stranger.delete("/v1/sandboxes/sb-1")
            refused += 1
            strangers = [line for line in audit_lines(audited.home)[before:] if not line["key"]]
            return sum(line.get("omitted", 0) + 1 for line in strangers) == refused

        wait_until(all_told)
    lines = audit_lines(audited.home)[before:]

    strangers = [line for line in lines if line["key"] is None]
    assert len(strangers) <= 100 + 10 * (took + 1) + 1
    assert [line["status"] for line in lines if line["key"]] == [403]
    assert len(audited.log) - logged <= len(strangers) + 5
    with pytest.raises(ColdframeError), SandboxClient(url=audited.tcp, api_key="x") as wrong:
        wrong.list_sandboxes()


def test_flood_of_what_is_no_request_does_not_fill_the_log(audited: Service) -> None:
    """Whoever can connect can send anything, as fast as it likes."""
    host, port = audited.tcp.removeprefix("http://").split(":")
    logged = len(audited.log)
    for _ in range(400):
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(b"nonsense\r\n\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 400")
    assert len(audited.log) - logged < 250


def test_connections_that_come_to_no_request_are_lines(tmp_path: Path) -> None:
    """Slow and large heads and two lengths are how somebody tries a door."""
    with serving(tmp_path, "fake") as tried:
        host, port = tried.tcp.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as slow:
            slow.sendall(b"GET /v1/sandboxes HTTP/1.1\r\nHost: 127")
            for sent in (
                b"GET / HTTP/1.1\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
                b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
            ):
                with socket.create_connection((host, int(port)), timeout=30) as connection:
                    connection.sendall(sent)
                    while connection.recv(65536):
                        pass
            assert slow.recv(100) == b""
        lines = audit_lines(tried.home)
    assert [line["status"] for line in lines] == [431, 400, 408]
    assert {(line["method"], line["route"], line["peer"]) for line in lines} == {
        ("-", "-", "127.0.0.1")
    }
