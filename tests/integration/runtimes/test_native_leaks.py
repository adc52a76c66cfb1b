"""Strays of every kind are found in the kernel and on the disk; a killed node is reaped."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from coldframe.host import census
from coldframe.host.gc import reap_dead_nodes
from coldframe.images.base import Image
from coldframe.images.store import ImageStore
from coldframe.protocol.ids import new_sandbox_id
from coldframe.protocol.models import SandboxSpec
from coldframe.runtimes.native import NativeRuntime
from tests.fixtures.runtime import (
    MakeSandbox,
    ground_of,
    native_runtime_in,
    spawner_of,
)
from tests.fixtures.waiting import until, wait_until


@pytest.fixture
async def watched(native_runtime: NativeRuntime, make_sandbox: MakeSandbox) -> NativeRuntime:
    """A runtime that has had a sandbox, and is asked for strays without much grace."""
    await (await make_sandbox()).destroy()
    assert await native_runtime.leaks(()) == ()
    native_runtime.leak_grace_s = 0.2
    return native_runtime


# --- strays ---------------------------------------------------------------------------


async def test_leaked_sandbox_is_described_by_cgroup_process_and_upper(
    watched: NativeRuntime, make_sandbox: MakeSandbox
) -> None:
    """The census asks the kernel, not our records."""
    sandbox = await make_sandbox()

    found = await watched.leaks(())
    kinds = {line.split(" ")[0] for line in found}

    assert {"cgroup", "process", "upper"} <= kinds
    assert all(sandbox.id in line for line in found if line.startswith(("cgroup", "upper")))
    assert await watched.leaks([sandbox.id]) == ()


async def test_leaked_cgroup_is_found_in_every_hierarchy(watched: NativeRuntime) -> None:
    """An empty one costs kernel memory for ever."""
    stray = new_sandbox_id(watched.node_id)
    for base in census.node_cgroups(watched.node_id):
        (base / stray).mkdir()
        try:
            assert await watched.leaks(()) == (f"cgroup {base / stray}",)
        finally:
            (base / stray).rmdir()


async def test_stray_upper_is_found_whatever_the_storage(
    watched: NativeRuntime, tmp_path: Path
) -> None:
    """With btrfs the storage is elsewhere, and the node's directory is looked at all the same."""
    stray = tmp_path / "nodes" / watched.node_id / "uppers" / "stray"
    stray.mkdir(parents=True)
    assert await watched.leaks(()) == ("upper stray",)
    stray.rmdir()


async def test_spare_uppers_of_a_live_node_are_no_strays_and_what_lies_beside_them_is(
    tmp_path: Path, image_store: ImageStore, busybox_image: Image
) -> None:
    """Without btrfs they lie in the node's own directory."""
    layers = image_store.layers_directory
    async with native_runtime_in(tmp_path, layers, storage="directory") as runtime:
        one = new_sandbox_id(runtime.node_id)
        await runtime.create(one, SandboxSpec(image="busybox"), busybox_image)
        uppers = tmp_path / "nodes" / runtime.node_id / "uppers"
        await until(lambda: len(list(uppers.iterdir())) > 2)
        runtime.leak_grace_s = 0.2
        assert await runtime.leaks([one]) == ()
        (uppers / "stray").mkdir()
        assert await runtime.leaks([one]) == ("upper stray",)
        (uppers / "stray").rmdir()


async def test_leaked_mount_is_found(watched: NativeRuntime, tmp_path: Path) -> None:
    """It pins whatever lies below."""
    point = tmp_path / "nodes" / watched.node_id / "uppers"
    await asyncio.to_thread(subprocess.run, ["mount", "-t", "tmpfs", "x", point], check=True)
    try:
        found = await watched.leaks(())
    finally:
        await asyncio.to_thread(subprocess.run, ["umount", point], check=True)

    assert [line for line in found if line.startswith(f"mount {point}")]
    assert await watched.leaks(()) == ()


async def test_leaked_namespace_is_found(watched: NativeRuntime, make_sandbox: MakeSandbox) -> None:
    """A descriptor keeps 230 KiB of network namespace alive without any process."""
    sandbox = await make_sandbox()
    fd = os.open(f"/proc/{sandbox.parts.created.pid}/ns/net", os.O_RDONLY)
    try:
        assert await watched.leaks([sandbox.id]) == ()
        await sandbox.destroy()
        found = await watched.leaks(())
    finally:
        os.close(fd)

    assert [line.split(" ")[0] for line in found] == ["namespace"]
    assert await watched.leaks(()) == ()


