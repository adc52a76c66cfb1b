"""One command: what goes in, what comes out, and when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from coldframe.host import wire
from coldframe.host.spawner import SpawnerFault
from coldframe.host.wire import Reason, Scope
from tests.fixtures.native import Native, running


async def test_exec_output_returns_streams_apart_with_digests(native: Native) -> None:
    """The two streams are evidence of different kinds and must never be mixed."""
    sandbox = await native.create()

    end = await native.sh(sandbox, "echo out; echo err >&2; exit 7")

    assert (end.stdout.data, end.stderr.data) == (b"out\n", b"err\n")
    assert (end.signalled, end.code, end.reason) == (False, 7, Reason.EXIT)
    assert end.stdout.sha256 == hashlib.sha256(b"out\n").digest()
    assert end.stderr.sha256 == hashlib.sha256(b"err\n").digest()


async def test_exec_binary_output_arrives_unchanged(native: Native) -> None:
    """Bytes that are not UTF-8, and NULs, are the command's right."""
    sandbox = await native.create()
    script = r"printf '\000\377\303\n\000'"

    end = await native.sh(sandbox, script)

    assert end.stdout.data == b"\x00\xff\xc3\n\x00"


async def test_exec_merge_stderr_keeps_one_stream(native: Native) -> None:
    """A session shows both streams in the order in which they were written."""
    sandbox = await native.create()

    end = await native.sh(sandbox, "echo 1; echo 2 >&2; echo 3", merge_stderr=True)

    assert (end.stdout.data, end.stderr.data) == (b"1\n2\n3\n", b"")


async def test_exec_long_argument_and_many_variables_arrive(native: Native) -> None:
    """128 KiB less one is the longest argument that Linux takes; harnesses send patches so."""
    sandbox = await native.create()
    long = b"x" * (128 * 1024 - 1)
    env = [b"PATH=/bin", *(b"V%d=" % i + b"w" * 50 for i in range(1000))]

    end = await native.run(
        sandbox, "sh", "-c", "echo ${#1} $(env | grep -c ^V)", "sh", long, env=env
    )

    assert end.stdout.data == b"%d 1000\n" % len(long)


@pytest.mark.parametrize(
    ("argv", "changes", "stage", "error"),
    [
        (["/no/such"], {}, "program", "ENOENT"),
        (["no-such"], {}, "program", "ENOENT"),
        (["/bin"], {}, "program", "EACCES"),
        (["/tmp/text"], {}, "program", "EACCES"),
        (["/tmp/garbage"], {}, "program", "ENOEXEC"),
        (["/tmp/script"], {}, "interpreter", "ENOENT"),
        (["true"], {"cwd": "/no/such"}, "cwd", "ENOENT"),
        (["true"], {"cwd": "/bin/true"}, "cwd", "ENOTDIR"),
        (["true"], {"uid": 70000}, "user", "EINVAL"),
        (["true"], {"gid": 70000}, "user", "EINVAL"),
        (["true", b"x" * (128 * 1024)], {}, "program", "E2BIG"),
        (["true"], {"env": ["PATH=/nowhere:/tmp"]}, "program", "ENOENT"),
    ],
)
async def test_exec_that_cannot_start_names_the_step(
    native: Native, argv: list[str], changes: dict[str, object], stage: str, error: str
) -> None:
    """Not executed is another thing than executed and failed, and must never look like it."""
    sandbox = await native.create()
    await native.sh(
        sandbox,
        "echo hi >/tmp/text; echo hi >/tmp/garbage; chmod +x /tmp/garbage;"
        "printf '#!/no/such\n' >/tmp/script; chmod +x /tmp/script",
    )

    with pytest.raises(SpawnerFault) as caught:
        await native.run(sandbox, *argv, **changes)

    assert (caught.value.stage, errno.errorcode[caught.value.errno]) == (stage, error)


@pytest.mark.parametrize("count", [70_000, 230_000, 300_000])
async def test_exec_with_very_many_arguments_is_for_the_kernel_to_judge(
    native: Native, count: int
) -> None:
    """What a shell can pass must pass here; and more is too long, not a broken request."""
    sandbox = await native.create()
    try:
        end = await native.run(sandbox, "sh", "-c", "echo $#", "sh", *[b""] * count)
        outcome = end.stdout.data
    except SpawnerFault as fault:
        outcome = fault.errno

    assert outcome == (errno.E2BIG if count > 250_000 else b"%d\n" % count)


