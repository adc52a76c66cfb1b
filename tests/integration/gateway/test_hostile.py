"""Requests of somebody who means harm: each is refused and told of, and costs others nothing."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures.service import Service, serving
from tests.integration.gateway.conftest import http

SMUGGLED = b"DELETE /v1/sandboxes/sb-smuggled HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service that is done harm to."""
    with serving(tmp_path_factory.mktemp("hostile"), "fake") as service:
        yield service


def _raw(service: Service, data: bytes, wait_s: float = 10.0) -> bytes:
    """Send bytes as they are; return what comes until the end or `wait_s`."""
    host, port = service.tcp.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=wait_s) as connection:
        got = b""
        with contextlib.suppress(TimeoutError, ConnectionError):
            connection.sendall(data)
            while piece := connection.recv(65536):
                got += piece
        return got


def _post(*headers: bytes, body: bytes = b"") -> bytes:
    lines = [b"POST /v1/sandboxes HTTP/1.1", b"Host: 127.0.0.1", *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def _served(service: Service) -> None:
    with http(service.tcp) as caller:
        assert caller.get("/v1/versions").status_code == 200
        audit = service.home / "audit/audit.jsonl"
        assert not audit.exists() or "sb-smuggled" not in audit.read_text()


@pytest.mark.parametrize(
    "data",
    [
        _post(b"Content-Length: 5", b"Transfer-Encoding: chunked", body=b"0\r\n\r\n" + SMUGGLED),
        _post(b"Transfer-Encoding: chunked", b"Content-Length: 5", body=b"0\r\n\r\n" + SMUGGLED),
        _post(b"Content-Length: 0", b"Content-Length: 64", body=SMUGGLED),
        _post(b"Content-Length: 0, 64", body=SMUGGLED),
        _post(b"Content-Length: +0", body=SMUGGLED),
        _post(b"Content-Length: 0x0", body=SMUGGLED),
        _post(b"Content-Length: -1", body=SMUGGLED),
        _post(b"Content-Length : 0", body=SMUGGLED),
        _post(b"Content-Length: 99999999999999999999999", body=SMUGGLED),
        _post(b"X-Folded: a\r\n Content-Length: 64", b"Content-Length: 0", body=SMUGGLED),
        _post(b"X-Folded: a\r\n\tb", b"Content-Length: 0", body=SMUGGLED),
        _post(b"X-Nul: a\x00b", b"Content-Length: 0", body=SMUGGLED),
        _post(b"X-Nul\x00: a", b"Content-Length: 0", body=SMUGGLED),
        _post(b"Transfer-Encoding: xchunked", body=b"0\r\n\r\n" + SMUGGLED),
        _post(b"Transfer-Encoding: chunked, identity", body=b"0\r\n\r\n" + SMUGGLED),
        _post(b"Transfer-Encoding : chunked", body=b"0\r\n\r\n" + SMUGGLED),
        _post(b"Transfer-Encoding: chunked", body=b"0x0\r\n\r\n" + SMUGGLED),
        _post(b"Transfer-Encoding: chunked", body=b"-1\r\n\r\n" + SMUGGLED),
        _post(b"Transfer-Encoding: chunked", body=b"fffffffffffffffff\r\n" + SMUGGLED),
        _post(b": empty name", b"Content-Length: 0", body=SMUGGLED),
        _post(b"no colon", b"Content-Length: 0", body=SMUGGLED),
        b"POST /v1/sandboxes HTTP/9.9\r\nHost: 127.0.0.1\r\n\r\n" + SMUGGLED,
        b"POST  /v1/sandboxes  HTTP/1.1 x\r\nHost: 127.0.0.1\r\n\r\n" + SMUGGLED,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    ],
)
def test_request_with_two_readings_is_refused_and_nothing_after_it_is_read(
    attacked: Service, data: bytes
) -> None:
    """Behind a proxy that reads it the other way, what follows is somebody else's request."""
    answer = _raw(attacked, data)

    assert answer.startswith(b"HTTP/1.1 400"), answer[:200]
    assert answer.count(b"HTTP/1.1 ") == 1, answer
    _, _, body = answer.partition(b"\r\n\r\n")
    assert json.loads(body)["code"] == "invalid_request"
    _served(attacked)


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("Authorization", "Bearer a", "Bearer b"),
        ("Coldframe-On-Behalf", "{}", "{}"),
        ("Coldframe-Protocol", "1", "2"),
        ("Host", "127.0.0.1", "example.org"),
        ("Idempotency-Key", "twice-a", "twice-b"),
    ],
)
def test_header_that_is_there_twice_is_refused(
    attacked: Service, name: str, one: str, other: str
) -> None:
    """A proxy may have let the request through for the one, and we would take the other."""
    head = [f"{name}: {one}", f"{name}: {other}"]
    if name != "Host":
        head.append("Host: 127.0.0.1")
    lines = ["GET /v1/sandboxes HTTP/1.1", *head, "Connection: close", "", ""]

    answer = _raw(attacked, "\r\n".join(lines).encode())

    assert answer.startswith(b"HTTP/1.1 400"), answer[:200]
    assert f"'{name.lower()}' is there more than once".encode() in answer


