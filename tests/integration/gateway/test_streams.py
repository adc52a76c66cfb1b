"""Output as it comes, stdin on its way, connections to ports; and clients that do not read."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import os
import resource
import signal
import socket
import struct
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as aconnect
from websockets.exceptions import ConnectionClosedOK, InvalidStatus
from websockets.sync.client import connect, unix_connect

from coldframe import (
    AsyncSandboxClient,
    ColdframeError,
    PortUnreachableError,
    Sandbox,
    SandboxClient,
)
from tests.fixtures.ports import kept_port
from tests.fixtures.service import Service, serving
from tests.fixtures.waiting import until, wait_until

ECHO = (
    "import socket\n"
    "s = socket.create_server(('127.0.0.1', PORT))\n"
    "while True:\n"
    "    c, _ = s.accept()\n"
    "    while d := c.recv(65536): c.sendall(d)\n"
    "    c.close()\n"
)

TAKES_NOTHING = """
import socket, time
with socket.create_server(("127.0.0.1", 8151)):
    print("listening", flush=True)
    time.sleep(120)
"""
LATE = (
    "import socket, time\n"
    "s = socket.create_server(('127.0.0.1', PORT))\n"
    "c, _ = s.accept()\n"
    "n = 0\n"
    "while d := c.recv(65536): n += len(d)\n"
    "time.sleep(1)\n"
    "c.sendall(b'heard %d, said ' % n + bytes([0, 255]) * 500_000)\n"
    "c.close()\n"
)


def _serve(sandbox: Sandbox, program: str) -> int:
    with kept_port() as port:
        sandbox.files.write("/server.py", program.replace("PORT", str(port)))
        sandbox.start(["python3", "server.py"])
        wait_until(lambda: port in sandbox.listening_ports())
        return port


@pytest.fixture
def echo_port(served: Sandbox) -> int:
    """A port of the sandbox's on which what is heard is said."""
    return _serve(served, ECHO)


def _events(text: str) -> list[tuple[str, str | None, Any]]:
    found = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
        if "event" in fields:
            found.append((fields["event"], fields.get("id"), json.loads(fields["data"])))
    return found


def test_events_give_all_output_and_then_the_result(caller: httpx.Client, served: Sandbox) -> None:
    """A browser's EventSource goes on where it was, by the id of the last event."""
    served.exec("echo out; echo err >&2; exit 3", operation_id="sse-1")

    told = _events(caller.get("/v1/execs/sse-1/events").text)

    output = {
        data["stream"]: base64.b64decode(data["data"]) for name, _, data in told if name == "output"
    }
    assert output == {"stdout": b"out\n", "stderr": b"err\n"}
    assert (told[-1][0], told[-1][2]["exit_code"]) == ("result", 3)
    last = [event_id for name, event_id, _ in told if name == "output"][-1]
    assert last == "4-4"
    again = caller.get("/v1/execs/sse-1/events", headers={"Last-Event-ID": last})
    assert [name for name, _, _ in _events(again.text)] == ["result"]
    assert caller.get("/v1/execs/none/events").status_code == 404


def test_events_come_while_the_command_runs(caller: httpx.Client, served: Sandbox) -> None:
    """Who watches must not wait for the end."""
    process = served.start("echo early; read line; echo $line", stdin_open=True)
    with caller.stream("GET", f"/v1/execs/{process.operation_id}/events") as answer:
        lines = answer.iter_lines()
        assert next(lines) == "event: output"
        process.write_stdin("late\n")
        rest = "\n".join(lines)
    assert base64.b64encode(b"late\n").decode() in rest


def test_websocket_carries_both_ways(service: Service, served: Sandbox) -> None:
    """stdin, signals and output on one connection, as a terminal needs."""
    process = served.start("cat; sleep 60", stdin_open=True)
    path = service.unix.removeprefix("unix:")
    uri = f"ws://localhost/v1/execs/{process.operation_id}/attach"
    with unix_connect(path, uri, max_size=None) as tied:
        tied.send(b"\x00\xffbytes\n")
        assert tied.recv(timeout=20) == b"\x01\x00\xffbytes\n"
        for wrong in ('{"nonsense": 1}', "[" * 99_999, '{"signal": NaN}'):
            tied.send(wrong)
            assert json.loads(tied.recv(timeout=20))["error"]["code"] == "invalid_request"
        tied.send(json.dumps({"close_stdin": True}))
        tied.send(json.dumps({"signal": {"signal": 15, "scope": "tree"}}))
        ended = json.loads(tied.recv(timeout=20))["result"]
    assert (ended["reason"], ended["signal"]) == ("signal", 15)


