"""Making and ending native sandboxes: faults at every step, lost workers."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from coldframe.host import census
from coldframe.host.gc import reap_dead_nodes
from coldframe.host.idranges import FIRST_ID
from coldframe.host.spawner import CreateSpec, ExecSpec
from coldframe.images.base import Image
from coldframe.images.store import ImageStore
from coldframe.node import sandboxes as node_sandboxes
from coldframe.node.node import Node
from coldframe.node.settings import NodeSettings
from coldframe.protocol.errors import (
    ColdframeError,
    CreateError,
    InvalidRequestError,
    SandboxGoneError,
    SpawnerLostError,
)
from coldframe.protocol.ids import new_operation_id, new_sandbox_id
from coldframe.protocol.models import ExecRequest, Reason, SandboxSpec
from coldframe.runtimes.native import NativeRuntime
from tests.fixtures.native import create_steps
from tests.fixtures.runtime import (
    MakeSandbox,
    fail_at,
    ground_of,
    native_runtime_in,
    open_descriptors,
    run,
    spawner_of,
)

MIB = 1 << 20


# --- create ---------------------------------------------------------------------------


async def test_create_that_fails_at_any_step_leaves_nothing(
    native_runtime: NativeRuntime, make_sandbox: MakeSandbox, busybox_image: Image
) -> None:
    """What a failed create leaves behind is found by nobody, a thousand times a day."""
    await (await make_sandbox()).destroy()
    steps = create_steps()
    assert len(steps) > 5
    spec = SandboxSpec(image="busybox")
    before = open_descriptors()

    for step in steps:
        fail_at(native_runtime, step)
        with pytest.raises(CreateError, match="was not made"):
            await native_runtime.create(new_sandbox_id(native_runtime.node_id), spec, busybox_image)
        assert await native_runtime.leaks(()) == (), step
        assert open_descriptors() - before == set(), step

    sandbox = await native_runtime.create(
        new_sandbox_id(native_runtime.node_id), spec, busybox_image
    )
    assert (await run(sandbox, "true")).ok


async def test_create_cancelled_leaves_nothing(
    native_runtime: NativeRuntime, make_sandbox: MakeSandbox, busybox_image: Image
) -> None:
    """Clients give up at any moment."""
    await (await make_sandbox()).destroy()
    spec = SandboxSpec(image="busybox")
    before = open_descriptors()

    for turns in range(25):
        sandbox_id = new_sandbox_id(native_runtime.node_id)
        creating = asyncio.ensure_future(native_runtime.create(sandbox_id, spec, busybox_image))
        for _ in range(turns):
            await asyncio.sleep(0)
        creating.cancel()
        await asyncio.wait([creating])

    await native_runtime.destroy_all()
    assert await native_runtime.leaks(()) == ()
    assert open_descriptors() - before == set()


async def test_create_of_what_cannot_be_is_typed_and_leaves_nothing(
    native_runtime: NativeRuntime, busybox_image: Image
) -> None:
    """One clear sentence, and the sandbox does not exist."""

    async def create(image: Image, **spec: object) -> None:
        await native_runtime.create(
            new_sandbox_id(native_runtime.node_id), SandboxSpec(image="x", **spec), image
        )

    missing = Image("gone", "d", ("no-such-layer",), busybox_image.config)
    with pytest.raises(CreateError):
        await create(missing)
    with pytest.raises(InvalidRequestError):
        await create(Image("empty", "d", (), busybox_image.config))
    with pytest.raises(InvalidRequestError):
        await create(busybox_image, workdir="relative")
    with pytest.raises(InvalidRequestError):
        await create(busybox_image, env={"A=B": "c"})

    assert await native_runtime.leaks(()) == ()


async def test_runtime_starts_and_closes_twice_and_two_live_side_by_side(
    tmp_path: Path, image_store: ImageStore, busybox_image: Image
) -> None:
    """Several clients of one machine each run their own node."""
    layers = image_store.layers_directory
    async with (
        native_runtime_in(tmp_path, layers) as one,
        native_runtime_in(tmp_path, layers) as two,
    ):
        await one.start()
        spec = SandboxSpec(image="busybox")
        first = await one.create(new_sandbox_id(one.node_id), spec, busybox_image)
        second = await two.create(new_sandbox_id(two.node_id), spec, busybox_image)
        assert first.parts.id_base != second.parts.id_base
        assert reap_dead_nodes(tmp_path) == ()
        assert (await run(first, "true")).ok
        assert (await run(second, "true")).ok
        assert await one.leaks([first.id]) == ()
        await one.close()
        await one.close()
        assert (await run(second, "true")).ok


# --- workers that die -----------------------------------------------------------------


async def test_killed_worker_takes_its_sandboxes_and_is_replaced(
    native_runtime: NativeRuntime, make_sandbox: MakeSandbox
) -> None:
    """The spawner may be killed by anything; the node goes on."""
    sandboxes = [await make_sandbox() for _ in range(6)]
    request = ExecRequest(command="echo before; sleep 1000")
    running = [await one.start_exec(request, new_operation_id()) for one in sandboxes]
    read = await asyncio.gather(*(one.read("stdout", 0, 100) for one in running[:4]))
    assert {chunk.data for chunk in read} == {b"before\n"}
    short = ExecRequest(command="true")
    busy = [await one.start_exec(short, new_operation_id()) for one in sandboxes for _ in range(34)]

    victims = list(spawner_of(native_runtime).pids)
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    gone = await asyncio.wait_for(asyncio.gather(*(one.gone for one in sandboxes)), 20)

    assert {one.cause for one in gone} == {"spawner lost"}
    ends = await asyncio.gather(*(one.wait() for one in busy), return_exceptions=True)
    assert all(isinstance(end, SpawnerLostError) or end.ok for end in ends)
    for one in running[:4]:
        result = await one.wait()
        assert (result.reason, result.stdout) == (Reason.INFRASTRUCTURE, b"before\n")
    for one in running[4:]:
        with pytest.raises(SpawnerLostError) as caught:
            await one.wait()
        assert caught.value.execution == "perhaps_executed"
    with pytest.raises(SandboxGoneError):
        await run(sandboxes[0], "true")
    for one in sandboxes:
        await one.destroy()
    assert await native_runtime.leaks(()) == ()

    sandbox = await make_sandbox()
    assert (await run(sandbox, "echo again")).stdout == b"again\n"
    assert not set(spawner_of(native_runtime).pids) & set(victims)


async def test_close_ends_though_workers_answer_no_more(
    tmp_path: Path, image_store: ImageStore, busybox_image: Image
) -> None:
    """A trainer must come to its end; what a stopped worker never ends is ended without it."""
    settings = NodeSettings(home=tmp_path)
    node = Node(settings, images=image_store)
    await node.start()
    runtime = node.runtime
    assert isinstance(runtime, NativeRuntime)
    runtime.end_patience_s = 1.0
    infos = [await node.create_sandbox(SandboxSpec(image=busybox_image.name)) for _ in range(4)]
    await node.start_exec(infos[0].id, ExecRequest(command="sleep 1000"))
    stopped = spawner_of(runtime).pids[0]
    os.kill(stopped, signal.SIGSTOP)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node_sandboxes, "END_PATIENCE_S", 1.0)
        report = await asyncio.wait_for(node.close(), 60)

    assert report.failures
    assert all("did not end within 1 s" in failure for failure in report.failures)
    assert not [path for path in census.node_cgroups(node.id) if path.exists()]
    assert not Path(f"/proc/{stopped}").exists()  # noqa: ASYNC240


async def test_worker_killed_during_creates_leaves_nothing(
    native_runtime: NativeRuntime, make_sandbox: MakeSandbox
) -> None:
    """Half-made sandboxes are the hardest to find."""
    await make_sandbox()
    for _ in range(3):
        creating = [asyncio.ensure_future(make_sandbox()) for _ in range(20)]
        await asyncio.wait(creating, return_when=asyncio.FIRST_COMPLETED)
        for pid in spawner_of(native_runtime).pids:
            os.kill(pid, signal.SIGKILL)
        outcomes = await asyncio.gather(*creating, return_exceptions=True)
        failures = [one for one in outcomes if isinstance(one, BaseException)]
        assert all(isinstance(one, ColdframeError) for one in failures)
        await native_runtime.destroy_all()
        assert await native_runtime.leaks(()) == ()


async def test_pidfd_kept_by_us_after_destroy_does_not_end_the_worker(
    native_runtime: NativeRuntime, busybox_image: Image
) -> None:
    """The worker watches the same open file; a watch that outlives its sandbox crashed it."""
    spawner = spawner_of(native_runtime)
    for number in range(10):
        sandbox_id = new_sandbox_id(native_runtime.node_id)
        upper = ground_of(native_runtime).storage.make(sandbox_id, None)
        layers = [f"{layer}/root" for layer in busybox_image.layers]
        made = await spawner.create(
            CreateSpec(sandbox_id, layers, FIRST_ID + number * 65536, "kept", upper=upper)
        )
        os.close(upper)
        try:
            assert (await spawner.exec(ExecSpec(sandbox_id, ["/bin/true"])).ended).code == 0
            await spawner.destroy(sandbox_id)
            await spawner.stat()
        finally:
            os.close(made.root_fd)
            os.close(made.pidfd)
        await ground_of(native_runtime).storage.remove(sandbox_id, spawner.remove_tree)

    assert len(spawner.pids) == 2
