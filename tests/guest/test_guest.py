"""What must hold where cgroup v2 is the only hierarchy. Runs in the guest; see docs/guest.md."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from coldframe import SandboxClient
from coldframe.host.cgroups import make_node_cgroups
from coldframe.images.base import Image
from coldframe.images.store import ImageStore
from coldframe.protocol.errors import CapabilityError
from coldframe.protocol.ids import new_node_id
from coldframe.protocol.models import ExecRequest, ExecResult, Reason
from coldframe.runtimes.base import SandboxHandle
from coldframe.runtimes.native import NativeRuntime
from coldframe.runtimes.native_sandbox import NativeSandbox
from coldframe.runtimes.self_check import run_self_check
from tests.fixtures.runtime import MakeSandbox, run

pytestmark = [pytest.mark.guest, pytest.mark.root]

MIB = 1 << 20
ROOT = Path("/sys/fs/cgroup")


async def kill_pid_one(sandbox: SandboxHandle) -> None:
    """End a sandbox as the OOM killer might."""
    assert isinstance(sandbox, NativeSandbox)
    os.kill(sandbox.parts.created.pid, signal.SIGKILL)


def cgroup_of(sandbox: NativeSandbox) -> Path:
    """The sandbox's cgroup, found by the kernel's own word."""
    for path in ROOT.rglob(sandbox.id):
        return path
    raise AssertionError(f"no cgroup of {sandbox.id}")


def drop_caches() -> None:
    """Make the next read of a file a read of the disk."""
    Path("/proc/sys/vm/drop_caches").write_text("3")


def strays() -> list[str]:
    """Sandboxes' cgroups that exist."""
    return [str(path) for path in ROOT.rglob("sb-*")]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """The kernel's view of the ledger: no sandbox before and after any test."""
    assert strays() == []
    yield
    assert strays() == []


def test_machine_has_pure_cgroup_v2() -> None:
    """Else nothing here tests what it says."""
    kinds = [line.split()[2] for line in Path("/proc/mounts").read_text().splitlines()]

    assert kinds.count("cgroup2") == 1
    assert "cgroup" not in kinds


async def test_node_in_delegated_cgroup_gets_every_controller(
    native_runtime: NativeRuntime,
) -> None:
    """Limits that are silently off let one sandbox starve a whole batch."""
    capabilities = native_runtime.capabilities()

    assert {"memory", "cpu", "pids"} <= capabilities.limits
    assert capabilities.isolation


@pytest.mark.timeout(300)
async def test_native_runtime_keeps_every_promise(
    native_runtime: NativeRuntime, debian_image: Image
) -> None:
    """The whole contract of the seam, on the cgroups and the kernel that users have."""
    report = await run_self_check(native_runtime, debian_image, end_sandbox=kill_pid_one)

    assert report.ok, str(report)
    # Space of a directory is not limited there, and the runtime says so itself; policies and
    # guards are there, so that nothing refuses them.
    assert {outcome.name for outcome in report.skipped} == {
        "directory_that_cannot_be_guarded_is_refused",
        "disk_limit_is_enforced",
        "policy_that_cannot_be_enforced_is_refused",
    }


@pytest.mark.parametrize("kind", ["btrfs", "tmpfs"])
async def test_storage_that_this_kernel_cannot_hold_is_refused_with_the_reason(
    kind: str, tmp_path: Path, debian_image: Image, image_store: ImageStore
) -> None:
    """Each create would fail with EINVAL else, and nobody would know why."""
    node_id = new_node_id()
    state = tmp_path / "nodes" / node_id
    runtime = NativeRuntime(node_id, image_store.layers_directory, state, storage=kind)

    with pytest.raises(CapabilityError, match=r"Linux 6\.15|btrfs-progs"):
        await runtime.start()

    assert not state.exists()


async def test_storage_auto_is_directories_without_a_disk_limit(
    native_runtime: NativeRuntime,
) -> None:
    """A limit that does not hold must not be stated."""
    assert native_runtime.capabilities().storage == "directory"
    assert "disk" not in native_runtime.capabilities().limits


# --- controllers --------------------------------------------------------------------------


async def test_limits_of_sandbox_stand_in_its_cgroup(make_sandbox: MakeSandbox) -> None:
    """The kernel enforces what it was told, not what we believe."""
    sandbox = await make_sandbox(memory_bytes=64 * MIB, cpu=0.5, pids=33)

    files = {
        name: (cgroup_of(sandbox) / name).read_text().split()
        for name in ("memory.max", "memory.swap.max", "cpu.max", "pids.max")
    }

    assert files["memory.max"] == [str(64 * MIB)]
    assert files["memory.swap.max"] == ["0"]
    assert int(files["cpu.max"][0]) * 2 == int(files["cpu.max"][1])
    assert files["pids.max"] == ["33"]


async def test_exec_beyond_memory_ends_as_oom_and_sandbox_lives(make_sandbox: MakeSandbox) -> None:
    """A command that ate too much is the policy's failure, and costs no other command."""
    sandbox = await make_sandbox(memory_bytes=48 * MIB)

    result = await run(sandbox, "echo begun; tail -c 200000000 /dev/zero")
    after = await run(sandbox, "echo alive")

    assert (result.reason, result.signal, result.stdout) == (Reason.OOM, signal.SIGKILL, b"begun\n")
    assert after.stdout == b"alive\n"


