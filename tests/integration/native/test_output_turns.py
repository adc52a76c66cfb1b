"""Output of one sandbox against everything else that a worker has to do.

The worker is stopped while pipes and its socket fill, so that it finds all of it in one turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

from coldframe.host.spawner import Execution, Started
from coldframe.host.wire import Reason
from tests.fixtures.native import Created, Native, process_state, stopped_worker

PIPE_BYTES = 65536
STARTING_S = 1.0
"""So long after the start of another command a worker holds floods back."""


def _exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@contextlib.asynccontextmanager
async def _pipe() -> AsyncIterator[tuple[int, int]]:
    ends = os.pipe()
    try:
        yield ends
    finally:
        for end in ends:
            os.close(end)


async def _read(fd: int, count: int) -> None:
    """Read as many bytes of a pipe, without holding the loop."""
    async with asyncio.timeout(20):
        while count:
            count -= len(await asyncio.to_thread(os.read, fd, count))


async def _writers(
    native: Native, sandbox: Created, count: int, size: int, go: int, wrote: int
) -> list[Execution]:
    """Commands that write once when told so, then say so and stay."""
    script = f"read x; head -c {size} /dev/zero; echo x >&3; sleep 100"
    started = [
        native.start(sandbox, "sh", "-c", script, stdin=go, status=wrote, want_started=True)
        for _ in range(count)
    ]
    for execution in started:
        assert execution.started is not None
        await execution.started
    return started


async def test_request_is_answered_before_output_that_came_earlier(native: Native) -> None:
    """A sandbox that floods its pipes would make every neighbour's command wait for them."""
    sandbox = await native.create()
    order: list[str] = []
    async with _pipe() as (go, go_write), _pipe() as (wrote, wrote_write):
        flooders = await _writers(native, sandbox, 10, PIPE_BYTES, go, wrote_write)
        watched = [asyncio.ensure_future(one.watch(0, 0)) for one in flooders]
        for future in watched:
            future.add_done_callback(lambda _: order.append("output"))
        await native.spawner.stat()
        with stopped_worker(native):
            os.write(go_write, b"x\n" * len(flooders))
            await _read(wrote, 2 * len(flooders))
            # Asked as directly as the others, so that all are done in the order of their answers.
            asked = asyncio.ensure_future(native.spawner.processes(sandbox.sandbox_id))
            asked.add_done_callback(lambda _: order.append("request"))
            await asyncio.sleep(0)
        await asyncio.gather(asked, *watched)

    assert order[0] == "request"


async def _until_reported(sandbox: Created, *pids: int) -> None:
    """Return once pid 1 has reaped these and reported it; the worker need not answer for this."""
    async with asyncio.timeout(20):
        while any(map(_exists, pids)) or process_state(sandbox.pid) != "S":  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_request_is_answered_between_reports_of_a_sandboxes_dead(native: Native) -> None:
    """A sandbox whose processes die all the time must not keep the worker to itself."""
    sandbox = await native.create()
    order: list[str] = []
    async with _pipe() as (go, go_write):
        started = [
            native.start(sandbox, "sh", "-c", "read x", stdin=go, want_started=True)
            for _ in range(150)
        ]
        pids = []
        for execution in started:
            assert execution.started is not None
            pids.append((await execution.started).host_pid)
        ended = [asyncio.ensure_future(_end(one)) for one in started]
        for future in ended:
            future.add_done_callback(lambda _: order.append("end"))
        await native.spawner.stat()
        with stopped_worker(native):
            os.write(go_write, b"x\n" * len(started))
            await _until_reported(sandbox, *pids)
            asked = asyncio.ensure_future(native.spawner.processes(sandbox.sandbox_id))
            asked.add_done_callback(lambda _: order.append("request"))
            await asyncio.sleep(0)
        await asyncio.gather(asked, *ended)

    assert order.index("request") <= 64


async def _end(execution: Execution) -> None:
    await execution.ended


async def test_sandboxes_take_turns_however_many_streams_each_has(native: Native) -> None:
    """Ten commands of one sandbox must not be read ten times as often as one of another."""
    many, one = await native.create(), await native.create()
    order: list[str] = []
    async with _pipe() as (go, go_write), _pipe() as (wrote, wrote_write):
        flooders = await _writers(native, many, 10, PIPE_BYTES, go, wrote_write)
        async with _pipe() as (later, later_write):
            (neighbour,) = await _writers(native, one, 1, 10, later, wrote_write)
            watched = []
            for name, execution in [*(("many", f) for f in flooders), ("one", neighbour)]:
                future = asyncio.ensure_future(execution.watch(0, 0))
                future.add_done_callback(lambda _, name=name: order.append(name))
                watched.append(future)
            await native.spawner.stat()
            with stopped_worker(native):
                os.write(go_write, b"x\n" * len(flooders))
                await _read(wrote, 2 * len(flooders))
                os.write(later_write, b"x\n")
                await _read(wrote, 2)
            await asyncio.gather(*watched)

    assert order.index("one") <= 3  # of eleven


