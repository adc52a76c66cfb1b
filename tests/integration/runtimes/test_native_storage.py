"""Where the uppers of native sandboxes lie: every kind of storage, its limits, a full disk."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
from pathlib import Path

import pytest

from coldframe.host.gc import hold_node
from coldframe.images.base import Image
from coldframe.images.store import ImageStore
from coldframe.protocol.errors import (
    CapabilityError,
    StorageFullError,
)
from coldframe.protocol.ids import new_operation_id, new_sandbox_id
from coldframe.protocol.models import ExecRequest, SandboxSpec
from coldframe.runtimes.native import NativeRuntime
from tests.fixtures.runtime import (
    native_runtime_in,
    pieces,
    run,
)

MIB = 1 << 20
STORAGES = ("btrfs", "directory", "tmpfs")


@pytest.mark.parametrize("storage", STORAGES)
async def test_every_storage_runs_limits_and_exports(
    storage: str, tmp_path: Path, image_store: ImageStore, busybox_image: Image
) -> None:
    """The seam below the runtime: one behaviour, three kinds."""
    layers = image_store.layers_directory
    async with native_runtime_in(tmp_path, layers, storage=storage) as runtime:
        assert runtime.capabilities().storage == storage
        limited = "disk" in runtime.capabilities().limits
        spec = SandboxSpec(image="busybox", disk_bytes=8 * MIB if limited else None)
        sandbox = await runtime.create(new_sandbox_id(runtime.node_id), spec, busybox_image)
        script = (
            "echo data > /kept; ln /kept /hard; ln -s /kept /link; rm /etc/passwd; rm -r /home;"
            "mkdir /home; chmod 700 /home; chown 5:6 /kept; mkfifo /fifo; dd if=/dev/zero of=/hole"
            " bs=1 count=1 seek=5000000 2>/dev/null"
        )
        assert (await run(sandbox, script)).ok
        if limited:
            with pytest.raises(StorageFullError):
                await sandbox.files.write("/big", pieces(*[os.urandom(MIB)] * 20))
            assert b"big" not in {entry.name for entry in await sandbox.files.list("/")}
            result = await run(sandbox, "head -c 20000000 /dev/urandom > /big2")
            assert not result.ok
            assert (await run(sandbox, "rm /big2; echo more > /more")).ok
        target = tmp_path / "layer"
        target.mkdir()

        await sandbox.export_upper(target)

        kept = (target / "kept").stat()
        assert (kept.st_uid, kept.st_gid, kept.st_nlink) == (5, 6, 2)
        assert (target / "hard").stat().st_ino == kept.st_ino
        assert (target / "link").readlink() == Path("/kept")
        whiteout = (target / "etc/passwd").lstat()
        assert (whiteout.st_rdev, whiteout.st_mode & 0o170000) == (0, 0o020000)
        assert os.getxattr(target / "home", "trusted.overlay.opaque") == b"y"
        assert (target / "home").stat().st_mode & 0o777 == 0o700
        hole = (target / "hole").stat()
        assert (hole.st_size, hole.st_blocks * 512 < MIB) == (5000001, True)


async def test_full_pool_fails_typed_and_recovers(
    tmp_path: Path, image_store: ImageStore, busybox_image: Image
) -> None:
    """Nothing half-written is left, nothing is lost, and room that is made is used."""
    layers = image_store.layers_directory
    options = {"storage": "btrfs", "pool_bytes": 256 * MIB}
    async with native_runtime_in(tmp_path, layers, **options) as runtime:
        spec = SandboxSpec(image="busybox")
        greedy = await runtime.create(new_sandbox_id(runtime.node_id), spec, busybox_image)
        await greedy.files.write("/precious", pieces(b"kept"))
        with pytest.raises(StorageFullError):
            await greedy.files.write("/big", pieces(*[os.urandom(MIB)] * 512))
        assert {entry.name for entry in await greedy.files.list("/")}.isdisjoint({b"big"})

        assert not (await run(greedy, "cat /dev/urandom > /fill")).ok
        with pytest.raises(StorageFullError):
            await runtime.create(new_sandbox_id(runtime.node_id), spec, busybox_image)
        with pytest.raises(StorageFullError):
            await greedy.files.tar_up("/t", greedy.files.tar_down("/"))
        assert [piece async for piece in greedy.files.read("/precious")] == [b"kept"]

        await greedy.destroy()
        other = await runtime.create(new_sandbox_id(runtime.node_id), spec, busybox_image)
        assert await other.files.write("/f", pieces(os.urandom(MIB))) == MIB


@pytest.mark.root
async def test_output_beyond_a_full_disk_is_counted_and_its_loss_is_said(
    tmp_path: Path, image_store: ImageStore, busybox_image: Image
) -> None:
    """The command is not to blame for our disk, and what is missing must not look complete."""
    spool = tmp_path / "nodes/full00/spool"
    spool.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "x", str(spool)]
    await asyncio.to_thread(subprocess.run, mount, check=True)
    runtime = NativeRuntime("full00", image_store.layers_directory, spool.parent)
    lock = hold_node(spool.parent)
    assert lock is not None
    try:
        await runtime.start()
        spec = SandboxSpec(image="busybox")
        sandbox = await runtime.create(new_sandbox_id("full00"), spec, busybox_image)
        command = "head -c 20000000 /dev/zero | tr '\\0' x; echo end >&2; exit 3"
        request = ExecRequest(command=command)
        for reads in (False, True):
            running = await sandbox.start_exec(request, new_operation_id())
            cursor, eof, dropped = 0, not reads, 0
            while not eof:
                chunk = await asyncio.wait_for(running.read("stdout", cursor, MIB), 20)
                assert set(chunk.data) <= {ord("x")}
                cursor, eof = chunk.next_cursor, chunk.eof
                dropped += chunk.dropped_bytes
            result = await running.wait()
            await running.forget()

            assert (result.exit_code, result.err.total_bytes) == (3, 4)
            assert result.stderr == b"end\n" or result.err.omitted_bytes == 4
            assert result.out.total_bytes == 20_000_000
            assert result.out.sha256 == hashlib.sha256(b"x" * 20_000_000).hexdigest()
            assert set(result.out.head) <= {ord("x")}
            assert result.out.omitted_bytes > 18_000_000
            assert not reads or dropped > 18_000_000
        assert (await run(sandbox, "echo on")).stdout == b"on\n"
    finally:
        await runtime.close()
        await asyncio.to_thread(subprocess.run, ["umount", str(spool)], check=True)
        os.close(lock)


async def test_disk_limit_on_a_storage_without_one_is_refused_with_the_remedy(
    tmp_path: Path, image_store: ImageStore, busybox_image: Image
) -> None:
    """A limit that is silently ignored fills the host's disk."""
    layers = image_store.layers_directory
    async with native_runtime_in(tmp_path, layers, storage="directory") as runtime:
        with pytest.raises(CapabilityError, match="btrfs"):
            await runtime.create(
                new_sandbox_id(runtime.node_id),
                SandboxSpec(image="busybox", disk_bytes=8 * MIB),
                busybox_image,
            )
