"""A process that has no descriptor left loses an answer, not a worker and all its sandboxes."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import select
import signal
from pathlib import Path

import pytest

from coldframe.host.spawner import Keep, Spawner, SpawnerFault
from coldframe.host.workers import connect_all
from coldframe.protocol.errors import CapacityError, Execution
from tests.fixtures.descriptors import room_for
from tests.fixtures.native import Native, running
from tests.fixtures.waiting import until

BIG = "head -c 300000 /dev/zero"


def nulls(pid: int) -> int:
    """How many descriptors of a process are of /dev/null: a worker's in numbers that it keeps."""
    return [path.readlink() for path in Path(f"/proc/{pid}/fd").iterdir()].count(Path("/dev/null"))


def unused(pid: int) -> int:
    """The number that a process's next descriptor will have."""
    taken = {int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir()}
    return next(number for number in range(len(taken) + 1) if number not in taken)


def count() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("more", [0, 1], ids=["none", "half"])
async def test_end_without_room_fails_its_exec_alone(native: Native, more: int) -> None:
    """Every sandbox of the worker would be lost with its connection."""
    sandbox = await native.create()
    before = count()
    both = f"{BIG}; {BIG} >&2"
    with room_for(more):
        big = native.start(sandbox, "/bin/sh", "-c", both)
        small = native.start(sandbox, "/bin/echo", "there")
        with pytest.raises(CapacityError, match=r"RLIMIT_NOFILE is .*ulimit -n") as caught:
            await big.ended
        end = await small.ended

    assert caught.value.execution is Execution.EXECUTED
    assert end.stdout.data == b"there\n"
    assert native.lost == []
    assert count() == before
    again = await native.sh(sandbox, BIG)
    assert again.stdout.total == 300000
    again.close()
    assert count() == before


async def test_create_without_room_leaves_nothing(native: Native) -> None:
    """Its root went astray on the way, and nobody else could end it."""
    before = count()
    with (
        room_for(0),
        pytest.raises(CapacityError, match="descriptor left") as caught,
    ):
        await native.create()

    assert caught.value.execution is Execution.NOT_EXECUTED
    (stat,) = await native.spawner.stat()
    assert stat.sandboxes == 0
    assert native.cgroups() == []
    assert count() == before


async def test_create_without_room_whose_worker_ends_says_that_there_was_no_room(
    native: Native,
) -> None:
    """The one is known, and then the other, before whoever asked for it goes on."""
    (worker,) = native.spawner._workers
    with room_for(0):
        creating = asyncio.ensure_future(native.create(keep=Keep(b"")))
        await asyncio.sleep(0)
        select.select([worker.link._sock], [], [], 20)
        worker.link._sock.send(b"\xff" * 64)  # which makes it end, and all that it has made
        select.select([worker.pidfd], [], [], 20)
        with pytest.raises(CapacityError, match="descriptor left"):
            await creating

    assert not native.spawner.pids


async def test_terminal_without_room_says_that_the_command_was_executed(native: Native) -> None:
    """It must not be run again by whoever reads 'capacity'."""
    sandbox = await native.create()
    before = count()
    with room_for(0):
        execution = native.start(
            sandbox, "/bin/sh", "-c", "sleep 0.3; echo on; exit 3", pty=(24, 80), want_started=True
        )
        assert execution.started is not None
        with pytest.raises(CapacityError, match="terminal") as caught:
            await execution.started
        end = await execution.ended

    assert caught.value.execution is Execution.EXECUTED
    assert (end.code, end.stdout.data) == (3, b"on\r\n")
    assert count() == before


async def test_output_without_room_can_be_asked_for_again(native: Native) -> None:
    """The command goes on; only this look at it failed."""
    sandbox = await native.create()
    execution = native.start(sandbox, "/bin/sh", "-c", "echo there; sleep 30")
    with room_for(1), pytest.raises(CapacityError):
        await execution.output()

    spools = await execution.output()
    progress = await execution.watch(0, 0)
    assert os.pread(spools.stdout_fd, 100, 0) == b"there\n"
    assert progress.stdout_total == 6
    os.close(spools.stdout_fd)
    os.close(spools.stderr_fd)


async def test_worker_without_room_refuses_a_request_and_lives(native: Native) -> None:
    """Its other sandboxes need no descriptor to go on; a request that brings some is not done."""
    sandbox = await native.create()
    waiting = native.start(sandbox, "/bin/sleep", "1000", want_started=True)
    assert waiting.started is not None
    await waiting.started
    (pid,) = native.spawner.pids
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    reading, writing = os.pipe()
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(SpawnerFault) as caught:
            await native.run(sandbox, "cat", stdin=reading)
        assert (caught.value.errno, caught.value.stage) == (errno.EMFILE, "descriptors")
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        os.close(reading)
        os.close(writing)

    assert native.lost == []
    assert await waiting.signal(signal.SIGTERM) == 1
    assert (await waiting.ended).code == signal.SIGTERM
    assert (await native.sh(sandbox, "echo on")).stdout.data == b"on\n"


async def test_worker_without_room_is_taken_over_all_the_same(
    native_home: Path, tmp_path: Path
) -> None:
    """Commands that go on alone may take its last descriptors: no daemon could come back."""
    async with running(native_home, sockets=tmp_path) as native:
        (pid,) = native.spawner.pids
        before = nulls(pid)
        await native.spawner.leave()
        await until(lambda: nulls(pid) == before + 2, within_s=20)
        limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (unused(pid), limits[1]))
        socks, _ = connect_all(tmp_path)
        native.spawner = Spawner(native.config, gone=lambda _: None, lost=lambda _: None)
        async with asyncio.timeout(20):
            await native.spawner.attach(socks)

        assert native.spawner.pids == (pid,)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        sandbox = await native.create()
        assert (await native.sh(sandbox, "echo on")).stdout.data == b"on\n"
