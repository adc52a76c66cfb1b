"""Sandboxes come and go, and nothing of them stays behind."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from coldframe.host import gc
from coldframe.host.reaping import reap_cgroups
from coldframe.host.spawner import Created, SpawnerFault
from coldframe.host.wire import GoneCause, Reason
from coldframe.protocol.errors import SpawnerLostError
from tests.fixtures.native import (
    ID_BASE,
    Native,
    build_probe,
    cgroup_bases,
    create_steps,
    held_at_its_exit,
    running,
    whole,
)
from tests.fixtures.waiting import until_asked


@pytest.mark.parametrize("step", create_steps())
async def test_create_failing_at_a_step_leaves_nothing_behind(native: Native, step: str) -> None:
    """Each step of create may fail on a full machine; a leak there grows with every retry."""
    before = await native.counts()

    with pytest.raises(SpawnerFault) as caught:
        await native.create(inject=step, memory_bytes=64 << 20, pids=50, cpu_milli=1000)

    assert (caught.value.errno, caught.value.stage) == (errno.EIO, step)
    assert native.cgroups() == []
    assert native.processes() == []
    assert await native.counts() == before


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """A program for pid 1 that ends at once with the number of its standard descriptors."""
    build_probe(tmp_path / "pid1")
    return tmp_path / "pid1"


async def test_pid_1_starts_with_standard_descriptors_and_its_end_is_told(
    native_home: Path, stand_in: Path
) -> None:
    """Its ids are mapped while it is executed: it may look like setuid to its libc.

    Which then opens what is closed of these three or crashes: one create in 4,500 failed so.
    """
    async with running(native_home, init_binary=stand_in) as native:
        with pytest.raises(SpawnerFault) as caught:
            await native.create()

    assert (caught.value.stage, caught.value.errno) == ("pid 1", errno.ECHILD)
    assert "it ended by exit code 3" in str(caught.value)


def _own_namespace(kind: str) -> int:
    return Path(f"/proc/self/ns/{kind}").stat().st_ino


async def test_sandbox_has_namespaces_and_root_of_its_own(native: Native) -> None:
    """Root inside is not root outside, and no namespace is shared."""
    first, second = await native.create(), await native.create()

    for kind, inode in first.namespaces.items():
        assert inode != _own_namespace(kind)
        assert inode != second.namespaces[kind]
    end = await native.sh(first, "id -u; hostname; cat /proc/self/uid_map")
    assert end.stdout.data is not None
    inside, host, ids = end.stdout.data.decode().splitlines()
    assert (inside, host) == ("0", "host1")
    assert int(ids.split()[1]) == ID_BASE + 65536


async def test_upper_holds_the_sandboxes_own_ids(native: Native, tmp_path: Path) -> None:
    """Sealing, forking and exporting an upper need no shifting of ids."""
    fd = os.open(tmp_path, os.O_DIRECTORY)
    sandbox = await native.create(upper=fd)
    os.close(fd)

    await native.sh(sandbox, "echo x >/made; chown 1000:100 /made; rm /bin/yes; mkdir /d")

    assert ((tmp_path / "upper/made").stat().st_uid, (tmp_path / "upper/made").stat().st_gid) == (
        1000,
        100,
    )
    assert (tmp_path / "upper/d").stat().st_uid == 0
    assert (native.home / "layers/base/root/bin/yes").is_symlink()


async def test_layers_stack_top_first(native: Native) -> None:
    """The upper of two layers hides the lower one's files."""
    top = native.home / "layers/top/root"
    if not top.exists():
        (top / "etc").mkdir(parents=True)
        (top / "etc/which").write_text("top\n")
        below = native.home / "layers/below/root"
        (below / "etc").mkdir(parents=True)
        (below / "etc/which").write_text("below\n")
        (below / "etc/only").write_text("only\n")
    sandbox = await native.create(layers=["top/root", "below/root", "base/root"])

    end = await native.sh(sandbox, "cat /etc/which /etc/only")

    assert end.stdout.data == b"top\nonly\n"


async def test_layer_outside_the_layers_directory_is_refused(native: Native) -> None:
    """A name must never lead out, whoever wrote it."""
    for name in ("../..", "/etc", "base/root/../../.."):
        with pytest.raises(SpawnerFault) as caught:
            await native.create(layers=[name])
        assert caught.value.stage == "layers"


async def test_destroy_removes_every_process_and_cgroup(native: Native) -> None:
    """What is deleted is gone, also what had daemonised itself."""
    sandbox = await native.create(memory_bytes=64 << 20, pids=100, cpu_milli=500)
    await native.sh(sandbox, "for i in 1 2 3; do setsid sleep 100 & done")

    await native.spawner.destroy(sandbox.sandbox_id)

    assert native.cgroups() == []
    assert native.processes() == []
    with pytest.raises(SpawnerFault) as caught:
        await native.run(sandbox, "true")
    assert caught.value.errno == errno.ENOENT


