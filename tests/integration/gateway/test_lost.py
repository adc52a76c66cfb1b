"""Connections that break, services that stop: nothing runs twice, and what is not known is said."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from coldframe import AsyncSandboxClient, ColdframeError, Execution, SandboxClient
from coldframe.protocol.errors import ServiceUnreachableError
from tests.fixtures.service import Service, serving

Cut = Callable[[bytes], bool]


class Faulty:
    """A proxy that breaks connections: where `cut_request` or `cut_answer` says so, once each."""

    def __init__(self, service: Service) -> None:
        self._path = service.unix.removeprefix("unix:")
        self.cut_request: Cut = lambda _: False
        self.cut_answer: Cut = lambda _: False
        self.cuts = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_unix_connection(self._path)
        ways = [
            asyncio.ensure_future(self._carry(reader, inner_writer, "cut_request")),
            asyncio.ensure_future(self._carry(inner_reader, writer, "cut_answer")),
        ]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        writer.transport.abort()
        inner_writer.transport.abort()

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str
    ) -> None:
        while data := await reader.read(1 << 16):
            if getattr(self, name)(data):
                setattr(self, name, lambda _: False)
                self.cuts += 1
                return
            writer.write(data)
            await writer.drain()


@asynccontextmanager
async def faulty(service: Service) -> AsyncIterator[tuple[Faulty, AsyncSandboxClient]]:
    """A client that reaches a service by a proxy which breaks connections."""
    proxy = Faulty(service)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, AsyncSandboxClient(url=f"http://127.0.0.1:{port}") as client:
        yield proxy, client
        proxy.cut_request = proxy.cut_answer = lambda _: False


@pytest.mark.parametrize("side", ["cut_request", "cut_answer"])
async def test_create_whose_connection_breaks_makes_one_sandbox(
    service: Service, side: str
) -> None:
    """A second one would run, and cost, until its lease ends."""
    async with faulty(service) as (proxy, client):
        before = await client.ledger()
        words = b"POST /v1/sandboxes " if side == "cut_request" else b"201 Created"
        setattr(proxy, side, lambda data: words in data)

        sandbox = await client.create_sandbox("any")

        after = await client.ledger()
        assert proxy.cuts == 1
        assert after.created - before.created == 1
        assert [one.id for one in await client.list_sandboxes()] == [sandbox.id]


@pytest.mark.parametrize("side", ["cut_request", "cut_answer"])
async def test_command_whose_connection_breaks_runs_once(service: Service, side: str) -> None:
    """By its operation id the client gets the first result."""
    async with faulty(service) as (proxy, client):
        sandbox = await client.create_sandbox("any")
        words = b"/execs?" if side == "cut_request" else b"200 OK"
        setattr(proxy, side, lambda data: words in data)

        result = await sandbox.exec("echo once >> count; cat count")

        assert (proxy.cuts, result.text) == (1, "once\n")
        assert await sandbox.files.read("/count") == b"once\n"


async def test_stream_whose_connection_breaks_loses_no_byte(service: Service) -> None:
    """From its cursor it goes on, however often."""
    async with faulty(service) as (proxy, client):
        sandbox = await client.create_sandbox("any")
        seen = 0

        def now_and_then(data: bytes) -> bool:
            nonlocal seen
            seen += b"Coldframe-Offset".lower() in data.lower()
            return seen % 3 == 2

        got = b""
        stream = sandbox.stream("for i in 1 2 3 4 5 6; do seq 1 20000; sleep 0.1; done")
        async for chunk in stream:
            proxy.cut_answer = now_and_then
            got += chunk.data

        whole = b"".join(b"%d\n" % number for number in range(1, 20001)) * 6
        assert proxy.cuts > 0
        assert got == whole


async def test_stdin_whose_connection_breaks_is_perhaps_written_and_not_sent_again(
    service: Service,
) -> None:
    """Twice the same input is another input."""
    async with faulty(service) as (proxy, client):
        sandbox = await client.create_sandbox("any")
        process = await sandbox.start("cat", stdin_open=True)
        proxy.cut_answer = lambda data: b"204 No Content" in data

        with pytest.raises(ServiceUnreachableError) as raised:
            await process.write_stdin("line\n")

        assert raised.value.execution is Execution.UNKNOWN
        await process.close_stdin()
        assert (await process.wait()).stdout == b"line\n"


async def test_file_whose_connection_breaks_is_whole_or_as_it_was(service: Service) -> None:
    """And the error says that it may be either."""
    async with faulty(service) as (proxy, client):
        sandbox = await client.create_sandbox("any")
        await sandbox.files.write("/f", "before")
        sizes = [0]

        def in_the_middle(data: bytes) -> bool:
            sizes[0] += len(data)
            return sizes[0] > 300_000

        proxy.cut_request = in_the_middle
        with pytest.raises(ServiceUnreachableError) as raised:
            await sandbox.files.write("/f", b"x" * 5_000_000)

        assert raised.value.execution is Execution.UNKNOWN
        assert await sandbox.files.read("/f") == b"before"


def test_service_that_is_not_there_is_named_with_the_remedy(tmp_path: Path) -> None:
    """Nothing was done, and the caller can tell."""
    with pytest.raises(ServiceUnreachableError, match="coldframe serve") as raised:
        SandboxClient(url=f"unix:{tmp_path}/none.sock").ledger()

    assert raised.value.execution is Execution.NOT_EXECUTED


def test_cancelled_create_leaves_nothing(service: Service) -> None:
    """Nobody knows its id, so nobody could delete it."""

    async def cancelled() -> None:
        async with AsyncSandboxClient(url=service.unix) as client:
            before = await client.ledger()
            for wait_s in (0.0, 0.001, 0.005, 0.02):
                creating = asyncio.ensure_future(client.create_sandbox("any"))
                await asyncio.sleep(wait_s)
                creating.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await (await creating).delete()
            after = await client.ledger()
            assert after.live == before.live
            assert after.balanced

    asyncio.run(cancelled())


def _wait_for(happened: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.01)


def _is_served(url: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(url.removeprefix("unix:").removeprefix("//")) == 0


def test_stop_lets_a_command_in_flight_come_to_its_end(tmp_path: Path) -> None:
    """A restart of the service must not look like a failure of the agent's."""
    with serving(tmp_path, "fake") as service:
        client = SandboxClient(url=service.unix)
        sandbox = client.create_sandbox("any")
        results = []
        command = sandbox.start("sleep 1; echo done")
        running = threading.Thread(target=lambda: results.append(command.wait()))
        running.start()
        began = time.monotonic()
        service.process.send_signal(signal.SIGTERM)
        running.join(30)
        assert service.process.wait(60) == 0
        assert time.monotonic() - began < 40
        with pytest.raises(ServiceUnreachableError):
            client.ledger()
        with contextlib.suppress(ColdframeError):
            client.close()
        assert [result.text for result in results] == ["done\n"]


