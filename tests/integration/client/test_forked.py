"""A forked child of a process that embeds a client: data loaders and pools do that all the time."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from coldframe.host import census, gc
from coldframe.images.base import Image
from coldframe.images.store import ImageStore

pytestmark = pytest.mark.root

_ROOT = Path(__file__).parents[3]

_PARENT = """
import asyncio, gc, multiprocessing, os, signal, sys, time
from pathlib import Path
from coldframe.images.store import ImageStore
from coldframe.node.node import Node
from coldframe.node.settings import NodeSettings
from coldframe.protocol.errors import ColdframeError
from coldframe.protocol.models import ExecRequest, SandboxSpec
from coldframe.protocol.network import NetworkPolicy

home, images, image, how = sys.argv[1:]

def use(loop, node, info, home, handle, running):
    "What a child may try with everything that it has inherited."
    for work in (
        lambda: node.exec(info.id, ExecRequest(command="true")),
        lambda: node.create_sandbox(info.spec),
        lambda: node.ledger(),
        lambda: node.runtime.create("sb-x", info.spec, node.images.resolve(image)),
        lambda: handle.destroy(),
    ):
        try:
            asyncio.new_event_loop().run_until_complete(work())
        except ColdframeError as error:
            assert error.code == "client_closed", error
            assert "forked process" in str(error), error
        else:
            raise AssertionError("a child has used its parent's node")
    for close in (node.runtime.close, node.close):
        asyncio.new_event_loop().run_until_complete(close())
    home.release()
    handle.parts.files.close()
    loop.close()

def main():
    loop = asyncio.new_event_loop()
    node = Node(NodeSettings(home=Path(home)), images=ImageStore(Path(images)))
    loop.run_until_complete(node.start())
    policy = NetworkPolicy(public=True) if "egress" in how else NetworkPolicy()
    spec = SandboxSpec(image=image, memory_bytes=1 << 28, network=policy)
    info = loop.run_until_complete(node.create_sandbox(spec))
    cat = ExecRequest(command="exec cat", stdin_open=True, status_pipe=True, operation_id="cat")
    loop.run_until_complete(node.start_exec(info.id, cat))
    big = ExecRequest(command="head -c 300000 /dev/zero", window_bytes=10, operation_id="big")
    loop.run_until_complete(node.exec(info.id, big))
    kept = {"node": node, "loop": loop, "info": info, "home": node._works.home}
    kept["handle"] = node._works.register.find(info.id).handle
    kept["running"] = node._works.operations.get("cat").running

    if "pool" in how:
        child = multiprocessing.get_context("fork").Process(
            target=lambda: use(loop, node, info, kept["home"], kept["handle"], kept["running"])
        )
        child.start()
        child.join()
        assert child.exitcode == 0, child.exitcode
    else:
        child = os.fork()
        if not child:
            signal.alarm(40)
            if "use" in how:
                use(loop, node, info, kept["home"], kept["handle"], kept["running"])
            kept.clear()
            del node, loop, info
            gc.collect()
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7

    # All goes on: commands, threads that wake the loop, kept output, open streams.
    async def goes_on():
        async with asyncio.timeout(20):
            await node.write_stdin("cat", b"still here")
            chunk = await node.read_output("cat", "stdout", 0, 100)
            assert chunk.data == b"still here", chunk
            chunk = await node.read_output("big", "stdout", 1000, 100)
            assert chunk.offset == 1000, chunk
            assert (await node.exec(info.id, ExecRequest(command="echo on"))).text.strip() == "on"
            await asyncio.to_thread(time.sleep, 0.01)
            other = await node.create_sandbox(spec)
            await node.delete(other.id)
            assert (await node.ledger()).leaks == ()
    loop.run_until_complete(goes_on())

    own = [os.fstat(one.fileno()).st_ino for one in (loop._ssock, loop._csock)]
    long = os.fork()
    if not long:
        os.close(1)
        signal.alarm(60)
        signal.pause()
    if "close" in how:
        begun = time.monotonic()
        report = loop.run_until_complete(node.close())
        assert report.failures == (), report
        print(long, node.id, time.monotonic() - begun, *own, flush=True)
    else:
        print(long, node.id, 0, *own, flush=True)
        signal.pause()