async def test_exec_searches_the_path_of_its_own_environment(native: Native) -> None:
    """The node's PATH says nothing about the image."""
    sandbox = await native.create()
    await native.sh(sandbox, "mkdir /opt; printf '#!/bin/sh\necho mine\n' >/opt/x; chmod +x /opt/x")

    end = await native.run(sandbox, "x", env=["PATH=/no:/opt:/bin"])

    assert end.stdout.data == b"mine\n"


async def test_exec_as_another_user_has_its_ids_and_no_capabilities(native: Native) -> None:
    """A task that asks for a plain user must not be graded as root."""
    sandbox = await native.create()

    end = await native.sh(
        sandbox, "id; grep -E 'Cap(Prm|Eff)' /proc/self/status", uid=1000, gid=100, groups=[5, 7]
    )

    assert end.stdout.data is not None
    lines = end.stdout.data.decode().splitlines()
    assert lines[0] == "uid=1000 gid=100 groups=100,5,7" or lines[0].startswith(
        "uid=1000 gid=100 groups="
    )
    assert [line.split()[1] for line in lines[1:]] == ["0" * 16] * 2


async def test_exec_of_a_user_can_open_its_streams_by_name(native: Native) -> None:
    """Programs log to /dev/stderr; a pipe of root's would refuse them."""
    sandbox = await native.create()

    end = await native.sh(sandbox, "echo a >/dev/stdout; echo b >/dev/stderr", uid=1000, gid=1000)

    assert (end.stdout.data, end.stderr.data) == (b"a\n", b"b\n")


async def test_exec_stdin_is_empty_unless_given(native: Native) -> None:
    """A command that reads stdin must not hang for ever."""
    sandbox = await native.create()

    end = await native.run(sandbox, "cat")

    assert (end.code, end.stdout.data) == (0, b"")


async def test_exec_stdin_descriptor_is_read_to_its_end(native: Native) -> None:
    """What is written to the given pipe arrives, and end of file does too."""
    sandbox = await native.create()
    read_end, write_end = os.pipe()
    execution = native.start(sandbox, "cat", stdin=read_end)
    os.close(read_end)
    os.write(write_end, b"through\n")
    os.close(write_end)

    assert (await execution.ended).stdout.data == b"through\n"


async def test_exec_status_descriptor_arrives_as_number_3(native: Native) -> None:
    """Sessions speak over a descriptor that is none of the three."""
    sandbox = await native.create()
    read_end, write_end = os.pipe()
    script = "echo x >&3; ls /proc/self/fd"
    execution = native.start(sandbox, "sh", "-c", script, status=write_end)
    os.close(write_end)
    end = await execution.ended

    assert os.read(read_end, 10) == b"x\n"
    os.close(read_end)
    assert end.stdout.data == b"0\n1\n2\n3\n4\n"


async def test_exec_that_leaves_a_child_ends_with_its_leader(native: Native) -> None:
    """`server &` holds stdout; the exec must return all the same and say what it left."""
    sandbox = await native.create()

    execution = native.start(sandbox, "sh", "-c", "echo hi; sleep 100 & echo bye")
    end = await execution.ended

    assert end.stdout.spool_fd is not None
    assert os.pread(end.stdout.spool_fd, 100, 0) == b"hi\nbye\n"
    end.close()
    assert len(end.leftovers) == 1
    await native.wait_for_names(sandbox, b"sleep")
    assert await execution.signal(signal.SIGKILL, Scope.TREE) == 1


async def test_leftover_output_keeps_draining_into_the_spool(native: Native) -> None:
    """A server must not block on a full pipe because nobody waits for it any more."""
    sandbox = await native.create()
    read_end, write_end = os.pipe()
    execution = native.start(
        sandbox,
        "sh",
        "-c",
        "exec 9<&0; (read x; head -c 300000 /dev/zero; sleep 100) <&9 & exit 3",
        stdin=read_end,
    )
    end = await execution.ended
    spools = await execution.output()
    os.close(read_end)

    assert (end.code, end.stdout.total) == (3, 0)
    end.close()
    os.close(spools.stderr_fd)
    os.write(write_end, b"go\n")
    os.close(write_end)
    progress = await execution.mark()
    while progress.stdout_total < 300000:
        await asyncio.sleep(0.005)
        progress = await execution.mark()
    assert os.pread(spools.stdout_fd, 300001, 0) == bytes(300000)
    os.close(spools.stdout_fd)