async def test_pid_1_killed_from_outside_ends_execs_and_raises_gone(native: Native) -> None:
    """A sandbox that dies by itself must never look like one that hangs."""
    sandbox = await native.create()
    execution = native.start(sandbox, "sh", "-c", "echo so far; sleep 100")
    while not (await execution.watch(0, 0)).stdout_total:
        pass

    os.kill(sandbox.pid, signal.SIGKILL)

    end = await execution.ended
    assert (end.reason, end.stdout.data) == (Reason.SANDBOX_GONE, b"so far\n")
    await native.gone_event.wait()
    assert [(g.sandbox_id, g.cause, g.code) for g in native.gone] == [
        (sandbox.sandbox_id, GoneCause.SIGNAL, signal.SIGKILL)
    ]
    await native.spawner.destroy(sandbox.sandbox_id)


async def test_pid_1_cannot_be_ended_from_inside(native: Native) -> None:
    """An agent that kills everything must not end its own episode."""
    sandbox = await native.create()

    await native.sh(sandbox, "for s in 1 2 3 9 11 15 17 19; do kill -$s 1; done; kill -9 -1")

    assert (await native.sh(sandbox, "echo alive")).stdout.data == b"alive\n"


async def test_memory_limit_ends_the_hog_as_oom(native: Native) -> None:
    """The policy's own doing, told apart from a kill of ours and from a crash."""
    sandbox = await native.create(memory_bytes=32 << 20)

    end = await native.run(sandbox, "probe", "grow", "100")

    assert (end.reason, end.code) == (Reason.OOM, signal.SIGKILL)
    assert end.oom_kills >= 1
    again = await native.sh(sandbox, "kill -9 $$")
    assert (again.reason, again.oom_kills) == (Reason.SIGNAL, 0)


async def test_hog_below_a_shell_that_lives_on_is_oom(native: Native) -> None:
    """`sh -c` that forks tells of it by 137: as an exit it would look like the program's own."""
    sandbox = await native.create(memory_bytes=32 << 20)

    end = await native.sh(sandbox, "probe grow 100; exit $?")

    assert (end.reason, end.code) == (Reason.OOM, 137)
    again = await native.sh(sandbox, "exit 137")
    assert (again.reason, again.code) == (Reason.EXIT, 137)
    survived = await native.sh(sandbox, "probe grow 100; exit 3")
    assert (survived.reason, survived.code, survived.oom_kills > 0) == (Reason.EXIT, 3, True)


async def test_what_connections_hold_counts_as_memory(native: Native) -> None:
    """Version 1 leaves it out unless asked: one small sandbox would take gigabytes of the host."""
    sandbox = await native.create(memory_bytes=32 << 20)

    holder = native.start(sandbox, "probe", "keep", "filled", "1000")
    with suppress(SpawnerFault):  # version 2 kills for it, pid 1 maybe
        while not (await holder.watch(0, 0)).stdout_total:
            pass
        await native.spawner.kill_all(sandbox.sandbox_id)

    end = await holder.ended
    filled = int(end.stdout.data or b"0") << 17
    assert filled < 64 << 20
    assert filled or end.oom_kills or native.gone


async def test_worker_survives_execs_into_a_full_sandbox(native: Native) -> None:
    """Helpers share the worker's memory: were one the OOM killer's victim, all would die."""
    sandbox = await native.create(memory_bytes=24 << 20, shm_bytes=1 << 30)
    await native.sh(sandbox, "dd if=/dev/zero of=/dev/shm/full bs=64k count=1000")

    ended = []
    for _ in range(8):
        try:
            ended.append((await native.run(sandbox, "probe", "grow", "8", deadline_s=10)).reason)
        except SpawnerFault as fault:
            # No memory for a helper, or its pid 1 was the victim: both are the sandbox's end.
            ended.append(fault.stage)

    assert len(ended) == 8
    assert native.lost == []
    other = await native.create()
    assert (await native.sh(other, "echo fine")).stdout.data == b"fine\n"


async def test_pids_limit_holds(native: Native) -> None:
    """A fork bomb is the sandbox's own trouble."""
    sandbox = await native.create(pids=20)

    end = await native.sh(
        sandbox, "i=0; while [ $i -lt 40 ]; do sleep 5 & i=$((i+1)); done", deadline_s=5
    )

    assert b"can't fork" in whole(end.stderr)
    assert len(await native.spawner.processes(sandbox.sandbox_id)) <= 20


async def test_shm_has_the_size_asked_for(native: Native) -> None:
    """Chrome needs more than the usual 64 MiB."""
    sandbox = await native.create(shm_bytes=256 << 20)

    end = await native.sh(sandbox, "df -k /dev/shm | tail -1 | awk '{print $2}'")

    assert end.stdout.data == b"262144\n"