def test_websocket_of_no_route_is_not_found(service: Service) -> None:
    """403 would send its caller to look for a key."""
    with pytest.raises(InvalidStatus) as refused:
        unix_connect(service.unix.removeprefix("unix:"), "ws://localhost/v1/nowhere")
    assert refused.value.response.status_code == 404
    assert b"'/v1/nowhere': there is no such route" in bytes(refused.value.response.body or b"")


def test_stdin_of_a_websocket_is_whole_at_the_pace_of_the_command(
    service: Service, served: Sandbox
) -> None:
    """Frames of 4 MiB to a command that reads late."""
    process = served.start("sleep 0.3; sha256sum", stdin_open=True)
    path = service.unix.removeprefix("unix:")
    uri = f"ws://localhost/v1/execs/{process.operation_id}/attach"
    data = os.urandom(4 << 20)
    with unix_connect(path, uri, max_size=None) as tied:
        tied.send(data)
        tied.send(data)
        tied.send(json.dumps({"close_stdin": True}))
        told = tied.recv(timeout=30)
        assert isinstance(told, bytes)
        assert told[1:].split()[0].decode() == hashlib.sha256(data * 2).hexdigest()


def test_terminal_is_resized_by_websocket(service: Service, served: Sandbox) -> None:
    """A window that a person makes larger."""
    process = served.start("read line; stty size", pty=(10, 20))
    path = service.unix.removeprefix("unix:")
    uri = f"ws://localhost/v1/execs/{process.operation_id}/attach"
    with unix_connect(path, uri) as tied:
        tied.send(json.dumps({"resize": {"rows": 33, "cols": 77}}))
        tied.send(b"go\n")
        got = b""
        while isinstance(piece := tied.recv(timeout=20), bytes):
            got += piece[1:]
    assert b"33 77" in got
    assert json.loads(piece)["result"]["exit_code"] == 0


def test_half_that_is_closed_leaves_the_other_open(served: Sandbox) -> None:
    """A request whose end is that of the stream is answered after it, however late."""
    with served.connect(_serve(served, LATE)) as connection:
        connection.settimeout(30)
        connection.sendall(b"\x00\xff" * 50_000)
        connection.shutdown(socket.SHUT_WR)
        got = b""
        while piece := connection.recv(1 << 16):
            got += piece
    assert got == b"heard 100000, said " + b"\x00\xff" * 500_000


def test_stop_gives_who_is_attached_the_rest_and_the_result(tmp_path: Path) -> None:
    """A terminal must not lose its last lines to a restart."""
    with serving(tmp_path, "fake") as service:
        client = SandboxClient(url=service.unix)
        sandbox = client.create_sandbox("any")
        process = sandbox.start("echo first; sleep 1; echo last")
        path = service.unix.removeprefix("unix:")
        uri = f"ws://localhost/v1/execs/{process.operation_id}/attach"
        with unix_connect(path, uri) as tied:
            assert tied.recv(timeout=20) == b"\x01first\n"
            service.process.send_signal(signal.SIGTERM)
            assert tied.recv(timeout=20) == b"\x01last\n"
            told = tied.recv(timeout=20)
            assert json.loads(told)["result"]["exit_code"] == 0
        assert service.process.wait(60) == 0
        with contextlib.suppress(ColdframeError):
            client.close()


def test_connection_to_a_port_is_an_ordinary_socket(served: Sandbox, echo_port: int) -> None:
    """Both ways at once, more than any buffer holds, and end of file."""
    data = bytes(range(256)) * 20_000
    with served.connect(echo_port) as connection:
        connection.settimeout(60)
        got = b""
        for start in range(0, len(data), 100_000):
            connection.sendall(data[start : start + 100_000])
            got += connection.recv(1 << 20)
        connection.shutdown(socket.SHUT_WR)
        while piece := connection.recv(1 << 20):
            got += piece
    assert got == data
    with kept_port() as silent, pytest.raises(PortUnreachableError):
        served.connect(silent)