async def test_end_takes_what_was_written_until_then_and_no_more(native: Native) -> None:
    """A leftover that keeps writing could hold an end, and would add to its output."""
    sandbox = await native.create()
    # A shell's background job has no input of its own: <&0 would be /dev/null.
    script = (
        "exec 7<&0; (read x <&7; head -c 65536 /dev/zero; echo x >&3; exec cat /dev/zero) & "
        "exec sleep 100"
    )
    async with _pipe() as (go, go_write), _pipe() as (wrote, wrote_write):
        execution = native.start(
            sandbox, "sh", "-c", script, stdin=go, status=wrote_write, want_started=True
        )
        assert execution.started is not None
        started: Started = await execution.started
        with stopped_worker(native):
            os.write(go_write, b"x\n")
            await _read(wrote, 2)
            os.kill(started.host_pid, signal.SIGTERM)
            await _until_reported(sandbox, started.host_pid)
        result = await execution.ended

    assert (result.reason, result.stdout.total) == (Reason.SIGNAL, PIPE_BYTES)
    assert len(result.leftovers) == 1
    result.close()


async def test_flood_of_leftovers_is_read_at_a_bounded_rate(native: Native) -> None:
    """What nobody waits for any more must take no core of the worker, nor be blocked for ever."""
    sandbox = await native.create()
    burst, rate = 2 << 20, 2 << 20
    script = "cat /dev/zero & cat /dev/zero >&2 &"
    began = time.monotonic()
    execution = native.start(sandbox, "sh", "-c", script, spool_bytes=1 << 16)
    end = await execution.ended
    before = taken = end.stdout.total + end.stderr.total

    async with asyncio.timeout(30):
        while taken < before + burst + rate:
            await asyncio.sleep(0.05)
            spools = await execution.output()
            taken = spools.progress.stdout_total + spools.progress.stderr_total
            os.close(spools.stdout_fd)
            os.close(spools.stderr_fd)

    assert taken - before <= burst + rate * (time.monotonic() - began)
    end.close()


async def _written(execution: Execution) -> int:
    return (await execution.mark()).stdout_total


async def test_flood_has_the_smaller_share_while_commands_start(native: Native) -> None:
    """What writes without end takes the processors that short commands of others need."""
    noisy, quiet = await native.create(), await native.create()
    script = "cat /dev/zero"
    flood = native.start(noisy, "sh", "-c", script, spool_bytes=1 << 20, want_started=True)
    assert flood.started is not None
    await flood.started
    seen = 0
    while seen < 16 << 20:
        seen = (await flood.watch(seen, 0)).stdout_total

    alone, beside = [], []
    async with asyncio.timeout(100):
        while len(beside) < 3:
            alone.append(await _rate(flood))  # what its own start was holds nothing back
            started = time.monotonic()
            (await native.start(quiet, "true").ended).close()
            rate = await _rate(flood)
            if time.monotonic() - started < STARTING_S:  # else the machine was too busy
                beside.append(rate)
            await asyncio.sleep(started + STARTING_S - time.monotonic())

    assert 0 < min(beside) < max(alone) / 4


async def _rate(flood: Execution) -> float:
    """Bytes per second that it writes now."""
    before, began = await _written(flood), time.monotonic()
    await asyncio.sleep(0.3)
    return (await _written(flood) - before) / (time.monotonic() - began)


async def test_leftover_goes_on_writing_though_nobody_asks_the_worker_anything(
    native: Native,
) -> None:
    """Its turn comes when its time has come, not when something else happens."""
    sandbox = await native.create()
    async with _pipe() as (go, go_write), _pipe() as (wrote, wrote_write):
        script = "exec 7<&0; (read x <&7; head -c 6291456 /dev/zero; echo x >&3) &"
        execution = native.start(sandbox, "sh", "-c", script, stdin=go, status=wrote_write)
        end = await execution.ended
        os.write(go_write, b"x\n")
        await _read(wrote, 2)

    assert len(end.leftovers) == 1
    end.close()
