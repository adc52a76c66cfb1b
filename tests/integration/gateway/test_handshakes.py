"""Handshakes of WebSockets that are refused: with status and error body, as any request."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from typing import Any

import pytest

from coldframe import Sandbox
from tests.fixtures.service import Service
from tests.fixtures.waiting import wait_until
from tests.integration.gateway.conftest import until_logged

KEY = b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="
VERSION = b"Sec-WebSocket-Version: 13"
ATTACH = "/v1/execs/none/attach"
NO_REQUEST = "its connection came to no request: 405"


def shake(
    service: Service, target: str, headers: Sequence[bytes] = (KEY, VERSION), method: bytes = b"GET"
) -> tuple[int, dict[str, Any]]:
    """Send a handshake; return status and body of the answer, after which nothing follows."""
    host, _, port = service.tcp.removeprefix("http://").partition(":")
    asked = [
        method + b" " + target.encode() + b" HTTP/1.1",
        b"Host: " + host.encode(),
        b"Upgrade: websocket",
        b"Connection: Upgrade",
        *headers,
    ]
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b"\r\n".join(asked) + b"\r\n\r\n")
        told = b""
        while piece := connection.recv(1 << 16):
            told += piece
    head, _, body = told.partition(b"\r\n\r\n")
    first, *lines = head.decode().lower().split("\r\n")
    shown = dict(line.split(": ", 1) for line in lines)
    assert shown["content-type"] == "application/json", told
    assert int(shown["content-length"]) == len(body)
    return int(first.split()[1]), json.loads(body)


@pytest.mark.parametrize(
    ("target", "status", "code"),
    [
        (ATTACH, 404, "operation_not_found"),
        (f"{ATTACH}?stdout=-1", 400, "invalid_request"),
        (f"{ATTACH}?stderr=x", 400, "invalid_request"),
        ("/v1/sandboxes/none/ports/0/websocket", 400, "invalid_request"),
        ("/v1/sandboxes/none/ports/x/websocket", 400, "invalid_request"),
        ("/v1/sandboxes/none/ports/1/websocket", 404, "sandbox_not_found"),
        ("/v1/sandboxes", 404, "invalid_request"),
        ("/nothing", 404, "invalid_request"),
        ("/p/none/", 404, "port_url_invalid"),
    ],
)
def test_refused_websocket_says_why_as_any_request(
    service: Service, target: str, status: int, code: str
) -> None:
    """A client's author has one way to read errors."""
    told = shake(service, target)
    assert (told[0], told[1]["code"]) == (status, code)
    assert told[1]["message"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ((), 400),
        ((KEY,), 400),
        ((VERSION,), 400),
        ((KEY, b"Sec-WebSocket-Version: 8"), 400),
        ((b"Sec-WebSocket-Key: short", VERSION), 400),
        ((KEY, KEY, VERSION), 400),
        ((KEY, VERSION, b"Sec-WebSocket-Protocol: ;;"), 400),
        ((KEY, VERSION, b"Content-Length: 5"), 400),
        ((KEY, VERSION, b"Transfer-Encoding: chunked"), 400),
        ((KEY, VERSION, *(b"X-%d: y" % number for number in range(200))), 400),
        ((KEY, VERSION, b"X: " + b"y" * 10_000), 400),
        ((KEY, VERSION, b"Coldframe-Protocol: 99"), 400),
        ((KEY, VERSION, b"Host: another"), 400),
        ((KEY, VERSION, b"Origin: http://page.example"), 401),
    ],
    ids=lambda one: b" ".join(one)[:40].decode() if isinstance(one, tuple) else None,
)
def test_handshake_that_is_none_is_answered_at_once(
    service: Service, headers: tuple[bytes, ...], status: int
) -> None:
    """One that waits for ever costs a connection, and its author a day."""
    told = shake(service, ATTACH, headers)
    assert told[0] == status
    assert {"code", "message", "retryable", "side", "execution"} <= told[1].keys()


def test_handshake_of_another_method_is_refused_and_logged(service: Service) -> None:
    """Who tries many must be seen."""
    assert shake(service, ATTACH, method=b"PUT")[0] == 405
    until_logged(service, NO_REQUEST)


def test_port_that_speaks_no_websocket_is_a_bad_gateway(service: Service, served: Sandbox) -> None:
    """As it is for other requests to it."""
    server = served.start(["python3", "-m", "http.server", "--bind", "127.0.0.1", "8137"])
    wait_until(lambda: 8137 in served.listening_ports())
    path = served.port_url(8137).url.removeprefix(service.tcp)

    status, told = shake(service, path)

    assert (status, told["code"]) == (502, "port_unreachable")
    assert "8137" in told["message"]
    server.kill()