@pytest.mark.skipif(
    "asan" in os.environ.get("COLDFRAME_TEST_NATIVE", ""),
    reason="the sanitizer keeps what was given back",
)
async def test_memory_peak_is_of_the_command_whatever_the_worker_held(native: Native) -> None:
    """Another sandbox's output would else stand in every later result."""
    sandbox, other = await native.create(), await native.create()
    line = "head -c 1000000 /dev/zero; sleep 0.3"
    many = [native.start(other, "sh", "-c", line, inline_bytes=1 << 20) for _ in range(40)]
    for execution in many:
        assert (await execution.ended).stdout.total == 1000000

    end = await native.sh(sandbox, "echo on")

    assert 0 < end.memory_peak_bytes < 16 << 20


_LATE = "(while [ ! -e /go ]; do sleep 0.01; done; %s) & echo early"


async def test_last_words_of_leftovers_are_kept_although_nobody_read_before(
    native: Native,
) -> None:
    """Who reads a log a moment later would find its end missing, and nothing would say so."""
    sandbox = await native.create()
    execution = native.start(sandbox, "sh", "-c", _LATE % "echo late")
    end = await execution.ended

    await native.sh(sandbox, "touch /go")
    await native.wait_for_names(sandbox)
    with pytest.raises(SpawnerFault, match="ENOENT"):
        while True:
            await execution.mark()
            await asyncio.sleep(0.005)

    assert end.stdout.total == 6
    assert end.stdout.spool_fd is not None
    assert os.pread(end.stdout.spool_fd, 100, 0) == b"early\nlate\n"
    end.close()


async def test_spool_of_leftovers_says_how_much_they_wrote_round_its_ring(native: Native) -> None:
    """Its reader must know what was overwritten, also when the last writer has long gone."""
    sandbox = await native.create()
    line = _LATE % "head -c 100001 /dev/zero"
    execution = native.start(sandbox, "sh", "-c", line, spool_bytes=8192)
    end = await execution.ended

    await native.sh(sandbox, "touch /go")
    with pytest.raises(SpawnerFault, match="ENOENT"):
        while True:
            await execution.mark()
            await asyncio.sleep(0.005)

    assert end.stdout.spool_fd is not None
    assert os.fstat(end.stdout.spool_fd).st_size == 6 + 100001
    end.close()


async def test_stream_that_leftovers_do_not_hold_comes_back_with_the_end(native: Native) -> None:
    """A daemon that closed its output must cost no descriptors."""
    sandbox = await native.create()

    end = await native.sh(sandbox, "sleep 60 >/dev/null 2>&1 & sleep 0.1; echo on")

    assert len(end.leftovers) == 1
    assert (end.stdout.data, end.stderr.data) == (b"on\n", b"")


async def test_watch_of_silent_leftovers_waits(native: Native) -> None:
    """Each reader that follows a server's log would else keep the worker busy."""
    sandbox = await native.create()
    execution = native.start(sandbox, "sh", "-c", _LATE % "echo late")
    end = await execution.ended
    end.close()

    news = asyncio.ensure_future(execution.watch(6, 0))
    done, _ = await asyncio.wait([news], timeout=0.2)
    assert not done
    await native.sh(sandbox, "touch /go")
    assert (await news).stdout_total == 11


async def test_exec_past_deadline_kills_daemonised_grandchildren(native: Native) -> None:
    """A survivor would steal CPU from the next episode on this node."""
    sandbox = await native.create()

    end = await native.sh(
        sandbox, "echo hi; setsid sh -c 'sleep 60 & sleep 61' & sleep 62", deadline_s=1
    )

    assert (end.reason, end.stdout.data) == (Reason.DEADLINE, b"hi\n")
    assert [p.name for p in await native.spawner.processes(sandbox.sandbox_id)] == [b"pid1"]


@pytest.mark.parametrize("verb", ["trace", "hold"])
@pytest.mark.parametrize("by", ["deadline", "kill", "kill_all"])
async def test_killed_exec_ends_although_a_tracer_holds_its_exit(
    native: Native, verb: str, by: str
) -> None:
    """A leftover of one exec may trace another: to be killed must be the end of it all the same."""
    sandbox = await native.create()
    deadline = 0.5 if by == "deadline" else 60
    victim = native.start(sandbox, "sleep", "100", deadline_s=deadline, want_started=True)
    assert victim.started is not None
    pid = (await victim.started).pid
    script = f"probe {verb} {pid} > /tracer & while ! grep -q attached /tracer; do sleep 0.01; done"
    tracer = await native.sh(sandbox, script)
    assert [one.name for one in tracer.leftovers] == [b"probe"]

    async with asyncio.timeout(60):
        if by == "kill":
            await victim.signal(signal.SIGKILL, Scope.TREE)
        elif by == "kill_all":
            await native.spawner.kill_all(sandbox.sandbox_id)
        end = await victim.ended

    assert end.reason is (Reason.DEADLINE if by == "deadline" else Reason.SIGNAL)
    tracer.close()
    end.close()


