"""A launch takes as long as its sandbox makes it take, and only that sandbox's commands wait."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
from collections.abc import Iterable
from pathlib import Path

import pytest

from coldframe.host.spawner import Created, ExecEnd, Execution, SpawnerFault
from coldframe.host.wire import Reason, Scope
from tests.fixtures.native import (
    Native,
    held_at_its_exit,
    process_state,
    running,
    stopped_worker,
)
from tests.fixtures.waiting import wait_until

SPINNERS = "i=0; while [ $i -lt {} ]; do (while :; do :; done) & i=$((i+1)); done; echo up; wait"


async def _spin(native: Native, sandbox: Created, count: int, **changes: float) -> Execution:
    """Return once that many processes of the sandbox want all of the processor."""
    spinners = native.start(sandbox, "sh", "-c", SPINNERS.format(count), **changes)
    assert (await spinners.watch(0, 0)).stdout_total == len("up\n")
    return spinners


async def _ends(executions: Iterable[Execution]) -> list[ExecEnd | BaseException]:
    return await asyncio.gather(*(one.ended for one in executions), return_exceptions=True)


def _wait_for_joiners(native: Native, sandbox: Created) -> None:
    """Return once the worker has waited for all it began commands by: pid 1 ends after them."""
    (worker,) = native.spawner.pids
    children = Path(f"/proc/{worker}/task/{worker}/children")
    wait_until(lambda: children.read_text().split() == [str(sandbox.pid)])


async def test_signal_to_a_command_that_is_being_launched_reaches_it(native: Native) -> None:
    """It may run for a while before the worker knows: who stops it would be told that nobody is."""
    busy = await native.create(cpu_milli=100, pids=200)
    spinners = await _spin(native, busy, 20)
    own = [native.start(busy, "sleep", "100") for _ in range(6)]

    async with asyncio.timeout(60):
        reached = await asyncio.gather(*(one.signal(signal.SIGTERM, Scope.GROUP) for one in own))
        ends = await _ends(own)

    assert reached == [1] * 6
    for end in ends:
        assert isinstance(end, ExecEnd), end
        assert (end.reason, end.code) == (Reason.SIGNAL, signal.SIGTERM)
    await native.spawner.destroy(busy.sandbox_id)
    await spinners.ended


async def test_signals_to_a_command_that_is_never_executed_reach_nobody(native: Native) -> None:
    """Each is answered, and no more wait than there is room for."""
    busy = await native.create(cpu_milli=100, pids=200)
    spinners = await _spin(native, busy, 20)
    lines = [native.start(busy, "true") for _ in range(40)]
    last = native.start(busy, "not there")
    asked = [last.signal(signal.SIGTERM, Scope.TREE) for _ in range(9)]

    reached = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 60)

    assert reached[:8] == [0] * 8
    assert isinstance(reached[8], SpawnerFault)
    assert reached[8].errno == errno.EBUSY
    await native.spawner.destroy(busy.sandbox_id)
    await _ends([spinners, last, *lines])


async def test_busy_sandbox_delays_its_own_commands_only(native: Native) -> None:
    """The worker must not wait for a launch that is throttled with the sandbox it enters."""
    busy, other = await native.create(cpu_milli=100, pids=200), await native.create()
    spinners = await _spin(native, busy, 60)
    own = [native.start(busy, "true") for _ in range(12)]
    last_of_own = asyncio.ensure_future(_ends(own))

    for _ in range(50):
        assert (await native.run(other, "true")).code == 0

    assert not last_of_own.done()
    for end in await asyncio.wait_for(last_of_own, 100):
        assert isinstance(end, ExecEnd), end
        assert end.code == 0
    await native.spawner.destroy(busy.sandbox_id)
    await spinners.ended


async def test_deadline_ends_a_launch_that_is_throttled(native: Native) -> None:
    """A deadline counts from the request, whether or not the command got its turn."""
    busy = await native.create(cpu_milli=50, pids=200)
    spinners = await _spin(native, busy, 100)
    late = [native.start(busy, "sleep", "1000", deadline_s=0.5) for _ in range(3)]

    for end in await asyncio.wait_for(_ends(late), 30):
        if isinstance(end, ExecEnd):
            assert end.reason is Reason.DEADLINE
        else:
            assert isinstance(end, SpawnerFault)
            assert (end.stage, end.errno) == ("launch", errno.ETIMEDOUT)
    await native.spawner.destroy(busy.sandbox_id)
    await spinners.ended


async def test_destroy_ends_launches_under_way_and_those_in_line(native: Native) -> None:
    """None may be forgotten, or go on in memory that is used again."""
    busy, other = await native.create(cpu_milli=100, pids=400), await native.create()
    spinners = await _spin(native, busy, 100)
    waiting = [native.start(busy, "true") for _ in range(60)]

    await native.spawner.stat()
    await asyncio.wait_for(native.spawner.destroy(busy.sandbox_id), 20)

    for end in await asyncio.wait_for(_ends([spinners, *waiting]), 20):
        if isinstance(end, ExecEnd):
            assert end.reason in (Reason.SANDBOX_GONE, Reason.EXIT)
        else:
            assert isinstance(end, SpawnerFault)
            assert (end.stage, end.errno) == ("sandbox", errno.ESRCH)
    assert (await native.run(other, "echo", "ok")).stdout.data == b"ok\n"


@pytest.mark.parametrize("pty", [None, (24, 80)], ids=["pipes", "terminal"])
@pytest.mark.parametrize("dead", [False, True], ids=["exiting", "dead"])
async def test_command_for_a_sandbox_whose_end_nobody_was_told_of_is_refused_as_gone(
    native: Native, dead: bool, pty: tuple[int, int] | None
) -> None:
    """Each step of a launch fails in its own way then: none of them tells what is the matter."""
    sandbox = await native.create()
    running = native.start(sandbox, "sleep", "1000", want_started=True)
    assert running.started is not None
    last = (await running.started).host_pid
    _wait_for_joiners(native, sandbox)

    with contextlib.ExitStack() as stack:
        if not dead:
            stack.enter_context(held_at_its_exit(native.home, last))
        with stopped_worker(native):
            # First of what the worker finds, so that it does not know of the end yet.
            refused = native.start(sandbox, "true", pty=pty)
            os.kill(sandbox.pid, signal.SIGKILL)
            if dead:
                wait_until(lambda: process_state(sandbox.pid) == "Z")
            else:
                wait_until(lambda: process_state(last) == "t")
        with pytest.raises(SpawnerFault) as caught:
            await refused.ended

    assert (caught.value.stage, caught.value.errno) == ("sandbox", errno.ESRCH)
    assert (await running.ended).reason is Reason.SANDBOX_GONE


async def test_start_of_a_command_that_goes_with_its_sandbox_is_told(native: Native) -> None:
    """Whoever waits for a start must not wait for ever: it is told, or that there was none."""
    busy = await native.create(cpu_milli=100, pids=400)
    spinners = await _spin(native, busy, 100)
    waiting = [native.start(busy, "true", want_started=True) for _ in range(60)]
    await asyncio.sleep(0.3)

    await asyncio.wait_for(native.spawner.destroy(busy.sandbox_id), 20)

    ends = await asyncio.wait_for(_ends([spinners, *waiting]), 20)
    for one, end in zip(waiting, ends[1:], strict=True):
        assert one.started is not None
        assert one.started.done()
        assert (one.started.exception() is None) == isinstance(end, ExecEnd)


async def test_kill_all_ends_commands_that_are_still_in_line(native: Native) -> None:
    """Who asks for everything to be killed must not find a command running afterwards."""
    busy = await native.create(cpu_milli=100, pids=400)
    spinners = await _spin(native, busy, 60)
    waiting = [native.start(busy, "sleep", "1000") for _ in range(60)]

    await asyncio.wait_for(native.spawner.kill_all(busy.sandbox_id), 60)

    ends = await asyncio.wait_for(_ends([spinners, *waiting]), 60)
    assert all(isinstance(end, ExecEnd | SpawnerFault) for end in ends)
    assert [p.name for p in await native.spawner.processes(busy.sandbox_id)] == [b"pid1"]


async def test_more_commands_at_once_than_launches_all_run(native: Native) -> None:
    """A sandbox that is slow has its launches in line, and each still gets its own arguments."""
    busy = await native.create(cpu_milli=300, pids=400)
    spinners = await _spin(native, busy, 20)
    many = [native.start(busy, "echo", f"number {i}") for i in range(100)]

    ends = await asyncio.wait_for(_ends(many), 100)

    assert [end.stdout.data if isinstance(end, ExecEnd) else end for end in ends] == [
        f"number {i}\n".encode() for i in range(100)
    ]
    await native.spawner.destroy(busy.sandbox_id)
    await spinners.ended


async def test_descriptors_given_to_a_command_in_line_are_its_own(native: Native) -> None:
    """The request's copies are closed when it was read; a command in line needs them later."""
    busy = await native.create(cpu_milli=300, pids=400)
    spinners = await _spin(native, busy, 20)
    many = []
    for number in range(60):
        read, write = os.pipe()
        os.write(write, b"%d\n" % number)
        os.close(write)
        many.append(native.start(busy, "cat", stdin=read))
        os.close(read)

    ends = await asyncio.wait_for(_ends(many), 100)

    assert [end.stdout.data if isinstance(end, ExecEnd) else end for end in ends] == [
        b"%d\n" % number for number in range(60)
    ]
    await native.spawner.destroy(busy.sandbox_id)
    await spinners.ended


async def test_sandbox_out_of_memory_does_not_take_the_worker_along(native: Native) -> None:
    """A helper shares the worker's memory: the OOM killer must never choose it."""
    small, other = await native.create(memory_bytes=24 << 20, pids=200), await native.create()
    growers = [native.start(small, "probe", "grow", "200") for _ in range(30)]

    for end in await asyncio.wait_for(_ends(growers), 60):
        assert isinstance(end, ExecEnd | SpawnerFault), end
        assert (await native.run(other, "true")).code == 0

    assert native.lost == []


async def test_end_of_the_connection_leaves_nothing_of_launches_under_way(
    native_home: Path,
) -> None:
    """Launches go on beside the worker: what it leaves behind must still come to its end."""
    async with running(native_home) as native:
        busy = await native.create(cpu_milli=100, pids=400)
        spinners = await _spin(native, busy, 60)
        waiting = [native.start(busy, "sleep", "1000") for _ in range(40)]
        await native.spawner.stat()
    # `running` has closed it, and has found neither a process nor a cgroup left.
    assert not any(isinstance(end, ExecEnd) and end.code == 0 for end in await _ends(waiting))
    await _ends([spinners])