async def test_socket_made_inside_reaches_a_port_of_the_sandbox(native: Native) -> None:
    """Inbound connections are made from within; nothing listens outside."""
    sandbox = await native.create()
    server = native.start(sandbox, "sh", "-c", "echo hello | nc -l -p 8080", deadline_s=20)
    loop = asyncio.get_running_loop()
    data = b""
    async with asyncio.timeout(60):
        while not data:
            with await native.spawner.make_socket(sandbox.sandbox_id) as sock:
                try:
                    await loop.sock_connect(sock, ("127.0.0.1", 8080))
                    data = await loop.sock_recv(sock, 100)
                except ConnectionRefusedError:
                    await asyncio.sleep(0.01)

    assert data == b"hello\n"
    await native.spawner.destroy(sandbox.sandbox_id)
    await server.ended


async def test_worker_killed_leaves_no_process_and_fails_what_waits(native_home: Path) -> None:
    """`kill -9` of the spawner must not leave sandboxes that nobody watches."""
    async with running(native_home, workers=2) as native:
        sandboxes = [await native.create() for _ in range(4)]
        executions = [native.start(s, "sleep", "100") for s in sandboxes]
        for sandbox in sandboxes:
            await native.wait_for_names(sandbox, b"sleep")
        victim = native.spawner.pids[0]

        os.kill(victim, signal.SIGKILL)

        ended = await asyncio.gather(*(e.ended for e in executions[::2]), return_exceptions=True)
        assert all(isinstance(error, SpawnerLostError) for error in ended)
        assert sorted(native.lost) == sorted(s.sandbox_id for s in sandboxes[::2])
        assert (await native.run(sandboxes[1], "true")).code == 0
        pids = {s.pid for s in sandboxes[::2]}
        async with asyncio.timeout(60):
            while pids & set(native.processes()):  # noqa: ASYNC110 - nor here
                await asyncio.sleep(0.005)
        for base in native.config.cgroups.values():
            for sandbox in sandboxes[::2]:
                await _remove_cgroup(base / sandbox.sandbox_id)


def _try_to_remove(path: Path) -> bool:
    try:
        for child in [*path.glob("*/"), path]:
            child.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


async def _remove_cgroup(path: Path) -> None:
    """As `gc` does for what a killed worker left."""
    async with asyncio.timeout(60):
        while not _try_to_remove(path):  # noqa: ASYNC110 - the kernel tells nobody
            await asyncio.sleep(0.01)


_CLIENT_THAT_FORKS = """
import asyncio, json, os, pathlib, signal, sys
from tests.fixtures.native import running

async def main():
    opened = running(pathlib.Path(sys.argv[1]))
    native = await opened.__aenter__()
    sandbox = await native.create()
    native.start(sandbox, "sleep", "100")
    await native.wait_for_names(sandbox, b"sleep")
    child = os.fork()
    if not child:
        signal.pause()
    bases = [str(base) for base in native.config.cgroups.values()]
    told = {"worker": native.spawner.pids[0], "child": child, "bases": bases}
    print(json.dumps(told), flush=True)
    await asyncio.sleep(100)

asyncio.run(main())
"""


async def test_client_killed_ends_its_workers_though_a_fork_of_it_holds_the_socket(
    native_home: Path,
) -> None:
    """Data loaders fork; one that outlives its trainer must not keep sandboxes alive."""
    client = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", _CLIENT_THAT_FORKS, str(native_home)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    )
    assert client.stdout is not None
    told = json.loads(await asyncio.to_thread(client.stdout.readline))
    bases = [Path(base) for base in told["bases"]]
    worker = os.pidfd_open(told["worker"])
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(worker, ended.set)
    try:
        client.kill()

        await asyncio.wait_for(ended.wait(), 20)
        assert [path for base in bases for path in base.iterdir() if path.is_dir()] == []
        os.kill(told["child"], 0)
    finally:
        asyncio.get_running_loop().remove_reader(worker)
        os.close(worker)
        os.kill(told["child"], signal.SIGKILL)
        await asyncio.to_thread(client.communicate)
        for base in bases:
            base.rmdir()


async def test_close_in_the_middle_of_execs_leaves_nothing(native_home: Path) -> None:
    """A client that goes away takes all of it along."""
    async with running(native_home) as native:
        sandboxes = [await native.create(pids=100) for _ in range(5)]
        executions = [native.start(s, "sleep", "100") for s in sandboxes for _ in range(10)]
        await native.run(sandboxes[0], "true")

        await native.spawner.close()

        ended = await asyncio.gather(*(e.ended for e in executions), return_exceptions=True)
        assert all(isinstance(error, SpawnerLostError) for error in ended)
        await native.assert_nothing_left()


