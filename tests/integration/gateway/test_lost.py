"""Connections that break, services that stop: nothing runs twice, and what is not known is said."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, cast

import pytest

from coldframe import AsyncSandboxClient, ColdframeError, Execution, SandboxClient
from coldframe.client._content import AsyncContent, Content
from coldframe.protocol.errors import ServiceUnreachableError
from tests.fixtures.faults import EXECUTED, POINTS, Fault, faulty, faulty_in_thread
from tests.fixtures.service import Service, serving
from tests.fixtures.waiting import wait_until


@pytest.fixture(params=["tcp", "unix"])
def socket_path(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    """Where the proxy listens: a unix socket, or TCP."""
    return tmp_path / "p.sock" if request.param == "unix" else None


@pytest.mark.parametrize("point", POINTS)
async def test_create_whose_connection_breaks_makes_one_sandbox(
    service: Service, point: str, socket_path: Path | None
) -> None:
    """A second one would run, and cost, until its lease ends."""
    async with faulty(service, socket_path) as (proxy, client):
        before = await client.ledger()
        proxy.fault = Fault(b"POST /v1/sandboxes ", point)

        sandbox = await client.create_sandbox("any")

        after = await client.ledger()
        assert proxy.fault.cuts == 1
        assert after.created - before.created == 1
        assert [one.id for one in await client.list_sandboxes()] == [sandbox.id]


@pytest.mark.parametrize("start", [False, True])
@pytest.mark.parametrize("point", POINTS)
async def test_command_whose_connection_breaks_runs_once(
    service: Service, point: str, start: bool, socket_path: Path | None
) -> None:
    """By its operation id the client gets the first result."""
    async with faulty(service, socket_path) as (proxy, client):
        sandbox = await client.create_sandbox("any")
        proxy.fault = Fault(b"/execs?", point)

        if start:
            result = await (await sandbox.start("echo once >> count; cat count")).wait()
        else:
            result = await sandbox.exec("echo once >> count; cat count")

        assert (proxy.fault.cuts, result.text) == (1, "once\n")
        assert await sandbox.files.read("/count") == b"once\n"


@pytest.mark.parametrize("point", POINTS)
async def test_delete_whose_connection_breaks_deletes_once(service: Service, point: str) -> None:
    """It is asked again, and one that is gone is fine."""
    async with faulty(service) as (proxy, client):
        sandbox = await client.create_sandbox("any")
        before = await client.ledger()
        proxy.fault = Fault(b"DELETE /v1/sandboxes/", point)

        await sandbox.delete()

        after = await client.ledger()
        assert proxy.fault.cuts == 1
        assert after.deleted - before.deleted == 1


@pytest.mark.parametrize("point", POINTS)
async def test_delete_by_name_whose_connection_breaks_is_known_to_be_done(
    service: Service, point: str
) -> None:
    """By then nothing is called so, or something else."""
    async with faulty(service) as (proxy, client):
        sandbox = await client.create_sandbox("any", name="mine")
        proxy.fault = Fault(b"DELETE /v1/sandboxes/mine", point)

        await client.delete_sandbox("mine")

        assert proxy.fault.cuts == 1
        assert (await sandbox.refresh()).state == "deleted"


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("what", ["create", "exec"])
async def test_connection_that_breaks_every_time_is_perhaps_executed_and_at_most_once(
    service: Service, what: str, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who gives up must not say that nothing happened, and must not have done it six times."""
    monkeypatch.setattr("coldframe.client._calls._PAUSES_S", (0.01,) * 5)
    async with faulty(service) as (proxy, client):
        sandbox = await client.create_sandbox("any")
        await sandbox.files.write("/count", "")
        before = await client.ledger()
        words = b"POST /v1/sandboxes " if what == "create" else b"/execs?"
        proxy.fault = Fault(words, point, times=6)

        with pytest.raises(ServiceUnreachableError) as raised:
            if what == "create":
                await client.create_sandbox("any")
            else:
                await sandbox.exec("echo once >> count")

        assert raised.value.execution is Execution.UNKNOWN
        assert proxy.fault.cuts == 6
        proxy.fault = None
        made = (await client.ledger()).created - before.created
        written = await sandbox.files.read("/count")
        done = point in EXECUTED
        assert (made, written) == (
            (int(done), b"") if what == "create" else (0, b"once\n" if done else b"")
        )
        for other in await client.list_sandboxes():
            await other.delete()