@pytest.mark.parametrize("way", ["stream", "websocket"])
async def test_port_that_takes_nothing_is_let_go_when_its_client_leaves(
    service: Service, way: str
) -> None:
    """Else the connection is held as long as the sandbox."""

    def held() -> int:
        return len(list(Path(f"/proc/{service.process.pid}/fd").iterdir()))

    async with AsyncSandboxClient(url=service.unix) as client:
        sandbox = await client.create_sandbox("any")
        waits = await sandbox.start(["python3", "-c", TAKES_NOTHING])
        assert (await waits.read()).data == b"listening\n"
        before = held()
        target = f"/v1/sandboxes/{sandbox.id}/ports/8151/{way}"
        transport: asyncio.WriteTransport
        if way == "websocket":
            url = service.tcp.replace("http", "ws") + target
            socket_there = await aconnect(url, ping_interval=None)
            transport = socket_there.transport
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    while True:
                        await socket_there.send(bytes(1 << 20))
        else:
            host, _, port = service.tcp.removeprefix("http://").partition(":")
            _, writer = await asyncio.open_connection(host, int(port))
            transport = writer.transport
            head = f"POST {target} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 99999999\r\n\r\n"
            writer.write(head.encode() + bytes(1 << 25))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await writer.drain()
        assert held() > before
        # As the kernel of a client that was killed may do at once, and else does in minutes.
        linger = struct.pack("ii", 1, 0)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        transport.abort()
        await until(lambda: held() == before, within_s=60)


def test_port_is_reached_by_websocket(service: Service, served: Sandbox, echo_port: int) -> None:
    """Browsers have nothing else; frames of 4 MiB arrive whole."""
    uri = (
        f"{service.tcp.replace('http', 'ws')}/v1/sandboxes/{served.id}/ports/{echo_port}/websocket"
    )
    data = bytes(range(256)) * 16384
    with connect(uri, max_size=None) as tied:
        tied.send(data)
        got = b""
        while len(got) < len(data):
            piece = tied.recv(timeout=30)
            assert isinstance(piece, bytes)
            got += piece
        tied.send(b"")
        with pytest.raises(ConnectionClosedOK):
            tied.recv(timeout=20)
    assert got == data


async def test_a_thousand_idle_connections_are_in_nobodys_way(
    service: Service, served: Sandbox
) -> None:
    """Terminals that nobody types in; each must still hear the end."""
    process = served.start("read line; echo $line", stdin_open=True)
    uri = f"{service.tcp.replace('http', 'ws')}/v1/execs/{process.operation_id}/attach"
    before = _memory_mib(service)
    with contextlib.ExitStack() as stack:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(4096, hard)), hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        tied: list[ClientConnection] = []
        for _ in range(20):
            tied += await asyncio.gather(*(aconnect(uri, open_timeout=60) for _ in range(50)))
        assert served.exec("echo quick").text == "quick\n"
        held = _memory_mib(service) - before
        assert held < 100
        process.write_stdin("end\n")

        async def heard(one: ClientConnection) -> tuple[object, object]:
            return await one.recv(), json.loads(await one.recv())["result"]["exit_code"]

        async with asyncio.timeout(60):
            assert set(await asyncio.gather(*map(heard, tied))) == {(b"\x01end\n", 0)}
        await asyncio.gather(*(one.close() for one in tied))


def _memory_mib(service: Service) -> float:
    text = Path(f"/proc/{service.process.pid}/status").read_text()
    line = next(line for line in text.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024


def test_clients_that_do_not_read_cost_little_and_hold_nobody_up(
    service: Service, served: Sandbox
) -> None:
    """Output waits in its bounded spool, not in the memory of the service."""
    served.exec("yes | head -c 20000000 > big", operation_id="big")
    flood = served.start("cat big; sleep 60")
    host, port = service.tcp.removeprefix("http://").split(":")
    before = _memory_mib(service)
    silent = []
    for target in (
        f"/v1/execs/{flood.operation_id}/events",
        f"/v1/sandboxes/{served.id}/files?path=/big",
        f"/v1/execs/{flood.operation_id}/output/stdout?max_bytes={1 << 24}",
    ):
        for _ in range(20):
            connection = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((host, int(port)))
            connection.sendall(f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
            silent.append(connection)
    began = time.monotonic()
    for _ in range(20):
        assert served.exec("echo quick").text == "quick\n"

    assert time.monotonic() - began < 30
    assert _memory_mib(service) - before < 40 * 4
    for connection in silent:
        # A reset, as of a client that was killed.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    descriptors = Path(f"/proc/{service.process.pid}/fd")
    # Connections of clients that are gone must not stay open.
    wait_until(lambda: sum("socket" in str(_target(one)) for one in descriptors.iterdir()) <= 20)


def _target(link: Path) -> object:
    try:
        return link.readlink()
    except FileNotFoundError:
        return ""


def test_stdin_is_written_only_as_fast_as_it_is_read(
    remote: SandboxClient, served: Sandbox
) -> None:
    """A command that reads late gets all of it."""
    process = served.start("sleep 0.5; wc -c", stdin_open=True)
    process.write_stdin(b"x" * 3_000_000)
    process.close_stdin()

    assert process.wait().stdout.strip() == b"3000000"
