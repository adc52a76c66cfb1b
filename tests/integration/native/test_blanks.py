"""Sandboxes half made ahead: what PREPARE makes, CREATE goes on with."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from coldframe.host.spawner import Created, SpawnerFault
from coldframe.protocol.errors import SpawnerLostError
from tests.fixtures.native import ID_BASE, Native, create_steps, running, whole

IDS = ID_BASE + 65536 * 1000


async def _prepare(native: Native, name: str = "ahead", **options: Any) -> str:
    sandbox_id = f"sb-{native.node_id}-{name}"
    await native.spawner.prepare(sandbox_id, IDS, **options)
    return sandbox_id


async def _create(native: Native, sandbox_id: str, **changes: Any) -> Created:
    return await native.create(sandbox_id=sandbox_id, id_base=IDS, **changes)


@pytest.mark.parametrize("step", create_steps())
async def test_blank_failing_at_a_step_leaves_nothing_behind(native: Native, step: str) -> None:
    """Each step is done either ahead or with the rest, and must clear up in both."""
    before = await native.counts()
    ahead = True
    try:
        sandbox_id = await _prepare(native, inject=step)
    except SpawnerFault as fault:
        caught = fault
    else:
        ahead = False
        with pytest.raises(SpawnerFault) as failed:
            await _create(native, sandbox_id, inject=step)
        caught = failed.value

    assert (caught.errno, caught.stage) == (errno.EIO, step)
    assert ahead == _is_early(step)
    assert native.cgroups() == []
    assert native.processes() == []
    assert await native.counts() == before


def _is_early(step: str) -> bool:
    """Whether it needs neither image nor limits."""
    steps = create_steps()
    at = steps.index(step)
    by_worker, by_pid_1 = steps.index("layers"), steps.index("hostname")
    return at < by_worker or steps.index("namespace") <= at < by_pid_1


async def test_sandbox_made_of_a_blank_is_as_any_other(native: Native) -> None:
    """Whatever is asked for at CREATE must hold, though the sandbox was there before."""
    sandbox = await _create(
        native,
        await _prepare(native),
        hostname="late",
        shm_bytes=3 << 20,
        pids=20,
        memory_bytes=32 << 20,
        cpu_milli=500,
    )

    end = await native.sh(
        sandbox,
        "hostname; cat /proc/1/comm; df -k /dev/shm | tail -1 | tr -s ' ' | cut -d' ' -f2; id -u;"
        "cat /proc/self/uid_map",
    )
    assert end.stdout.data is not None
    lines = end.stdout.data.decode().splitlines()
    assert lines[:4] == ["late", "pid1", str(3 << 10), "0"]
    assert lines[4].split() == ["0", str(IDS), "65536"]
    hog = await native.run(sandbox, "probe", "grow", "100")
    assert hog.oom_kills > 0
    bomb = await native.sh(sandbox, "for i in $(seq 40); do sleep 1 & done; wait")
    assert b"fork" in whole(bomb.stderr)


def _namespace(pid: int, kind: str) -> int:
    return Path(f"/proc/{pid}/ns/{kind}").stat().st_ino


def _name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text()


async def test_sandboxes_made_of_blanks_share_no_namespace(native: Native) -> None:
    """Each blank becomes one sandbox."""
    first = await _create(native, await _prepare(native, "first"))
    await native.spawner.prepare("second", IDS + 65536)
    second = await native.create(sandbox_id="second", id_base=IDS + 65536)
    third = await native.create()

    for kind in first.namespaces:
        assert _namespace(first.pid, kind) == first.namespaces[kind]
        inodes = {one.namespaces[kind] for one in (first, second, third)}
        assert len(inodes | {_namespace(os.getpid(), kind)}) == 4


async def test_blank_takes_nothing_but_its_create(native: Native) -> None:
    """Nobody has it yet: it runs no command, and cannot be had with other ids."""
    sandbox_id = await _prepare(native)
    (pid,) = native.processes()
    blank = Created(sandbox_id, pid, -1, -1, {})
    assert _name(pid) == "blank\n"

    with pytest.raises(SpawnerFault) as caught:
        await native.run(blank, "true")
    assert caught.value.errno == errno.ESRCH
    for request in (native.spawner.kill_all, native.spawner.processes, native.spawner.make_socket):
        with pytest.raises(SpawnerFault) as caught:
            await request(sandbox_id)
        assert caught.value.errno == errno.ESRCH
    with pytest.raises(SpawnerFault) as caught:
        await native.create(sandbox_id=sandbox_id, id_base=IDS + 65536)
    assert (caught.value.errno, caught.value.stage) == (errno.EEXIST, "sandbox")
    with pytest.raises(SpawnerFault) as caught:
        await _prepare(native)
    assert (caught.value.errno, caught.value.stage) == (errno.EEXIST, "sandbox")

    await native.spawner.destroy(sandbox_id)
    assert native.cgroups() == []
    assert native.processes() == []


async def test_blank_that_dies_is_told_and_its_id_can_be_used_again(native: Native) -> None:
    """A machine out of memory may kill it; whoever was to have it needs another."""
    sandbox_id = await _prepare(native)
    os.kill(native.processes()[0], signal.SIGKILL)
    await native.gone_event.wait()
    assert [gone.sandbox_id for gone in native.gone] == [sandbox_id]

    with pytest.raises(SpawnerFault) as caught:
        await _create(native, sandbox_id)
    assert (caught.value.errno, caught.value.stage) == (errno.EEXIST, "sandbox")
    await native.spawner.destroy(sandbox_id)

    sandbox = await _create(native, sandbox_id)
    assert (await native.run(sandbox, "true")).code == 0


async def test_worker_killed_leaves_no_process_of_its_blanks(native_home: Path) -> None:
    """They wait for a word that will never come."""
    async with running(native_home) as native:
        await _prepare(native)
        creating = asyncio.ensure_future(native.spawner.prepare("next", IDS + 65536))
        await asyncio.sleep(0)
        os.kill(native.spawner.pids[0], signal.SIGKILL)
        with contextlib.suppress(SpawnerLostError):  # the worker may have been faster
            await creating
        async with asyncio.timeout(60):
            while native.processes():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert sorted(native.lost) == ["next", f"sb-{native.node_id}-ahead"]
        for path in native.cgroups():
            for below in [*path.iterdir(), path]:
                if below.is_dir():
                    below.rmdir()
