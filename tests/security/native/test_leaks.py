"""What a hostile command could get hold of through the way it was started.

One test per kind of fault that container runtimes have had.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import signal
import time
from pathlib import Path

import pytest

from coldframe.host.spawner import SpawnerFault
from coldframe.host.wire import Scope
from tests.fixtures.native import Native


async def test_exec_inherits_no_descriptor_of_the_host(native: Native) -> None:
    """CVE-2024-21626: a leaked directory descriptor leads out of the root."""
    sandbox = await native.create()

    end = await native.sh(sandbox, "for f in /proc/self/fd/*; do readlink $f; done")

    assert end.stdout.data is not None
    targets = end.stdout.data.decode().splitlines()
    assert targets[0] == "/dev/null"
    assert all(re.fullmatch(r"pipe:\[\d+\]", target) for target in targets[1:3])
    assert len(targets) == 3


async def test_exec_working_directory_is_inside_the_root(native: Native) -> None:
    """CVE-2024-21626: a cwd through /proc/self/fd must not be a directory of the host's."""
    sandbox = await native.create()

    for number in range(64):
        try:
            end = await native.sh(
                sandbox, "pwd -P; ls ..", cwd=f"/proc/self/fd/{number}", deadline_s=10
            )
        except SpawnerFault as fault:
            assert fault.stage == "cwd"
        else:
            raise AssertionError((number, end.stdout.data))
    end = await native.sh(sandbox, "pwd -P", cwd="/proc/self/cwd/../../..")
    assert end.stdout.data == b"/\n"


async def test_exec_environment_is_only_what_was_given(native: Native) -> None:
    """Keys of the node's environment are worth more than a sandbox."""
    os.environ["COLDFRAME_TEST_SECRET"] = "of the node"
    try:
        sandbox = await native.create()
        end = await native.run(sandbox, "env", env=["ONLY=this", "PATH=/bin"])
    finally:
        del os.environ["COLDFRAME_TEST_SECRET"]

    assert sorted((end.stdout.data or b"").splitlines()) == [b"ONLY=this", b"PATH=/bin"]


async def test_worker_has_no_environment_and_inherits_no_descriptor(native: Native) -> None:
    """What the spawner does not have cannot leak from it."""
    inherited = os.open("/etc/hostname", os.O_RDONLY)
    os.set_inheritable(inherited, True)
    worker = native.spawner.pids[0]

    links = _descriptors(worker)

    os.close(inherited)
    assert Path(f"/proc/{worker}/environ").read_bytes() == b""  # noqa: ASYNC240
    assert not any("hostname" in link for link in links)
    assert sum(link.startswith("socket:") for link in links) == 1


def _descriptor_target(path: str) -> str:
    return str(Path(path).readlink())


def _descriptors(pid: int) -> list[str]:
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.append(str(entry.readlink()))
        except FileNotFoundError:
            continue
    return found


async def test_pid_1_offers_nothing_to_read_or_write(native: Native) -> None:
    """CVE-2019-5736: the runtime's own binary, reached through /proc, must not be writable."""
    sandbox = await native.create()
    script = (
        "for f in exe mem environ maps fd root cwd map_files auxv stack; do"
        " if cat /proc/1/$f >/dev/null 2>&1 || ls /proc/1/$f/ >/dev/null 2>&1;"
        " then echo reads $f; fi; done;"
        "echo x 2>/dev/null >/proc/1/exe && echo writes exe;"
        "echo x 2>/dev/null >/proc/1/mem && echo writes mem;"
        "readlink /proc/1/exe; readlink /proc/1/root; true"
    )

    for identity in ({}, {"uid": 1000, "gid": 1000}):
        end = await native.sh(sandbox, script, **identity)
        assert end.stdout.data == b"", identity


async def test_pid_1_cannot_be_traced(native: Native) -> None:
    """Who controls pid 1 could write the reports of exit codes."""
    sandbox = await native.create()

    end = await native.run(sandbox, "probe", "trace", "1", deadline_s=5)

    assert end.code == 1
    assert b"not permitted" in (end.stderr.data or b"")