async def test_leaked_directory_and_upper_are_found(watched: NativeRuntime, tmp_path: Path) -> None:
    """Disk that nobody frees."""
    state = tmp_path / "nodes" / watched.node_id
    (state / "stray").mkdir()
    assert await watched.leaks(()) == (f"directory {state / 'stray'}",)
    (state / "stray").rmdir()

    stray = new_sandbox_id(watched.node_id)
    os.close(ground_of(watched).storage.make(stray, None))
    assert await watched.leaks(()) == (f"upper {stray}",)
    await ground_of(watched).storage.remove(stray, spawner_of(watched).remove_tree)


async def test_leaked_process_outside_every_cgroup_is_found(watched: NativeRuntime) -> None:
    """By the user namespace it lives in, wherever it has got to."""
    id_base = max(ground_of(watched).ids.all)  # nobody's yet
    script = (
        "import os,sys,ctypes; ctypes.CDLL(None).unshare(0x10000000); print('up',flush=True);"
        "sys.stdin.read()"
    )
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    await child.stdout.readline()
    uid_map = Path(f"/proc/{child.pid}/uid_map")
    await asyncio.to_thread(uid_map.write_text, f"0 {id_base} 65536")
    try:
        found = await watched.leaks(())
    finally:
        child.kill()
        await child.wait()

    assert found == (
        f"process {child.pid} with ids from {id_base:#x}, outside every cgroup of ours",
    )
    assert await watched.leaks(()) == ()


# --- kill -9 --------------------------------------------------------------------------

_CHILD = """
import asyncio, sys
from pathlib import Path
from coldframe.images.store import ImageStore
from coldframe.protocol.ids import new_operation_id, new_sandbox_id
from coldframe.protocol.models import ExecRequest, SandboxSpec
from coldframe.runtimes.native import NativeRuntime

async def main():
    home, store, node_id, storage = sys.argv[1:]
    images = ImageStore(Path(store))
    image = images.resolve("busybox")
    state = Path(home) / "nodes" / node_id
    runtime = NativeRuntime(node_id, images.layers_directory, state, storage=storage)
    await runtime.start()
    spec = SandboxSpec(image="busybox")
    made = [await runtime.create(new_sandbox_id(node_id), spec, image) for _ in range(20)]
    request = ExecRequest(command="echo x; (setsid sleep 1000 &); sleep 1000")
    running = [await one.start_exec(request, new_operation_id()) for one in made for _ in range(10)]
    for one in running:
        await one.read("stdout", 0, 10)
    print("ready", flush=True)
    while True:
        await asyncio.gather(*(
            (await one.start_exec(ExecRequest(command="true"), new_operation_id())).wait()
            for one in made))

asyncio.run(main())
"""


@pytest.mark.parametrize("storage", ["btrfs", "directory"])
async def test_gc_after_kill_of_a_node_in_the_middle_of_execs_leaves_nothing(
    storage: str, tmp_path: Path, image_store: ImageStore, busybox_image: Image
) -> None:
    """The ledger of a machine must balance whatever was killed."""
    node_id = "k" + os.urandom(3).hex()[:5]
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        _CHILD,
        str(tmp_path),
        str(image_store.root),
        node_id,
        storage,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    assert await asyncio.wait_for(child.stdout.readline(), 300) == b"ready\n"
    assert reap_dead_nodes(tmp_path) == ()

    child.kill()
    await child.wait()
    # What takes long to end, on a busy machine, is for the next call.
    await asyncio.to_thread(wait_until, lambda: not reap_dead_nodes(tmp_path))

    assert list((tmp_path / "nodes").iterdir()) == []
    assert census.node_cgroups(node_id) == []
    scope = census.Scope(node_id, tmp_path / "nodes" / node_id)
    assert census.strays(scope) == ()
    assert [pid for pid, _ in census.sandbox_processes() if _of_node(pid, node_id)] == []


def _of_node(pid: int, node_id: str) -> bool:
    named = census.sandbox_of(pid)
    return named is not None and named[0] == node_id