async def test_stream_whose_connection_breaks_loses_no_byte(service: Service) -> None:
    """From its cursor it goes on, however often."""
    async with faulty(service) as (proxy, client):
        sandbox = await client.create_sandbox("any")
        stream = sandbox.stream("for i in 1 2 3 4 5 6; do seq 1 20000; sleep 0.1; done")
        got, faults = b"", []
        async for chunk in stream:
            got += chunk.data
            if proxy.fault is None or proxy.fault.cuts:
                proxy.fault = Fault(b"/output/", POINTS[len(faults) % len(POINTS)])
                faults.append(proxy.fault)

        whole = b"".join(b"%d\n" % number for number in range(1, 20001)) * 6
        assert sum(fault.cuts for fault in faults) > 0
        assert got == whole


@pytest.mark.parametrize("point", POINTS)
async def test_stdin_whose_connection_breaks_is_written_once_or_said_to_be_perhaps(
    service: Service, point: str, socket_path: Path | None
) -> None:
    """Twice the same input is another input; of half of it nobody knows how much arrived."""
    data = b"0123456789\n" * 20_000
    async with faulty(service, socket_path) as (proxy, client):
        sandbox = await client.create_sandbox("any")
        process = await sandbox.start("cat", stdin_open=True)
        proxy.fault = Fault(b"/stdin", point)

        if point == "in body":
            with pytest.raises(ServiceUnreachableError) as raised:
                await process.write_stdin(data)
            assert raised.value.execution is Execution.UNKNOWN
        else:
            await process.write_stdin(data)

        assert proxy.fault.cuts == 1
        await process.close_stdin()
        written = (await process.wait()).stdout
        assert data.startswith(written)
        assert (len(written) < len(data)) is (point == "in body")


def _in_file(content: bytes, directory: Path) -> BinaryIO:
    path = directory / "content"
    path.write_bytes(b"before" + content)
    file = path.open("rb")
    file.seek(len(b"before"))
    return file


LARGE = b"0123456789abcdef" * 300_000
_PIECES = [LARGE[at : at + (1 << 20)] for at in range(0, len(LARGE), 1 << 20)]
SOURCES: dict[str, Callable[[Path], AsyncContent]] = {
    "bytes": lambda _: LARGE,
    "file": lambda directory: _in_file(LARGE, directory),
    "pieces": lambda _: _PIECES,
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("point", POINTS)
async def test_large_content_whose_connection_breaks_is_sent_again_and_written_once(
    service: Service, point: str, source: str, tmp_path: Path
) -> None:
    """Whatever its source, if it can be read again: from where it began, and not from its file's
    first byte."""
    async with faulty(service) as (proxy, client):
        sandbox = await client.create_sandbox("any")
        proxy.fault = Fault(b"PUT ", point)

        assert await sandbox.files.write("/d/f", SOURCES[source](tmp_path)) == len(LARGE)

        assert proxy.fault.cuts == 1
        assert await sandbox.files.read("/d/f") == LARGE
        assert [one.name for one in await sandbox.files.list("/d")] == [b"f"]


@pytest.mark.parametrize("source", SOURCES)
def test_large_content_of_a_synchronous_caller_is_sent_again(
    service: Service, source: str, tmp_path: Path
) -> None:
    """Its source is read in the thread of the caller."""
    with faulty_in_thread(service) as (proxy, url), SandboxClient(url=url) as client:
        sandbox = client.create_sandbox("any")
        proxy.fault = Fault(b"PUT ", "in body")
        content = cast(Content, SOURCES[source](tmp_path))

        assert sandbox.files.write("/f", content) == len(LARGE)

        assert proxy.fault.cuts == 1
        assert sandbox.files.read("/f") == LARGE


@pytest.mark.parametrize("what", ["upload", "upload_tree", "tar_up"])
async def test_tree_or_file_whose_connection_breaks_is_sent_again(
    service: Service, what: str, tmp_path: Path
) -> None:
    """What is there to be read again has no end that is not known."""
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "f").write_bytes(LARGE)
    async with faulty(service) as (proxy, client):
        files = (await client.create_sandbox("any")).files
        proxy.fault = Fault(b"PUT ", "in body")

        if what == "upload":
            await files.upload(tmp_path / "tree" / "f", "/d/f")
        elif what == "upload_tree":
            await files.upload_tree(tmp_path / "tree", "/d")
        else:
            with tarfile.open(tmp_path / "tar", "w") as tar:
                tar.add(tmp_path / "tree" / "f", "f")
            await files.tar_up("/d", (tmp_path / "tar").open("rb"))

        assert proxy.fault.cuts == 1
        assert await files.read("/d/f") == LARGE