async def test_program_runs_from_a_sealed_file(native: Native) -> None:
    """CVE-2019-5736: nothing that a sandbox does may change what the host executes next."""
    worker = native.spawner.pids[0]
    sandbox = await native.create()

    for pid in (worker, sandbox.pid):
        assert _descriptor_target(f"/proc/{pid}/exe").startswith("/memfd:coldframe-native")
    fd = os.open(f"/proc/{sandbox.pid}/exe", os.O_RDONLY)
    try:
        assert os.fstat(fd).st_mode & 0o222 == 0
    finally:
        os.close(fd)


async def test_helpers_are_never_open_to_a_watcher_inside(native: Native) -> None:
    """CVE-2016-9962: between join and execve a helper is inside, with the worker's memory."""
    sandbox = await native.create()
    watchers = [
        native.start(sandbox, "probe", "watch", "/enough", uid=uid, gid=uid) for uid in (0, 1000)
    ]
    await native.wait_for_names(sandbox, b"probe", b"probe")
    until = time.monotonic() + 1.5
    count = 0
    while time.monotonic() < until or count < 20:
        await native.run(sandbox, "true")
        count += 1
    await native.run(sandbox, "touch", "/enough")

    for watcher in watchers:
        assert (await watcher.ended).stdout.data == b"watched 1\n"


async def test_calls_that_attack_the_kernel_are_refused(native: Native) -> None:
    """The usual container profile, and none of the ways around it."""
    sandbox = await native.create()
    namespaces = ["unshare-user", "unshare-mount", "clone-user", "setns"]
    mounts = ["mount", "fsopen", "open_tree", "pivot_root", "mknod-disk", "mknod-null"]
    attacks = ["bpf", "perf", "userfaultfd", "io_uring", "keyctl", "add_key", "handle", "ambient"]
    machine = ["kexec", "init_module", "swapon", "reboot", "personality"]
    refused = [*namespaces, *mounts, *attacks, *machine]
    absent = ["clone3", "aio", "beyond", "x32"]
    families = ["vsock", "alg", "packet"]
    allowed = ["inet", "unix", "netlink", "personality-query", "mknod-fifo", "chroot"]
    expected = {
        **dict.fromkeys(refused, "EPERM"),
        **dict.fromkeys(absent, "ENOSYS"),
        **dict.fromkeys(families, "EAFNOSUPPORT"),
        **dict.fromkeys(allowed, "ok"),
    }

    end = await native.run(sandbox, "probe", "calls")

    said = dict(line.split() for line in (end.stdout.data or b"").decode().splitlines())
    if os.uname().machine != "x86_64":
        del expected["x32"]
    assert said == expected


async def test_root_inside_has_the_usual_capabilities_only(native: Native) -> None:
    """The set that container images are written for, in the bounding set too."""
    sandbox = await native.create()

    end = await native.sh(sandbox, "grep -E '^(Cap|Seccomp:|NoNewPrivs)' /proc/self/status")

    fields = dict(line.split(":\t") for line in (end.stdout.data or b"").decode().splitlines())
    usual = "00000000a80425fb"
    assert fields == {
        "CapInh": "0" * 16,
        "CapPrm": usual,
        "CapEff": usual,
        "CapBnd": usual,
        "CapAmb": "0" * 16,
        "NoNewPrivs": "0",
        "Seccomp": "2",
    }


async def test_no_new_privs_is_set_when_asked_for(native: Native) -> None:
    """Of every command of the sandbox."""
    hard = await native.create(no_new_privs=True)
    soft = await native.create()
    script = "grep NoNewPrivs /proc/self/status"

    assert (await native.sh(hard, script)).stdout.data == b"NoNewPrivs:\t1\n"
    assert (await native.sh(soft, script)).stdout.data == b"NoNewPrivs:\t0\n"