async def test_idle_sandbox_costs_five_descriptors_at_most(native: Native) -> None:
    """Two thousand of them must fit into a usual limit on open files."""
    _, before = await native.counts()

    for _ in range(4):
        sandbox = await native.create(memory_bytes=64 << 20, pids=50, cpu_milli=1000)
        await native.run(sandbox, "true")

    async def few() -> bool:
        return (await native.counts())[1] - before <= 4 * 5

    await until_asked(few, within_s=60)  # what create needed is closed a moment later


def _names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


_CLIENT_WITH_FEW_DESCRIPTORS = """
import asyncio, pathlib, resource, sys
from coldframe.host.spawner import SpawnerFault
from tests.fixtures.native import running

async def main():
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
    async with running(pathlib.Path(sys.argv[1])) as native:
        greedy, neighbour = await native.create(), await native.create()
        for _ in range(64):
            assert (await native.sh(greedy, "sleep 1000 &")).code == 0
        try:
            await native.run(greedy, "true")
        except SpawnerFault as fault:
            print(fault.errno, fault.stage)
        print((await native.run(neighbour, "true")).code)
        print(await native.spawner.kill_all(greedy.sandbox_id))
        print((await native.run(greedy, "true")).code)

asyncio.run(main())
"""


async def test_sandbox_with_very_many_leftovers_is_refused_and_its_neighbours_are_not(
    native_home: Path,
) -> None:
    """Each takes descriptors of the worker; without a budget a neighbour would pay for them."""
    client = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        _CLIENT_WITH_FEW_DESCRIPTORS,
        str(native_home),
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    )
    told, _ = await client.communicate()

    assert told.decode().splitlines() == [f"{errno.EAGAIN} execs", "0", "64", "0"]
    assert client.returncode == 0


async def test_remove_tree_of_hostile_names_and_depth(native: Native, tmp_path: Path) -> None:
    """Whatever a sandbox wrote must be removable, and nothing else may be touched."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("x")
    fd = os.open(tmp_path, os.O_DIRECTORY)
    sandbox = await native.create(upper=fd)
    end = await native.sh(
        sandbox,
        "mkdir /w; cd /w; probe deep 3000; cd /w; mkdir 'a\nb' '-rf' \"$(printf '\\377')\";"
        f"ln -s {outside} link; ln -s / root; mkfifo fifo; mkdir -m 000 shut; touch shut/in;"
        "for i in $(seq 300); do touch f$i; done; chmod 000 /w",
    )
    assert end.code == 0, end.stderr
    await native.spawner.destroy(sandbox.sandbox_id)

    removed = await native.spawner.remove_tree(fd, "upper")
    await native.spawner.remove_tree(fd, "work")

    assert removed > 3300
    assert _names(tmp_path) == ["outside"]
    assert _names(outside) == ["kept"]
    assert await native.spawner.remove_tree(fd, "upper") == 0
    os.close(fd)


async def test_many_sandboxes_at_once_each_run(native_home: Path) -> None:
    """Requests overlap in both workers; no answer may go astray."""
    async with running(native_home, workers=2) as native:

        async def one(number: int) -> bytes | None:
            sandbox: Created = await native.create(memory_bytes=32 << 20, pids=20)
            end = await native.sh(sandbox, f"echo nonce {number}")
            await native.spawner.destroy(sandbox.sandbox_id)
            return end.stdout.data

        said = await asyncio.gather(*(one(number) for number in range(40)))

        assert said == [b"nonce %d\n" % number for number in range(40)]


def test_gc_keeps_the_directory_of_a_node_while_something_of_it_does_not_end(
    native_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By that directory the next call finds it: without, its cgroups would stay for good."""
    monkeypatch.setattr(gc, "reap_cgroups", partial(reap_cgroups, wait_s=0.1))
    state = tmp_path / "nodes/gc0000"
    (state / "spool").mkdir(parents=True)
    bases = cgroup_bases(state.name).values()
    with subprocess.Popen(["sleep", "1000"]) as last:
        for base in bases:
            (base / "sandbox").mkdir()
            (base / "sandbox/cgroup.procs").write_text(str(last.pid))
        with held_at_its_exit(native_home, last.pid):
            reaped = gc.reap_dead_nodes(tmp_path)
        held = state.is_dir()

    reaped_later = gc.reap_dead_nodes(tmp_path)

    assert held
    assert any(line.startswith("node gc0000 in part only: what is in cgroup") for line in reaped)
    assert f"directory {state}" in reaped_later
    assert not any(base.exists() for base in bases)


async def test_measure_tells_the_cost_of_a_process_on_the_host(native: Native) -> None:
    """The baseline that the benchmarks divide by."""
    durations = await native.spawner.measure(5)

    assert len(durations) == 5
    assert all(duration > 10_000 for duration in durations)
    with pytest.raises(SpawnerFault):
        await native.spawner.measure(1, "/no/such")