async def test_exec_over_kill_limit_is_ended(native: Native) -> None:
    """The one limit that ends a command for what it prints."""
    sandbox = await native.create()

    end = await native.run(sandbox, "yes", kill_bytes=1 << 20, deadline_s=30)

    assert end.reason is Reason.OUTPUT_LIMIT
    assert end.stdout.total > 1 << 20
    end.close()


async def test_exec_over_kill_limit_by_both_streams_together_is_ended(native: Native) -> None:
    """The limit is promised for what a command prints, wherever it prints it to."""
    sandbox = await native.create()
    script = "head -c 700000 /dev/zero; head -c 700000 /dev/zero >&2; sleep 100"

    end = await native.sh(sandbox, script, kill_bytes=1 << 20, deadline_s=10)

    assert end.reason is Reason.OUTPUT_LIMIT
    assert max(end.stdout.total, end.stderr.total) < 1 << 20
    end.close()


async def test_exec_big_output_keeps_head_and_ring(native: Native) -> None:
    """Memory and disk are bounded; digest and total are of the whole."""
    sandbox = await native.create()
    spool = 64 << 10
    script = "i=0; while [ $i -lt 40000 ]; do echo line $i; i=$((i+1)); done"
    whole = b"".join(b"line %d\n" % i for i in range(40000))

    end = await native.sh(sandbox, script, spool_bytes=spool, inline_bytes=1000)

    assert end.stdout.total == len(whole)
    assert end.stdout.sha256 == hashlib.sha256(whole).digest()
    assert end.stdout.data is None
    assert end.stdout.spool_fd is not None
    assert os.fstat(end.stdout.spool_fd).st_size == spool

    def read(start: int, stop: int) -> bytes:
        assert end.stdout.spool_fd is not None
        return b"".join(
            os.pread(end.stdout.spool_fd, size, offset)
            for offset, size in wire.spool_pieces(spool, start, stop)
        )

    assert read(0, spool // 2) == whole[: spool // 2]
    oldest = wire.spool_oldest(spool, len(whole))
    assert read(oldest, len(whole)) == whole[oldest:]
    end.close()


async def test_watch_returns_when_output_grows(native: Native) -> None:
    """A reader follows a command without asking again and again."""
    sandbox = await native.create()
    read_end, write_end = os.pipe()
    execution = native.start(
        sandbox, "sh", "-c", "read x; echo one; read x; echo two", stdin=read_end
    )
    os.close(read_end)
    spools = await execution.output()
    watched = asyncio.ensure_future(execution.watch(0, 0))
    os.write(write_end, b"\n")

    progress = await watched
    assert (progress.stdout_total, progress.ended) == (4, False)
    assert os.pread(spools.stdout_fd, 100, 0) == b"one\n"
    # Asked before, as nothing is known of a command that has ended.
    watched = asyncio.ensure_future(execution.watch(4, 0))
    await asyncio.sleep(0)
    os.write(write_end, b"\n")
    assert (await watched).stdout_total == 8
    os.close(write_end)
    os.close(spools.stdout_fd)
    os.close(spools.stderr_fd)
    end = await execution.ended
    assert end.stdout.spool_fd is not None
    end.close()


@pytest.mark.parametrize(
    ("scope", "left"),
    [
        (Scope.LEADER, [b"sh", b"sleep", b"sleep"]),
        (Scope.GROUP, [b"sleep"]),
        (Scope.TREE, []),
        (Scope.CHILDREN, []),
    ],
)
async def test_signal_scope_reaches_no_more_than_it_says(
    native: Native, scope: Scope, left: list[bytes]
) -> None:
    """Stop a command without its services, or all of it: the caller chooses."""
    sandbox = await native.create()
    execution = native.start(
        sandbox,
        "sh",
        "-c",
        "setsid sleep 100 & sh -c 'sleep 101; true' & wait; exit 5",
    )
    await native.wait_for_names(sandbox, b"sh", b"sh", b"sleep", b"sleep")

    assert await execution.signal(signal.SIGKILL, scope) > 0

    end = await execution.ended
    if scope is Scope.CHILDREN:
        assert (end.signalled, end.code, end.reason) == (False, 5, Reason.EXIT)
    else:
        assert (end.signalled, end.code, end.reason) == (True, signal.SIGKILL, Reason.SIGNAL)
    await native.wait_for_names(sandbox, *left)


async def test_kill_all_leaves_only_pid_1(native: Native) -> None:
    """Before grading, nothing of the harness may run; what the agent left dies with it."""
    sandbox = await native.create()
    running = native.start(sandbox, "sleep", "100")
    await native.sh(sandbox, "setsid sleep 101 & true")
    await native.wait_for_names(sandbox, b"sleep", b"sleep")

    assert await native.spawner.kill_all(sandbox.sandbox_id) == 2

    assert (await running.ended).reason is Reason.SIGNAL
    assert [p.name for p in await native.spawner.processes(sandbox.sandbox_id)] == [b"pid1"]
    assert (await native.sh(sandbox, "echo on")).stdout.data == b"on\n"


async def test_several_may_kill_everything_at_the_same_time(native: Native) -> None:
    """Two graders, or one that was interrupted and asks again: each is told when all is dead."""
    sandbox = await native.create()
    runs = [native.start(sandbox, "sh", "-c", "sleep 100 & sleep 100") for _ in range(20)]

    kills = [asyncio.ensure_future(native.spawner.kill_all(sandbox.sandbox_id)) for _ in range(4)]
    kills[0].cancel()
    await asyncio.gather(*kills[1:])

    assert [p.name for p in await native.spawner.processes(sandbox.sandbox_id)] == [b"pid1"]
    await asyncio.gather(*(running.ended for running in runs), return_exceptions=True)


async def test_exec_in_flight_at_destroy_ends_as_sandbox_gone_with_output(native: Native) -> None:
    """What an episode printed is evidence, however it ended."""
    sandbox = await native.create()
    execution = native.start(sandbox, "sh", "-c", "echo so far; sleep 100")
    while not (await execution.watch(0, 0)).stdout_total:
        pass

    await native.spawner.destroy(sandbox.sandbox_id)

    end = await execution.ended
    assert (end.reason, end.stdout.data) == (Reason.SANDBOX_GONE, b"so far\n")


async def test_pty_is_a_controlling_terminal_of_the_given_size(native: Native) -> None:
    """Full-screen programs need a terminal, job control a controlling one."""
    sandbox = await native.create()
    execution = native.start(
        sandbox,
        "sh",
        "-c",
        "tty; stty size; read x; echo got $x; ls -l $(tty)",
        pty=(40, 120),
        want_started=True,
        uid=1000,
        gid=1000,
    )
    assert execution.started is not None
    started = await execution.started
    assert started.pty_fd is not None
    os.write(started.pty_fd, b"typed\n")
    end = await execution.ended
    os.close(started.pty_fd)

    assert end.stdout.data is not None
    assert b"/dev/pts/0\r\n" in end.stdout.data
    assert b"40 120\r\n" in end.stdout.data
    assert b"got typed\r\n" in end.stdout.data
    assert b"crw--w----    1 1000     5 " in end.stdout.data


async def test_command_takes_the_cgroup_that_was_left_empty_and_no_other(native: Native) -> None:
    """Two in one would be killed together; in one that was killed the kernel kills newcomers."""
    sandbox = await native.create()
    inside = native.config.cgroups["unified"] / sandbox.sandbox_id
    made = []
    for script in ("true", "true", "sleep 1000 &", "true", "kill -9 $$", "true"):
        end = await native.sh(sandbox, script)
        assert (end.code, bool(end.leftovers)) == (9 * ("$$" in script), "&" in script)
        made.append({path.name for path in inside.iterdir() if path.name.startswith("x")})
    victim = native.start(sandbox, "sleep", "1000", want_started=True)
    assert victim.started is not None
    await victim.started
    assert await victim.signal(signal.SIGKILL, Scope.TREE) == 1
    assert (await victim.ended).reason is Reason.SIGNAL
    await native.wait_for_names(sandbox, b"sleep")
    assert (await native.sh(sandbox, "echo on")).stdout.data == b"on\n"

    if "memory" in native.config.cgroups:  # else controllers count for each command apart
        assert [len(names) for names in made] == [1, 1, 1, 2, 2, 2]
        assert made[0] == made[1] == made[2] < made[3] == made[4] == made[5]


async def test_sandbox_takes_no_terminals_from_its_neighbours(native: Native) -> None:
    """The machine has some 3,000 for all sandboxes: one that opens all it can gets 128."""
    greedy, neighbour = await native.create(), await native.create()
    holder = native.start(greedy, "probe", "keep", "terminals", "1000")
    while not (await holder.watch(0, 0)).stdout_total:
        pass

    with pytest.raises(SpawnerFault) as refused:
        await native.run(greedy, "true", pty=(24, 80))
    assert (refused.value.stage, refused.value.errno) == ("terminal", errno.ENOSPC)
    assert (await native.run(neighbour, "true", pty=(24, 80))).code == 0

    await native.spawner.kill_all(greedy.sandbox_id)
    assert (await holder.ended).stdout.data == b"128\n"
    assert (await native.run(greedy, "true", pty=(24, 80))).code == 0


async def test_terminal_that_hangs_up_at_once_costs_nobody_anything(native: Native) -> None:
    """Its command is through before its start is told; the worker died of that with all of it."""
    sandbox = await native.create()

    async def one() -> bytes | None:
        execution = native.start(sandbox, "/bin/echo", "on", pty=(24, 80), want_started=True)
        assert execution.started is not None
        started = await execution.started
        if started.pty_fd is not None:
            os.close(started.pty_fd)
        return (await execution.ended).stdout.data

    for _ in range(25):
        assert await asyncio.gather(*(one() for _ in range(8))) == [b"on\r\n"] * 8
    assert native.lost == []


async def test_concurrent_sleeps_run_side_by_side(native: Native) -> None:
    """Eight commands in one sandbox must not queue behind each other."""
    sandbox = await native.create()

    ends = await asyncio.gather(*(native.run(sandbox, "sleep", "0.3") for _ in range(8)))

    assert {end.code for end in ends} == {0}
    assert max(end.started_ns for end in ends) < min(end.ended_ns for end in ends)


async def test_started_tells_both_pids(native: Native) -> None:
    """The node names processes by the pid that the sandbox sees."""
    sandbox = await native.create()
    execution = native.start(sandbox, "sh", "-c", "echo $$; sleep 0.1", want_started=True)
    assert execution.started is not None
    started = await execution.started
    end = await execution.ended

    assert end.stdout.data == b"%d\n" % started.pid
    assert started.host_pid > 1


async def test_exec_resources_are_those_of_the_command(native: Native) -> None:
    """Cost of an episode is part of its record."""
    sandbox = await native.create()
    began = time.time_ns()

    end = await native.sh(sandbox, "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done")

    assert end.user_us > 10_000
    assert end.memory_peak_bytes > 100_000
    assert began <= end.started_ns < end.ended_ns <= time.time_ns()
    assert end.duration_ns >= end.user_us * 1000


async def test_orphans_are_reaped_by_pid_1(native: Native) -> None:
    """Zombies would fill the limit on processes."""
    sandbox = await native.create(pids=50)

    for _ in range(5):
        end = await native.sh(sandbox, "for i in 1 2 3 4 5 6 7 8 9 10; do (sleep 0 &) ; done")
        assert end.code == 0

    await native.wait_for_names(sandbox)


@contextlib.contextmanager
def _small_file_system(place: Path) -> Iterator[None]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "full", place], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", place], check=True)