async def test_exec_peak_memory_is_of_its_own_tree(make_sandbox: MakeSandbox) -> None:
    """Counted by the exec's cgroup: children included, earlier execs not."""
    sandbox = await make_sandbox(memory_bytes=256 * MIB)

    large = await run(sandbox, "(head -c 60000000 /dev/zero | tail -c 60000000 >/dev/null); true")
    small = await run(sandbox, "true")

    assert large.resources.memory_peak_bytes is not None
    assert small.resources.memory_peak_bytes is not None
    assert 50 * MIB < large.resources.memory_peak_bytes < 256 * MIB
    assert 0 < small.resources.memory_peak_bytes < 30 * MIB


async def test_exec_cpu_time_counts_children_that_nobody_waited_for(
    make_sandbox: MakeSandbox,
) -> None:
    """A background child's work is the command's work, rusage alone would miss it."""
    sandbox = await make_sandbox()

    result = await run(
        sandbox,
        "i=0; (while [ $i -lt 30000 ]; do i=$((i+1)); done; echo done >/tmp/end) & "
        "while [ ! -e /tmp/end ]; do sleep 0.05; done",
    )

    assert cpu_s(result) > 0.02


async def test_exec_reads_from_disk_are_counted(make_sandbox: MakeSandbox) -> None:
    """By the exec's own cgroup, so those of a child that nobody waited for too."""
    sandbox = await make_sandbox()
    drop_caches()

    result = await run(
        sandbox,
        "(cat /bin/busybox >/dev/null; echo done >/tmp/end) & "
        "while [ ! -e /tmp/end ]; do sleep 0.05; done",
    )

    assert result.resources.read_bytes is not None
    assert result.resources.read_bytes >= MIB // 2


async def test_fork_bomb_stops_at_pids_limit(make_sandbox: MakeSandbox) -> None:
    """The machine's pids are shared by all sandboxes."""
    sandbox = await make_sandbox(pids=12)

    result = await run(sandbox, "for i in $(seq 50); do sleep 100 & done")
    highest = int((cgroup_of(sandbox) / "pids.peak").read_text())
    refused = (cgroup_of(sandbox) / "pids.events").read_text().split()

    assert not result.ok
    assert highest <= 12
    assert int(refused[refused.index("max") + 1]) > 0


async def test_cpu_limit_throttles(make_sandbox: MakeSandbox) -> None:
    """Ten busy loops under half a CPU must not take both."""
    sandbox = await make_sandbox(cpu=0.5)

    result = await run(
        sandbox, "for i in 1 2 3 4; do while :; do :; done & done; wait", deadline_s=3
    )
    stat = (cgroup_of(sandbox) / "cpu.stat").read_text().split()

    assert result.reason is Reason.DEADLINE
    assert int(stat[stat.index("nr_throttled") + 1]) > 0
    assert cpu_s(result) < 0.75 * result.duration_s


def cpu_s(result: ExecResult) -> float:
    """Seconds of CPU that the whole tree used."""
    used = result.resources
    assert used.cpu_user_s is not None
    assert used.cpu_system_s is not None
    return used.cpu_user_s + used.cpu_system_s


# --- ends ---------------------------------------------------------------------------------


async def test_deadline_empties_the_cgroup_of_the_exec(make_sandbox: MakeSandbox) -> None:
    """cgroup.kill reaches what left its session and its parent; a survivor would steal CPU."""
    sandbox = await make_sandbox()

    result = await run(
        sandbox, "echo hi; (setsid sh -c 'sleep 100 & sleep 100' &); sleep 100", deadline_s=1.0
    )

    assert (result.reason, result.stdout) == (Reason.DEADLINE, b"hi\n")
    assert await sandbox.processes() == ()
    assert result.leftovers == ()


async def test_killed_pid_one_takes_everything_along(make_sandbox: MakeSandbox) -> None:
    """What the OOM killer leaves of a sandbox is nothing, and its exec says sandbox_gone."""
    sandbox = await make_sandbox()
    running = await sandbox.start_exec(
        ExecRequest(command="echo hi; (setsid sleep 100 &); sleep 100"), "op-gone"
    )
    await running.read("stdout", 0, 3)
    await kill_pid_one(sandbox)

    result = await running.wait()

    assert (result.reason, result.stdout) == (Reason.SANDBOX_GONE, b"hi\n")
    assert (await sandbox.gone).cause == "signal 9"


def test_node_cgroups_are_made_where_pytest_has_stepped_aside() -> None:
    """A second node of one service finds the first one's leaf occupied, and must go above it."""
    made = make_node_cgroups("zzzzzz")
    try:
        assert {"memory", "cpu", "pids"} <= made.limits
        assert (made.paths["unified"] / "cgroup.controllers").read_text().split()
    finally:
        made.remove()


def test_ledger_is_balanced_after_a_batch(native_client: SandboxClient) -> None:
    """created = deleted + expired + failed + lost + live, and leaked is 0, by the kernel's word."""
    for number in range(4):
        with native_client.create_sandbox("debian:bookworm") as sandbox:
            assert sandbox.exec(f"echo {number}; sleep 100 &").stdout == f"{number}\n".encode()
    ledger = native_client.ledger()

    assert ledger.balanced, ledger
    assert (ledger.created, ledger.deleted, ledger.live, ledger.leaked) == (4, 4, 0, 0)