main()
"""


class Told(NamedTuple):
    """What a parent tells."""

    child: int
    """Its child that lives on."""
    node_id: str
    close_s: float
    loop_sockets: set[str]
    """Those by which asyncio wakes its loop: they are the loop's, and nobody's business."""


async def _start(home: Path, store: ImageStore, image: Image, how: str) -> Told:
    """Run a parent."""
    parent = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", _PARENT, str(home), str(store.root), image.name, how],
        stdout=subprocess.PIPE,
        cwd=_ROOT,
    )
    assert parent.stdout is not None
    timer = asyncio.get_running_loop().call_later(60, parent.kill)
    line = await asyncio.to_thread(parent.stdout.readline)
    timer.cancel()
    parent.kill()
    await asyncio.to_thread(parent.wait)
    parent.stdout.close()
    assert line, f"the parent failed: {how}"
    child, node_id, took, *pair = line.decode().split()
    return Told(int(child), node_id, float(took), {f"socket:[{inode}]" for inode in pair})


@pytest.mark.parametrize(
    "how", ["exit", "use", "pool", "use egress"], ids=lambda how: how.replace(" ", "-")
)
async def test_forked_child_disturbs_nothing_and_keeps_nothing(
    tmp_path: Path, image_store: ImageStore, busybox_image: Image, how: str
) -> None:
    """Its exit ends nothing of the parent; the death of that ends all, though the child lives."""
    told = await _start(tmp_path, image_store, busybox_image, how)
    child, node_id = told.child, told.node_id
    try:
        os.kill(child, 0)
        deadline = time.monotonic() + 20
        reaped: tuple[str, ...] = ()
        while (tmp_path / "nodes" / node_id).exists() and time.monotonic() < deadline:
            reaped += await asyncio.to_thread(gc.reap_dead_nodes, tmp_path)
        assert not (tmp_path / "nodes" / node_id).exists(), reaped
        assert not [path for path in census.node_cgroups(node_id) if path.exists()]
        scope = census.Scope(node_id, tmp_path / "nodes" / node_id)
        assert await asyncio.to_thread(census.strays, scope) == ()
        assert set(_held_of(child, tmp_path)) <= told.loop_sockets
    finally:
        os.kill(child, signal.SIGKILL)


async def test_node_closes_at_once_though_a_forked_child_lives(
    tmp_path: Path, image_store: ImageStore, busybox_image: Image
) -> None:
    """A worker that waits for its connection to end would wait for the child."""
    told = await _start(tmp_path, image_store, busybox_image, "exit close")
    try:
        os.kill(told.child, 0)
        assert told.close_s < 15
        assert not (tmp_path / "nodes" / told.node_id).exists()
    finally:
        os.kill(told.child, signal.SIGKILL)


def _held_of(pid: int, home: Path) -> list[str]:
    """What a process still holds of a node: its files, sockets, pidfds, mounts."""
    found = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        target = str(path.readlink())
        if target.startswith((str(home), "socket:", "net:", "/run/coldframe")) or target == "/":
            found.append(target)
    return found


_SYNCHRONOUS = """
import gc, multiprocessing, os, sys
from coldframe import ClientClosedError, SandboxClient

def child(client, sandbox):
    try:
        sandbox.exec("true")
    except ClientClosedError as error:
        assert "a forked process opens one of its own" in str(error)
    else:
        raise AssertionError("a child has used its parent's client")
    client.close()
    with SandboxClient(in_process=True, home=sys.argv[1]) as own:
        with own.create_sandbox("busybox") as other:
            assert other.exec("echo own").text.strip() == "own"
    del client, sandbox
    gc.collect()

with SandboxClient(in_process=True, home=sys.argv[1]) as client:
    sandbox = client.create_sandbox("busybox")
    for round in range(3):
        process = multiprocessing.get_context("fork").Process(target=child, args=(client, sandbox))
        process.start()
        process.join(60)
        assert process.exitcode == 0, process.exitcode
        assert sandbox.exec("echo on").text.strip() == "on"
    sandbox.delete()
    assert client.ledger().leaks == ()
print("ok")
"""


def test_pool_of_forked_children_each_with_a_client_of_its_own(
    tmp_path: Path, image_store: ImageStore, busybox_image: Image
) -> None:
    """They begin by copying a client whose loop runs in a thread that they do not have."""
    (tmp_path / "images").symlink_to(image_store.root)
    ended = subprocess.run(
        [sys.executable, "-c", _SYNCHRONOUS, str(tmp_path)],
        capture_output=True,
        cwd=_ROOT,
        timeout=120,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, b"ok\n"), ended.stderr.decode()
    assert list((tmp_path / "nodes").iterdir()) == []