@pytest.mark.parametrize("point", POINTS)
async def test_content_that_cannot_be_read_again_is_whole_or_as_it_was(
    service: Service, point: str, socket_path: Path | None
) -> None:
    """And the error says that it may be either."""
    async with faulty(service, socket_path) as (proxy, client):
        sandbox = await client.create_sandbox("any")
        await sandbox.files.write("/d/f", "before")
        proxy.fault = Fault(b"PUT ", point)

        with pytest.raises(ServiceUnreachableError) as raised:
            await sandbox.files.write("/d/f", iter(_PIECES))

        assert raised.value.execution is Execution.UNKNOWN
        assert proxy.fault.cuts == 1
        wanted = LARGE if point in EXECUTED else b"before"
        assert await sandbox.files.read("/d/f") == wanted
        assert [one.name for one in await sandbox.files.list("/d")] == [b"f"]


@pytest.mark.parametrize("point", POINTS)
async def test_small_file_whose_connection_breaks_is_written_once(
    service: Service, point: str, socket_path: Path | None
) -> None:
    """It is sent again; what others wrote meanwhile is not written over by that."""
    async with faulty(service, socket_path) as (proxy, client):
        sandbox = await client.create_sandbox("any")
        proxy.fault = Fault(b"PUT ", point)

        assert await sandbox.files.write("/d/f", b"x" * 10) == 10

        assert proxy.fault.cuts == 1
        assert await sandbox.files.read("/d/f") == b"x" * 10
        assert [one.name for one in await sandbox.files.list("/d")] == [b"f"]


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
        wait_until(lambda: not _is_served(service.unix))
        assert service.process.poll() is None
        service.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert service.process.wait(60) == 0
        assert time.monotonic() - began < 25
        with contextlib.suppress(ColdframeError):
            client.close()


def test_sandbox_of_a_killed_client_ends_with_its_lease(service: Service) -> None:
    """Nobody else would delete it."""
    script = (
        "import os, sys\nfrom coldframe import SandboxClient\n"
        f"c = SandboxClient(url={service.unix!r})\n"
        "print(c.create_sandbox('any', ttl_s=4).id, flush=True)\nos.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    sandbox_id = done.stdout.strip()
    with SandboxClient(url=service.unix) as client:
        assert client.get_sandbox(sandbox_id).info.state == "ready"
        wait_until(lambda: client.get_sandbox(sandbox_id).info.state == "deleted")
        assert client.get_sandbox(sandbox_id).info.expired


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
        assert "another node serves" in again.stderr
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "n.sock"))
    with serving(tmp_path, "fake") as service, SandboxClient(url=service.unix) as client:
        assert client.list_sandboxes() == ()