def test_request_that_names_no_host_is_refused(attacked: Service) -> None:
    """HTTP/1.1 asks for that: a proxy would take whatever host it likes."""
    answer = _raw(attacked, b"GET /v1/versions HTTP/1.1\r\nConnection: close\r\n\r\n")
    older = _raw(attacked, b"GET /v1/versions HTTP/1.0\r\n\r\n")

    assert answer.startswith(b"HTTP/1.1 400"), answer[:200]
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["code"] == "invalid_request"
    assert older.startswith(b"HTTP/1.1 200"), older[:200]


def test_requests_with_two_readings_are_logged_however_many_without_filling_the_log(
    attacked: Service,
) -> None:
    """Whoever runs the service must see it, and have room on the disk."""
    for _ in range(300):
        _raw(attacked, _post(b"Content-Length: 0", b"Content-Length: 64", body=SMUGGLED))
    told = [line for line in attacked.log if "Invalid HTTP request" in line]
    assert 1 <= len(told) <= 290


@pytest.mark.parametrize(
    "path",
    [
        "/v1/../metrics",
        "/v1/sandboxes/../../metrics",
        "/v1/%2e%2e/metrics",
        "/v1/sandboxes/%2e%2e%2f%2e%2e%2fmetrics",
        "//metrics",
        "/metrics/",
        "/metrics%00",
        "/metrics;x",
        "/metrics\\",
        "/%6detrics/..",
        "/./metrics",
        "/healthz/../v1/sandboxes",
        "/v1/versions/../sandboxes",
        "/p/../metrics",
        "/p/x/../../metrics",
        "/p/%2e%2e/metrics",
        "/v1/sandboxes/%00",
        "/v1/sandboxes/..%2f..%2fmetrics/execs",
        "/v1/sandboxes/%c0%ae%c0%ae/execs",
        "/v1/execs/../execs/x",
    ],
)
def test_path_trick_reaches_nothing(attacked: Service, path: str) -> None:
    """What one check has looked at must be what another one opens."""
    request = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
    answer = _raw(attacked, request.encode())

    assert answer.split(b" ")[1] in {b"400", b"404", b"405"}, answer[:200]
    assert b"coldframe_ledger" not in answer


def test_path_that_leads_nowhere_is_told_short_and_harmless(attacked: Service) -> None:
    """Errors of the service are read on terminals."""
    with http(attacked.tcp) as caller:
        told = caller.get("/v1/%1b%5b2J" + "a" * 10_000).json()["message"]

    assert told.isprintable()
    assert "characters): there is no such route" in told
    assert len(told) < 400


def test_whole_url_as_a_target_is_read_as_its_path_alone(attacked: Service) -> None:
    """Who the caller means is in Host, which was checked."""
    evil = b"GET http://evil.example/v1/sandboxes HTTP/1.1\r\nHost: evil.example\r\n"
    answer = _raw(attacked, evil + b"Connection: close\r\n\r\n")
    assert answer.split(b" ")[1] in {b"400", b"401", b"404"}, answer[:200]


def test_many_or_large_headers_are_refused(attacked: Service) -> None:
    """A head is held in memory until it is whole."""
    many = b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: a\r\n" % n for n in range(20_000)) + b"\r\n"
    for data in (many, b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n"):
        answer = _raw(attacked, data)
        assert b" 431 " in answer[:40]
        assert b'"code": "invalid_request"' in answer
    _served(attacked)


def test_body_without_a_length_is_cut_at_the_bound(attacked: Service) -> None:
    """One client must not fill the memory of all, whatever it says of itself."""
    before = _memory_mib(attacked)
    host, port = attacked.tcp.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(_post(b"Transfer-Encoding: chunked"))
        piece = b"100000\r\n" + b"x" * (1 << 20) + b"\r\n"
        sent = 0
        with contextlib.suppress(OSError):
            while sent < 200:
                connection.sendall(piece)
                sent += 1
        answer = b""
        with contextlib.suppress(OSError):
            answer = connection.recv(65536)
    assert sent < 200 or answer.startswith(b"HTTP/1.1 413"), answer[:100]
    assert _memory_mib(attacked) - before < 120
    _served(attacked)


def _memory_mib(service: Service) -> float:
    text = Path(f"/proc/{service.process.pid}/status").read_text()
    line = next(line for line in text.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024


def test_slow_bodies_are_cut_and_cost_others_nothing(attacked: Service) -> None:
    """A client that sends a byte now and then must not hold what others need."""
    host, port = attacked.tcp.removeprefix("http://").split(":")
    slow = [socket.create_connection((host, int(port)), timeout=30) for _ in range(100)]
    for connection in slow:
        connection.sendall(_post(b"Content-Length: 1000", body=b"{"))
    with http(attacked.tcp) as caller:
        assert caller.get("/v1/sandboxes").status_code == 200
    assert not any(select.select(slow, [], [], 0))  # none of them is cut yet
    for connection in slow:
        answer = connection.recv(65536)
        assert answer.startswith(b"HTTP/1.1 408"), answer
        connection.close()


def test_file_may_come_as_slowly_as_it_likes(attacked: Service) -> None:
    """A large file over a slow line is no attack."""
    with http(attacked.tcp) as caller:
        sandbox = caller.post("/v1/sandboxes", json={"image": "any"}).json()["id"]

        def content() -> Iterator[bytes]:
            for _ in range(4):
                yield b"x"
                time.sleep(0.5)

        sent = caller.put(
            f"/v1/sandboxes/{sandbox}/files", params={"path": "/f"}, content=content()
        )
        assert sent.json() == {"bytes": 4}