async def test_no_user_namespace_can_be_made_inside(native: Native) -> None:
    """A nested one would give every capability back; the limit holds without seccomp too."""
    sandbox = await native.create()

    end = await native.sh(
        sandbox,
        "cat /proc/sys/user/max_user_namespaces;"
        "echo 9 2>/dev/null >/proc/sys/user/max_user_namespaces || echo refused",
    )

    assert end.stdout.data == b"0\nrefused\n"


async def test_parts_of_proc_and_sys_are_masked_or_read_only(native: Native) -> None:
    """They tell of the host, or change it."""
    sandbox = await native.create()
    script = (
        "for f in kcore keys timer_list kmsg sysrq-trigger;"
        ' do [ -n "$(head -c 1 /proc/$f 2>/dev/null)" ] && echo reads $f; done;'
        "for f in /proc/sys/kernel/hostname /proc/sys/vm/drop_caches"
        " /proc/irq/default_smp_affinity /sys/kernel/mm/ksm/run;"
        " do [ -e $f ] && echo 1 2>/dev/null >$f && echo writes $f;"
        " done; ls /sys/firmware /proc/acpi /proc/scsi /proc/pressure 2>/dev/null | grep -v : ;"
        "[ -e /dev/.empty ] && echo empty is there; true"
    )

    end = await native.sh(sandbox, script)

    assert (end.stdout.data or b"").strip() == b""


async def test_only_own_processes_and_interfaces_are_visible(native: Native) -> None:
    """What is not seen is not attacked."""
    first, second = await native.create(), await native.create()
    background = native.start(first, "sleep", "100")
    await native.wait_for_names(first, b"sleep")

    end = await native.sh(second, "ls /proc | grep -c '^[0-9]'; ls /sys/class/net")

    processes, *interfaces = (end.stdout.data or b"").decode().split()
    # pid 1, the shell, ls, grep, and perhaps the helper that is just leaving
    assert int(processes) <= 5
    assert interfaces == ["lo"]
    await native.spawner.destroy(first.sandbox_id)
    await background.ended


async def test_core_dumps_are_off(native: Native) -> None:
    """A core pattern of the host's would run a program of the host's on the sandbox's data."""
    sandbox = await native.create()

    end = await native.run(sandbox, "probe", "rlimits")

    assert end.stdout.data == b"core 0 0\n"


async def test_image_whose_dev_is_a_link_is_refused(native: Native) -> None:
    """Mounting through a link of the image's would put our mounts where it wants them."""
    for name in ("dev", "proc", "sys"):
        root = native.home / f"layers/link-{name}/root"
        if not root.is_symlink() and not root.exists():
            root.mkdir(parents=True)
            (root / name).symlink_to("bin")
        try:
            await native.create(layers=[f"link-{name}/root", "base/root"])
        except SpawnerFault as fault:
            assert fault.stage in {"place", "mount points"}
        else:
            raise AssertionError(f"/{name} may be a link")
    assert native.cgroups() == []


async def test_device_nodes_of_an_image_are_dead(native: Native) -> None:
    """A layer may hold the host's disk as a device; opening it must fail."""
    root = native.home / "layers/disk/root"
    if not root.exists():
        root.mkdir(parents=True)
        os.mknod(root / "disk", 0o60666, os.makedev(8, 0))
        os.mknod(root / "zero", 0o20666, os.makedev(1, 5))
    sandbox = await native.create(layers=["disk/root", "base/root"])

    end = await native.sh(sandbox, "head -c 1 /zero; head -c 1 /disk")

    assert end.stdout.data == b""
    assert (end.stderr.data or b"").count(b"ermission denied") == 2


async def test_dev_null_replaced_inside_cannot_block_an_exec(native: Native) -> None:
    """Stdin is the sandbox's own /dev/null, which it may have made a FIFO of."""
    sandbox = await native.create()
    await native.sh(sandbox, "rm /dev/null; mkfifo /dev/null")

    end = await native.run(sandbox, "cat", deadline_s=10)

    assert (end.code, end.stdout.data) == (0, b"")


