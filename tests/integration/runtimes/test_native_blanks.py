"""Sandboxes half made ahead by a node: used once, accounted for, and never in the way."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from coldframe.cli import machine
from coldframe.host import blanks as blanks_module
from coldframe.host import census
from coldframe.host.gc import reap_dead_nodes
from coldframe.images.base import Image
from coldframe.images.store import ImageStore
from coldframe.protocol.ids import new_sandbox_id
from coldframe.protocol.models import SandboxSpec
from coldframe.runtimes.native import NativeRuntime
from coldframe.runtimes.native_sandbox import NativeSandbox
from tests.fixtures.runtime import native_runtime_in, run, spawner_of
from tests.fixtures.waiting import until

pytestmark = pytest.mark.root
WANTED = 4
"""How many a runtime of two workers keeps."""


async def _until_ready(runtime: NativeRuntime, count: int = WANTED) -> None:
    await until(lambda: runtime._blanks.ready >= count)


@pytest.fixture
async def stocked(native_runtime: NativeRuntime) -> AsyncIterator[NativeRuntime]:
    """A runtime whose blanks are ready."""
    await _until_ready(native_runtime)
    yield native_runtime


def _pids(runtime: NativeRuntime) -> dict[str, int]:
    """Host pid of the first process of each of its sandboxes and blanks, by id."""
    found: dict[str, int] = {}
    for pid, _ in sorted(census.sandbox_processes()):
        named = census.sandbox_of(pid)
        if named is not None and named[0] == runtime.node_id:
            found.setdefault(named[1], pid)
    return found


@contextlib.contextmanager
def _stopped(pids: tuple[int, ...]) -> Iterator[None]:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


async def _create(runtime: NativeRuntime, image: Image, sandbox_id: str | None) -> NativeSandbox:
    assert sandbox_id is not None
    return await runtime.create(sandbox_id, SandboxSpec(image=image.name), image)


async def test_blanks_are_made_when_it_is_quiet_and_are_no_leak(stocked: NativeRuntime) -> None:
    """So many and no more, one for each of the ids that are offered."""
    await asyncio.sleep(0.05)
    before = _pids(stocked)

    assert len(before) == WANTED
    assert await stocked.leaks(()) == ()
    offered = [stocked.offer_id() for _ in range(WANTED + 1)]
    assert offered[-1] is None
    assert set(offered[:-1]) == before.keys()


async def test_create_under_an_offered_id_goes_on_with_its_blank(
    stocked: NativeRuntime, busybox_image: Image
) -> None:
    """It is that very process, and another takes the blank's place."""
    before = _pids(stocked)
    offered = stocked.offer_id()
    sandbox = await _create(stocked, busybox_image, offered)

    assert sandbox.parts.created.pid == before[sandbox.id]
    assert (await run(sandbox, "echo here")).stdout == b"here\n"
    await _until_ready(stocked)
    assert await stocked.leaks([sandbox.id]) == ()
    assert len(_pids(stocked)) == WANTED + 1
    await sandbox.destroy()
    assert sandbox.id not in _pids(stocked)


async def test_blank_that_has_died_is_replaced(stocked: NativeRuntime) -> None:
    """A dead one that is offered would cost its create a second attempt."""
    before = _pids(stocked)
    for pid in before.values():
        os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        while before.keys() & {blank.sandbox_id for blank in stocked._blanks.there}:  # noqa: ASYNC110
            await asyncio.sleep(0.005)

    assert stocked.offer_id() is None
    assert await stocked.leaks(()) == ()
    stocked._blanks.create_noted()
    await _until_ready(stocked)


async def test_create_whose_blank_is_dead_makes_all_at_once(
    stocked: NativeRuntime, busybox_image: Image
) -> None:
    """Who asks for a sandbox need not know that there was something ahead."""
    pids = _pids(stocked)
    offered = stocked.offer_id()
    assert offered is not None
    with _stopped(spawner_of(stocked).pids):
        os.kill(pids[offered], signal.SIGKILL)
        creating = asyncio.ensure_future(_create(stocked, busybox_image, offered))
        await asyncio.sleep(0.01)
    sandbox = await creating

    assert sandbox.parts.created.pid != pids[offered]
    assert (await run(sandbox, "echo here")).stdout == b"here\n"
    assert await stocked.leaks([sandbox.id]) == ()


