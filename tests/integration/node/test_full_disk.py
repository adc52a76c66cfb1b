"""A node whose uppers lie on a disk that others fill: nothing is lost unsaid, and it goes on."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from coldframe.gateway.health import HealthCheck
from coldframe.host import orphans
from coldframe.images.base import Image
from coldframe.images.store import ImageStore
from coldframe.node.node import Node
from coldframe.node.settings import NodeSettings
from coldframe.protocol.errors import StorageFullError
from coldframe.protocol.models import (
    EventKind,
    ExecRequest,
    SandboxInfo,
    SandboxSpec,
    StorageEvent,
)
from coldframe.runtimes.native import NativeRuntime
from tests.fixtures.disks import MIB, break_pool, fill, pools_of, small_disk
from tests.fixtures.restart import Services, accounted
from tests.fixtures.runtime import ground_of
from tests.fixtures.waiting import until_asked, wait_until

GIB = 1 << 30
pytestmark = pytest.mark.root


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Where a node of this home has its pool."""
    with small_disk(tmp_path / "pools", 2 * GIB) as path:
        yield path


async def _run(node: Node, info: SandboxInfo, command: str) -> tuple[int | None, bytes]:
    result = await node.exec(info.id, ExecRequest(command=command))
    return result.exit_code, result.stdout + result.stderr


async def _told(node: Node, cursor: str, info: SandboxInfo, text: str) -> StorageEvent:
    """Return the first event whose reason has this in it."""
    async with asyncio.timeout(30):
        while True:
            page = await node.events(cursor, wait=True, kind=EventKind.STORAGE)
            for event in page.events:
                assert (event.sandbox_id, event.storage is None) == (info.id, False)
                if event.storage is not None and text in event.storage.reason:
                    return event.storage
            cursor = page.next_cursor


async def test_sandbox_cannot_write_on_a_nearly_full_disk_and_is_told(
    disk: Path, native_node: Node, spec: SandboxSpec
) -> None:
    """A write that is taken and lost is worse than one that fails."""
    begin = (await native_node.events(kind=EventKind.STORAGE)).next_cursor
    info = await native_node.create_sandbox(spec)
    taken = await asyncio.to_thread(fill, disk, 500 * MIB)
    writing = "i=0; while dd if=/dev/urandom of=/f$i bs=1M count=4; do i=$((i+1)); done"
    code, said = await _run(native_node, info, f"{writing}; sync; echo > /more")
    assert code == 1
    assert b"quota exceeded" in said
    assert not (await _told(native_node, begin, info, "make room")).writable
    with pytest.raises(StorageFullError, match="make room"):
        await native_node.create_sandbox(spec)
    with pytest.raises(StorageFullError, match="make room"):
        await HealthCheck(native_node, 0.0).latest()
    ledger = await native_node.ledger()
    assert (ledger.created, ledger.failed) == (1, 0)  # what was refused was never created

    after = (await native_node.events(kind=EventKind.STORAGE)).next_cursor
    taken.unlink()
    assert (await _told(native_node, after, info, "")).writable
    assert await _run(native_node, info, "echo more > /more") == (0, b"")
    assert (await native_node.create_sandbox(spec)).id != info.id


async def _until_made(node: Node, spec: SandboxSpec) -> SandboxInfo:
    made: list[SandboxInfo] = []

    async def there() -> bool:
        try:
            made.append(await node.create_sandbox(spec))
        except StorageFullError:
            return False
        return True

    await until_asked(there)
    return made[0]


async def test_node_whose_pool_broke_goes_on_with_another_and_so_does_the_next(
    tmp_path: Path, image_store: ImageStore, spec: SandboxSpec, disk: Path
) -> None:
    """Nobody needs to end a node, and what is in it, because its disk was full once."""
    settings = NodeSettings(home=tmp_path)
    node = Node(settings, images=image_store, outlive=True)
    await node.start()

    async def pools_are(number: int) -> bool:
        return pools_of(node.id) == number

    try:
        runtime = node.runtime
        assert isinstance(runtime, NativeRuntime)
        old = await node.create_sandbox(spec)
        assert await _run(node, old, "echo data > /kept; sync") == (0, b"")
        begin = (await node.events(kind=EventKind.STORAGE)).next_cursor
        upper = ground_of(runtime).storage.open(old.id)
        await asyncio.to_thread(break_pool, disk, upper)
        os.close(upper)

        assert not (await _told(node, begin, old, "can only be read")).writable
        new = await _until_made(node, spec)
        assert await _run(node, new, "echo more > /more") == (0, b"")

        daemon = await node.leave()
        node = Node(settings, images=image_store, outlive=True, daemon=daemon)
        await node.start()
        assert await _run(node, old, "cat /kept") == (0, b"data\n")
        assert await _run(node, new, "echo >> /more; cat /more") == (0, b"more\n\n")
        code, said = await _run(node, old, "echo > /new")
        assert code == 1
        assert b"can't create" in said
        assert (await node.create_sandbox(spec, operation_id="third")).id != new.id
        assert await pools_are(2)

        await node.delete(old.id)
        await until_asked(lambda: pools_are(1))
        ledger = await node.ledger()
        assert (ledger.balanced, ledger.live, ledger.leaked) == (True, 2, 0)
        assert (await node.close()).failures == ()
        await until_asked(lambda: pools_are(0))
        assert list((tmp_path / "nodes").iterdir()) == []
    finally:
        orphans.end_left(tmp_path)


def test_service_that_is_killed_on_a_full_disk_is_followed_by_another(
    tmp_path: Path, image_store: ImageStore, busybox_image: Image
) -> None:
    """Its sandboxes run: who could not start again before room is made would lose their work."""
    with (
        small_disk(tmp_path / "disk", 2 * GIB) as disk,
        accounted(Services(disk, image_store.root)) as services,
    ):
        services.start()
        with services.client() as client, client.create_sandbox(busybox_image.name) as sandbox:
            sandbox.exec("echo data > /kept; sync")
            taken = fill(disk, 2 * MIB)
            services.kill()
            services.start()

            assert sandbox.exec("cat /kept").stdout == b"data\n"
            assert b"quota exceeded" in sandbox.exec("echo > /more").stderr
            with pytest.raises(StorageFullError, match="make room"):
                client.create_sandbox(busybox_image.name)
            taken.unlink()
            wait_until(lambda: sandbox.exec("echo > /more").ok)