async def test_sandbox_that_stops_every_newcomer_cannot_hold_the_worker(native: Native) -> None:
    """While a command is launched the worker waits for it; a SIGSTOP then must not be for ever."""
    hostile, other = await native.create(pids=100), await native.create()
    attacker = native.start(hostile, "probe", "stop", "6", deadline_s=30)
    await native.wait_for_names(hostile, b"probe")
    victims = [native.start(hostile, "true", deadline_s=1) for _ in range(40)]

    async with asyncio.timeout(60):
        assert (await native.run(other, "true")).code == 0
        ended = await asyncio.gather(*(v.ended for v in victims), return_exceptions=True)
    for end in ended:
        if isinstance(end, SpawnerFault):
            assert (end.stage, end.errno) == ("launch", errno.ETIMEDOUT)
        else:
            assert not isinstance(end, BaseException)
    await native.spawner.destroy(hostile.sandbox_id)
    await attacker.ended
    assert native.lost == []


async def test_commands_that_resist_being_killed_gain_little_processor_time(
    native: Native,
) -> None:
    """What is killed may use more than its limit, for a while: not for as long as it likes."""
    sandbox = await native.create(cpu_milli=100)
    bases = native.config.cgroups
    hybrid = "cpu" in bases
    limit = bases["cpu" if hybrid else "unified"] / sandbox.sandbox_id
    limit /= "cpu.cfs_quota_us" if hybrid else "cpu.max"
    usual = limit.read_text()
    began = time.monotonic()
    above = 0.0

    while time.monotonic() < began + 10:
        victim = native.start(sandbox, "sleep", "100", want_started=True)
        assert victim.started is not None
        tracer = native.start(sandbox, "probe", "hold", str((await victim.started).pid))
        await tracer.watch(0, 0)
        await victim.signal(signal.SIGKILL, Scope.TREE)
        seen: float | None = None
        while not victim.ended.done():
            raised, now = limit.read_text() != usual, time.monotonic()
            if raised and seen is not None:
                above += now - seen
            seen = now if raised else None
            await asyncio.sleep(0.01)

    # Five seconds, what grows back meanwhile, and one for whoever looks at it late.
    assert 0 < above < 6 + (time.monotonic() - began) / 20


@pytest.mark.parametrize("kind", ["inotify", "queues"])
async def test_limits_per_user_of_the_kernel_are_not_shared(native: Native, kind: str) -> None:
    """Root has 128 inotify instances, and so many bytes of queues: nobody takes another's."""
    greedy, neighbour = await native.create(), await native.create()
    holder = native.start(greedy, "probe", "keep", kind, "1000")
    while not (await holder.watch(0, 0)).stdout_total:
        pass

    asked = native.start(neighbour, "probe", "keep", kind, "5")
    while not (await asked.watch(0, 0)).stdout_total:
        pass

    for sandbox in (greedy, neighbour):
        await native.spawner.kill_all(sandbox.sandbox_id)
    assert (await asked.ended).stdout.data == b"5\n"
    assert 5 <= int((await holder.ended).stdout.data or b"") < 1000


async def test_sandbox_that_kills_every_newcomer_cannot_hurt_the_worker(native: Native) -> None:
    """A helper killed at the wrong moment must not leave a command in the worker's memory."""
    hostile, other = await native.create(pids=100), await native.create()
    attacker = native.start(hostile, "sh", "-c", "trap '' TERM; while :; do kill -9 -1; done")
    await native.wait_for_names(hostile, b"sh")
    killed = 0
    for _ in range(60):
        end = await native.run(hostile, "true", deadline_s=10)
        killed += end.signalled
        assert (await native.run(other, "true")).code == 0

    assert killed > 0
    await native.spawner.destroy(hostile.sandbox_id)
    await attacker.ended