async def test_blank_whose_worker_was_killed_is_given_back(
    stocked: NativeRuntime, busybox_image: Image
) -> None:
    """One that was offered too: its id stays good."""
    offered = stocked.offer_id()
    for pid in spawner_of(stocked).pids:
        os.kill(pid, signal.SIGKILL)
    sandbox = await _create(stocked, busybox_image, offered)

    assert (await run(sandbox, "echo here")).stdout == b"here\n"
    assert await stocked.leaks([sandbox.id]) == ()
    await _until_ready(stocked)


async def test_offer_that_nobody_takes_is_withdrawn(
    stocked: NativeRuntime, busybox_image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A create may be cancelled before its turn; the blank would wait for it for ever."""
    monkeypatch.setattr(blanks_module, "_OFFER_S", 0.02)
    first, second = stocked.offer_id(), stocked.offer_id()
    assert first is not None
    async with asyncio.timeout(60):
        while first in stocked._blanks._offered:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    # The id stays good even while its blank is being ended, as it most likely is now.
    sandbox = await _create(stocked, busybox_image, first)

    assert (await run(sandbox, "echo here")).stdout == b"here\n"
    await _until_ready(stocked)
    assert second not in _pids(stocked)
    assert await stocked.leaks([sandbox.id]) == ()


async def test_burst_takes_the_blanks_and_makes_the_rest_at_once(
    stocked: NativeRuntime, busybox_image: Image
) -> None:
    """Each of them once."""
    before = _pids(stocked)
    ids = [stocked.offer_id() or new_sandbox_id(stocked.node_id) for _ in range(20)]
    made = await asyncio.gather(*(_create(stocked, busybox_image, one) for one in ids))

    pids = {one.id: one.parts.created.pid for one in made}
    assert len(set(pids.values())) == 20
    assert before.items() <= pids.items()
    assert all([(await run(one, "true")).ok for one in made])
    assert await stocked.leaks(ids) == ()


async def test_runtime_closed_while_it_makes_blanks_leaves_nothing(
    tmp_path: Path, image_store: ImageStore
) -> None:
    """At whatever moment; the fixture looks."""
    for delay_ms in (0, 2, 4, 5, 7, 12):
        async with native_runtime_in(tmp_path, image_store.layers_directory) as runtime:
            await asyncio.sleep(delay_ms / 1000)
        assert census.node_cgroups(runtime.node_id) == []


_CHILD = """
import asyncio, sys
from pathlib import Path
from coldframe.images.store import ImageStore
from coldframe.runtimes.native import NativeRuntime

async def main():
    home, store, node_id = sys.argv[1:]
    layers = ImageStore(Path(store)).layers_directory
    runtime = NativeRuntime(node_id, layers, Path(home) / "nodes" / node_id)
    await runtime.start()
    while runtime._blanks.ready < 4:
        await asyncio.sleep(0.005)
    print(*runtime._spawners.pids, flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


async def test_blanks_of_a_killed_node_are_found_and_reaped(
    tmp_path: Path, image_store: ImageStore
) -> None:
    """By the kernel's own state: nothing was written about them. While it lives, they count as
    nobody's sandbox."""
    node_id = "k" + os.urandom(3).hex()[:5]
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _CHILD, str(tmp_path), str(image_store.root), node_id),
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    workers = [int(word) for word in (await child.stdout.readline()).split()]
    assert len(workers) == 2
    cgroups = [path for base in census.node_cgroups(node_id) for path in base.iterdir()]
    ids = {path.name for path in cgroups if path.is_dir()}
    assert len(ids) == WANTED
    (view,) = (await asyncio.to_thread(machine.survey, tmp_path)).nodes
    assert (view.id, view.alive, view.sandboxes) == (node_id, True, ())

    child.send_signal(signal.SIGSTOP)  # it would clear up
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    child.kill()
    await child.wait()
    reaped = "\n".join(await asyncio.to_thread(reap_dead_nodes, tmp_path))

    assert all(one in reaped for one in ids)
    assert census.node_cgroups(node_id) == []
    assert census.strays(census.Scope(node_id, tmp_path / "nodes" / node_id)) == ()