async def test_spool_on_a_full_disk_is_told_and_ends_nothing(
    native_home: Path, tmp_path: Path
) -> None:
    """A full disk costs the window of the output, never the command or its digest."""
    with _small_file_system(tmp_path):
        async with running(native_home, spool=tmp_path) as native:
            sandbox = await native.create()
            end = await native.sh(sandbox, "head -c 1000000 /dev/zero; exit 3", inline_bytes=100)
            end.close()

    assert (end.code, end.stdout.total) == (3, 1000000)
    assert end.stdout.sha256 == hashlib.sha256(bytes(1000000)).digest()
    assert end.stdout.spool_errno == errno.ENOSPC
    assert end.stderr.spool_errno == 0


async def test_endless_output_costs_bounded_memory_and_disk(native: Native) -> None:
    """`yes` for as long as it likes: the spool stays what it was given."""
    sandbox = await native.create()
    worker = native.spawner.pids[0]

    end = await native.sh(sandbox, "yes | head -c 100000000", spool_bytes=1 << 20)

    assert end.stdout.total == 100_000_000
    assert end.stdout.spool_fd is not None
    assert os.fstat(end.stdout.spool_fd).st_size == 1 << 20
    end.close()
    status = Path(f"/proc/{worker}/status").read_text()  # noqa: ASYNC240
    (peak,) = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")]
    assert int(peak) < 20_000