def test_second_signal_does_not_wait_and_loses_no_state(tmp_path: Path) -> None:
    """Whoever is in a hurry must not have to kill, which would leave things behind."""
    with serving(tmp_path, "fake") as service:
        client = SandboxClient(url=service.unix)
        client.create_sandbox("any").start("sleep 60")
        service.process.send_signal(signal.SIGTERM)
        _wait_for(lambda: not _is_served(service.unix))
        assert service.process.poll() is None
        service.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert service.process.wait(60) == 0
        assert time.monotonic() - began < 15
        with contextlib.suppress(ColdframeError):
            client.close()


def test_sandbox_of_a_killed_client_ends_with_its_lease(service: Service) -> None:
    """Nobody else would delete it."""
    script = (
        "import os, sys\nfrom coldframe import SandboxClient\n"
        f"c = SandboxClient(url={service.unix!r})\n"
        "print(c.create_sandbox('any', ttl_s=1.5).id, flush=True)\nos.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    sandbox_id = done.stdout.strip()
    with SandboxClient(url=service.unix) as client:
        assert client.get_sandbox(sandbox_id).info.state == "ready"
        until = time.monotonic() + 30
        while (info := client.get_sandbox(sandbox_id).info).state != "deleted":
            assert time.monotonic() < until
            time.sleep(0.1)
    assert info.expired


def test_second_service_on_a_socket_is_refused_and_a_dead_ones_is_taken(tmp_path: Path) -> None:
    """A file that a killed service left must be in nobody's way; a living one's is another's."""
    with serving(tmp_path, "fake") as service:
        path = service.unix.removeprefix("unix:")
        again = subprocess.run(
            [sys.executable, "-m", "coldframe.cli.main", "serve", "--unix", path],
            env={**os.environ, "COLDFRAME_HOME": str(tmp_path / "b"), "COLDFRAME_RUNTIME": "fake"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert again.returncode == 1
        assert "another service listens there" in again.stderr
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "n.sock"))
    with serving(tmp_path, "fake") as service, SandboxClient(url=service.unix) as client:
        assert client.list_sandboxes() == ()
