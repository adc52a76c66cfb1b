"""A stop while clients do not take their answers: it waits for a while, then cuts them quietly."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from coldframe import SandboxClient
from tests.fixtures.service import Service, serving
from tests.fixtures.waiting import wait_until
from tests.integration.gateway.conftest import until_logged

LARGE = 16 << 20
"""More than the kernel and the service take for a client that does not read."""


def _silent(service: Service, target: str, *headers: str) -> socket.socket:
    """Ask by TCP; return the connection once its answer has begun, and read no more of it."""
    host, port = service.tcp.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((host, int(port)))
    lines = [f"GET {target} HTTP/1.1", "Host: 127.0.0.1", *headers, "", ""]
    connection.sendall("\r\n".join(lines).encode())
    assert connection.recv(9) == b"HTTP/1.1 "
    return connection


_TO_WEBSOCKET = (
    *("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13"),
    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
)


@contextmanager
def _unread(service: Service) -> Iterator[list[socket.socket]]:
    """Clients of each kind of answer that is larger than any buffer, none of which reads."""
    with SandboxClient(url=service.unix) as client, ExitStack() as held:
        sandbox = client.create_sandbox("any")
        sandbox.keep()
        words = f"head -c {LARGE} /dev/zero | tee large"
        done = sandbox.exec(words, window_bytes=LARGE, operation_id="large")
        assert len(done.stdout) == LARGE
        yield [
            held.enter_context(_silent(service, target, *headers))
            for target, *headers in (
                (f"/v1/sandboxes/{sandbox.id}/files?path=/large",),
                ("/v1/execs/large",),
                ("/v1/execs/large/events",),
                ("/v1/execs/large/attach", *_TO_WEBSOCKET),
            )
        ]


def test_stop_cuts_clients_that_do_not_read_soon_and_quietly(tmp_path: Path) -> None:
    """A restart of the service must not wait for who has fallen asleep."""
    with serving(tmp_path, "fake") as service, _unread(service) as silent:
        began = time.monotonic()
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(60) == 0

        assert time.monotonic() - began < 28
        until_logged(service, f"{len(silent)} connections cut: nothing was read of their answers")


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGQUIT])
def test_second_signal_cuts_clients_that_do_not_read_at_once(
    tmp_path: Path, second: signal.Signals
) -> None:
    """Whoever is in a hurry must not wait for them either, and gets no traceback."""
    with serving(tmp_path, "fake") as service, _unread(service) as silent:
        service.process.send_signal(signal.SIGTERM)
        path = service.unix.removeprefix("unix:")
        wait_until(lambda: not _is_served(path))
        began = time.monotonic()
        service.process.send_signal(second)
        assert service.process.wait(60) == 0

        assert time.monotonic() - began < 25
        until_logged(service, f"{len(silent)} connections cut: the service ends before")


def _is_served(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path) == 0


def test_stop_waits_for_clients_that_read_slowly(tmp_path: Path) -> None:
    """Whoever still takes something is no sleeper."""
    with serving(tmp_path, "fake") as service, _unread(service) as (file, *_):
        service.process.send_signal(signal.SIGTERM)
        got, beyond = 0, time.monotonic() + 8  # s: longer than a client may take nothing
        while time.monotonic() < beyond:
            got += len(file.recv(1 << 14))
            time.sleep(0.5)  # it is a slow one
        file.settimeout(30)
        while piece := file.recv(1 << 20):
            got += len(piece)

        assert got > LARGE
        assert service.process.wait(60) == 0
