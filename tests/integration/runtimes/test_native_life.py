"""Making and ending native sandboxes: faults at every step, lost workers, strays of every kind."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coldframe.host import census
from coldframe.host.gc import hold_node, reap_dead_nodes
from coldframe.host.idranges import FIRST_ID
from coldframe.host.spawner import CreateSpec, ExecSpec
from coldframe.images.base import Image
from coldframe.images.store import ImageStore
from coldframe.node import sandboxes as node_sandboxes
from coldframe.node.node import Node
from coldframe.node.settings import NodeSettings
from coldframe.protocol.errors import (
    CapabilityError,
    ColdframeError,
    CreateError,
    InvalidRequestError,
    SandboxGoneError,
    SpawnerLostError,
    StorageFullError,
)
from coldframe.protocol.ids import new_operation_id, new_sandbox_id
from coldframe.protocol.models import ExecRequest, Reason, SandboxSpec
from coldframe.runtimes.native import NativeRuntime
from tests.fixtures.runtime import (
    MakeSandbox,
    fail_at,
    ground_of,
    native_runtime_in,
    open_descriptors,
    require_root,
    run,
    spawner_of,
)
from tests.fixtures.waiting import wait_until

MIB = 1 << 20
STORAGES = ("btrfs", "directory", "tmpfs")


@pytest.fixture
async def watched(native_runtime: NativeRuntime, make_sandbox: MakeSandbox) -> NativeRuntime:
    """A runtime that has had a sandbox, and is asked for strays without much grace."""
    await (await make_sandbox()).destroy()
    assert await native_runtime.leaks(()) == ()
    native_runtime.leak_grace_s = 0.2
    return native_runtime


async def pieces(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


# --- create ---------------------------------------------------------------------------


async def test_create_that_fails_at_any_step_leaves_nothing(
    native_runtime: NativeRuntime, make_sandbox: MakeSandbox, busybox_image: Image
) -> None:
    """What a failed create leaves behind is found by nobody, a thousand times a day."""
    await (await make_sandbox()).destroy()
    assert len(spawner_of(native_runtime).steps) > 5
    spec = SandboxSpec(image="busybox")
    before = open_descriptors()

    for step in spawner_of(native_runtime).steps:
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


async def test_output_beyond_a_full_disk_is_counted_and_its_loss_is_said(
    tmp_path: Path, image_store: ImageStore, busybox_image: Image
) -> None:
    """The command is not to blame for our disk, and what is missing must not look complete."""
    require_root()
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
