"""Checks of a runtime: how commands start, end, and what comes back of them."""

from __future__ import annotations

import asyncio
import hashlib

from coldframe.protocol.errors import (
    ArgumentsTooLongError,
    InvalidRequestError,
    ProgramNotExecutableError,
    ProgramNotFoundError,
    ShellNotFoundError,
    UserNotFoundError,
    WorkdirNotFoundError,
)
from coldframe.protocol.models import Reason
from coldframe.runtimes.self_check_lab import (
    Checks,
    Lab,
    equal,
    expect,
    raises,
    read_all,
    read_until,
)

check = Checks()
LINES = b"".join(b"%d\n" % number for number in range(1, 100_001))
"""What `seq 1 100000` prints."""


@check()
async def exit_code_and_streams_are_apart(lab: Lab) -> None:
    """stdout, stderr and the exit code come back as they were."""
    async with lab.sandbox() as bench:
        result = await bench.run("echo out; echo err >&2; exit 7")
        equal((result.reason, result.exit_code, result.signal), (Reason.EXIT, 7, None), "end")
        equal((result.stdout, result.stderr), (b"out\n", b"err\n"), "output")
        equal(result.out.sha256, hashlib.sha256(b"out\n").hexdigest(), "sha256 of stdout")
        equal(result.sandbox_id, bench.handle.id, "sandbox id")
        expect(result.ended_at >= result.started_at > 0, "the command ended before it started")


@check()
async def signal_is_told_from_exit(lab: Lab) -> None:
    """A command that a signal ended has no exit code."""
    async with lab.sandbox() as bench:
        result = await bench.run("kill -9 $$")
        equal((result.reason, result.exit_code, result.signal), (Reason.SIGNAL, None, 9), "end")


@check()
async def request_comes_back_normalised(lab: Lab) -> None:
    """The record of an exec says where, as whom and with what environment it ran."""
    async with lab.sandbox(env={"FROM_SPEC": "1"}) as bench:
        result = await bench.run("true", operation_id="op-given", env={"MORE": "2"})
        equal(result.operation_id, "op-given", "operation id")
        expect(result.request.cwd is not None, "cwd is not filled in")
        expect(result.request.user is not None, "user is not filled in")
        env = {str(key): value for key, value in result.request.env.items()}
        expect("PATH" in env and env.get("FROM_SPEC") == "1", f"environment is not whole: {env}")


@check()
async def workdir_of_the_sandbox_is_the_default(lab: Lab) -> None:
    """A request without cwd runs in the sandbox's workdir."""
    async with lab.sandbox(workdir="/work") as bench:
        await bench.write("marker", b"here")
        result = await bench.run("cat marker", cwd=None)
        equal(result.stdout, b"here", "output of a command in the workdir")


@check()
async def deadline_kills_daemonised_grandchildren(lab: Lab) -> None:
    """A survivor would steal CPU from the next episode; what was printed is kept."""
    async with lab.sandbox() as bench:
        result = await bench.run(
            "setsid sleep 61 & (setsid sh -c 'sleep 62 & sleep 63' &); echo hi; sleep 60",
            deadline_s=1.0,
        )
        equal((result.reason, result.stdout), (Reason.DEADLINE, b"hi\n"), "end")
        equal(result.leftovers, (), "leftovers")
        equal(await bench.process_names(), [], "processes after the deadline")


@check()
async def holder_of_stdout_does_not_hold_exec(lab: Lab) -> None:
    """exec ends with the command; what it left running is listed and lives on."""
    async with lab.sandbox() as bench:
        running = await bench.start("sleep 60 & echo done")
        result = await running.wait()
        equal((result.reason, result.stdout), (Reason.EXIT, b"done\n"), "end")
        left = [process.pid for process in result.leftovers]
        equal(len(left), 1, "number of leftovers")
        equal([process.pid for process in await bench.handle.processes()], left, "what lives on")


@check()
async def output_of_leftovers_keeps_draining(lab: Lab) -> None:
    """A background server's log can be read after the command that started it has ended."""
    async with lab.sandbox() as bench:
        running = await bench.start(
            "(while [ ! -e go ]; do sleep 0.02; done; echo late) & echo early"
        )
        result = await running.wait()
        equal(result.stdout, b"early\n", "stdout at the end of the command")
        await bench.write("go", b"")
        equal(await read_until(running, b"late\n"), b"early\nlate\n", "stdout in the end")


@check()
async def last_words_of_leftovers_can_be_read(lab: Lab) -> None:
    """Also when what was left running has ended before anybody read any of it."""
    async with lab.sandbox() as bench:
        running = await bench.start(
            "(while [ ! -e go ]; do sleep 0.02; done; echo late) & echo early"
        )
        await running.wait()
        await bench.write("go", b"")
        while await bench.process_names():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        chunks = await read_all(running)
        equal(b"".join(chunk.data for chunk in chunks), b"early\nlate\n", "stdout in the end")


@check()
async def daemon_that_closed_its_output_lives_on(lab: Lab) -> None:
    """tmux and servers are started like this."""
    async with lab.sandbox() as bench:
        result = await bench.run("setsid sleep 60 >/dev/null 2>&1 </dev/null & echo started")
        equal(result.stdout, b"started\n", "stdout")
        equal(len(await bench.process_names()), 1, "processes after the end")


@check()
async def window_keeps_head_and_tail(lab: Lab) -> None:
    """What the model is shown is bounded; total and digest still speak of the whole."""
    async with lab.sandbox() as bench:
        result = await bench.run("seq 1 100000", window_bytes=1000)
        equal(result.out.total_bytes, len(LINES), "total")
        equal(result.out.sha256, hashlib.sha256(LINES).hexdigest(), "sha256")
        equal((result.out.head, result.out.tail), (LINES[:500], LINES[-500:]), "window")


@check()
async def window_of_nothing_still_counts(lab: Lab) -> None:
    """window_bytes=0 gives totals only."""
    async with lab.sandbox() as bench:
        result = await bench.run("seq 1 100000", window_bytes=0)
        equal((result.out.head, result.out.tail), (b"", b""), "window")
        equal(result.out.total_bytes, len(LINES), "total")


@check()
async def whole_output_comes_back_when_it_fits(lab: Lab) -> None:
    """588 KB of output are whole, in order."""
    async with lab.sandbox() as bench:
        result = await bench.run("seq 1 100000; seq 1 1000 >&2")
        equal(hashlib.sha256(result.stdout).hexdigest(), hashlib.sha256(LINES).hexdigest(), "out")
        equal(result.out.omitted_bytes, 0, "omitted bytes")
        expect(
            LINES.startswith(result.stderr) and len(result.stderr) == 3893, "stderr is not whole"
        )


@check()
async def spool_says_what_it_dropped(lab: Lab) -> None:
    """A reader that comes late is told how much is missing, never given wrong bytes."""
    async with lab.sandbox() as bench:
        running = await bench.start("seq 1 100000", spool_bytes=8192)
        await running.wait()
        cursor, dropped = 0, 0
        while True:
            chunk = await running.read("stdout", cursor, 1000)
            equal(chunk.offset, cursor + chunk.dropped_bytes, "offset")
            wanted = LINES[chunk.offset : chunk.next_cursor]
            equal(chunk.data, wanted, f"bytes at {chunk.offset}")
            cursor, dropped = chunk.next_cursor, dropped + chunk.dropped_bytes
            if chunk.eof:
                break
        equal(cursor, len(LINES), "where the stream ended")
        expect(dropped >= len(LINES) - 8192, f"only {dropped} bytes were said to be dropped")


@check()
async def kill_bytes_ends_the_command(lab: Lab) -> None:
    """An endless printer is stopped when that was asked for."""
    async with lab.sandbox() as bench:
        result = await bench.run("yes & yes", kill_bytes=200_000, spool_bytes=8192)
        equal(result.reason, Reason.OUTPUT_LIMIT, "reason")
        expect(result.out.total_bytes >= 200_000, f"killed after {result.out.total_bytes} bytes")
        equal(await bench.process_names(), [], "processes afterwards")


@check()
async def bytes_go_through_unchanged(lab: Lab) -> None:
    """Not UTF-8, NULs in output, newlines and quotes in arguments."""
    async with lab.sandbox() as bench:
        odd = bytes(range(1, 256))
        result = await bench.run(argv=("sh", "-c", 'printf %s "$1"', "sh", odd))
        equal(result.stdout, odd, "an argument of every byte but NUL")
        result = await bench.run("printf 'a\\0b'")
        equal(result.stdout, b"a\0b", "output with a NUL")
        result = await bench.run('printf %s "$ODD"', env={"ODD": odd})
        equal(result.stdout, odd, "an environment value of every byte but NUL")


@check()
async def nul_in_an_argument_is_refused(lab: Lab) -> None:
    """The kernel would silently cut it there."""
    async with lab.sandbox() as bench:
        await raises(InvalidRequestError, bench.run(argv=("echo", b"a\0b")), "a NUL in argv")


@check()
async def arguments_may_be_as_long_as_the_kernel_takes(lab: Lab) -> None:
    """128 KiB in one argument is what models send; more is a typed refusal."""
    async with lab.sandbox() as bench:
        script = 'printf %s "$1" | wc -c'
        longest = "a" * ((128 << 10) - 1)
        result = await bench.run(argv=("sh", "-c", script, "sh", longest))
        equal(result.text.strip(), str(len(longest)), "length of the argument inside")
        await raises(
            ArgumentsTooLongError, bench.run(argv=("true", longest + "a")), "a longer argument"
        )


@check()
async def environment_is_merged_and_removed(lab: Lab) -> None:
    """1,000 entries arrive; a null value removes; the request wins over the sandbox."""
    async with lab.sandbox(env={"GONE": "1", "WON": "spec"}) as bench:
        env: dict[str, str | None] = {f"CF_{n}": f"v\n{n}" for n in range(1000)}
        env |= {"GONE": None, "WON": "request"}
        script = 'env | grep -c ^CF_; echo "${GONE-unset} $WON"; printf %s "$CF_999"'
        result = await bench.run(script, env=env)
        equal(result.text, "1000\nunset request\nv\n999", "environment inside")


@check()
async def what_is_missing_is_not_executed(lab: Lab) -> None:
    """A command that never ran is told from one that failed."""
    async with lab.sandbox() as bench:
        await raises(ProgramNotFoundError, bench.run(argv=("no-such-program",)), "program")
        await raises(ProgramNotFoundError, bench.run(argv=("./no-such-program",)), "path")
        await raises(ShellNotFoundError, bench.run("true", shell="/no/such/shell"), "shell")
        await raises(WorkdirNotFoundError, bench.run("true", cwd="/no/such/dir"), "cwd")
        await bench.write("file", b"")
        await raises(WorkdirNotFoundError, bench.run("true", cwd="/work/file"), "cwd is a file")
        await raises(UserNotFoundError, bench.run("true", user="no-such-user"), "user")


@check()
async def what_cannot_be_executed_is_said(lab: Lab) -> None:
    """No execute permission, and an interpreter that is not there."""
    async with lab.sandbox() as bench:
        await bench.write("plain", b"#!/bin/sh\n")
        await raises(ProgramNotExecutableError, bench.run(argv=("./plain",)), "mode 644")
        await bench.write("orphan", b"#!/no/such/interpreter\n", mode=0o755)
        await raises(ProgramNotExecutableError, bench.run(argv=("./orphan",)), "no interpreter")
        await bench.write("script", b"#!/bin/sh\necho ran\n", mode=0o755)
        result = await bench.run(argv=("./script",))
        equal(result.stdout, b"ran\n", "a script that can be executed")


@check()
async def commands_run_at_the_same_time(lab: Lab) -> None:
    """Eight commands that wait for one another all end."""
    async with lab.sandbox() as bench:
        script = "touch at.{n}; while [ $(ls | grep -c ^at) -lt 8 ]; do sleep 0.02; done"
        results = await asyncio.gather(*(bench.run(script.format(n=n)) for n in range(8)))
        equal({result.reason for result in results}, {Reason.EXIT}, "reasons")


@check()
async def nothing_of_the_host_is_inherited(lab: Lab) -> None:
    """A descriptor that leaks is a way out."""
    async with lab.sandbox() as bench:
        result = await bench.run("ls /proc/self/fd | wc -l")
        equal(result.text.strip(), "4", "descriptors of ls (0, 1, 2 and the directory)")


@check()
async def resources_are_known_or_null(lab: Lab) -> None:
    """CPU time is never negative and never made up."""
    async with lab.sandbox() as bench:
        result = await bench.run("i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done")
        used = result.resources
        expect(used.cpu_user_s is None or used.cpu_user_s > 0, f"user time {used.cpu_user_s}")
        expect(used.cpu_system_s is None or used.cpu_system_s >= 0, "negative system time")
        peak = used.memory_peak_bytes
        expect(peak is None or peak > 0, f"memory peak {peak}")


@check("users")
async def users_of_the_image_are_honoured(lab: Lab) -> None:
    """Root by default, and any other by number."""
    async with lab.sandbox() as bench:
        equal((await bench.run("id -u")).text, "0\n", "default user")
        equal(
            (await bench.run("id -u; id -g", user="1234:99")).text, "1234\n99\n", "user by number"
        )


@check("isolation")
async def pid_one_cannot_be_killed_from_inside(lab: Lab) -> None:
    """The agent owns everything in the sandbox but its end."""
    async with lab.sandbox() as bench:
        await bench.run("kill -9 1; kill -TERM 1")
        equal((await bench.run("echo alive")).stdout, b"alive\n", "after kill -9 1")


@check("isolation")
async def processes_of_others_are_not_seen(lab: Lab) -> None:
    """Two sandboxes do not see each other's processes or files."""
    async with lab.sandbox() as one, lab.sandbox() as other:
        await one.start("touch mine; exec sleep 61")
        seen = await other.run("cat /proc/[0-9]*/comm; ls")
        expect(b"sleep" not in seen.stdout and b"mine" not in seen.stdout, "another was seen")


@check("memory", "isolation")
async def memory_limit_is_enforced(lab: Lab) -> None:
    """One sandbox's greed ends its own command, and says so."""
    async with lab.sandbox(memory_bytes=32 << 20) as bench:
        result = await bench.run("head -c 200000000 /dev/zero | tail -c 190000000 | wc -c")
        kills = result.resources.oom_kills
        killed = result.reason is Reason.OOM or bool(kills) or result.text.strip() != "190000000"
        expect(killed, "190 MB were held in a sandbox of 32 MiB")
        equal((await bench.run("echo alive")).stdout, b"alive\n", "after the OOM kill")


@check("pids", "isolation")
async def process_limit_is_enforced(lab: Lab) -> None:
    """A fork bomb stays in its sandbox."""
    async with lab.sandbox(pids=16) as bench:
        await bench.run("for i in $(seq 40); do sleep 60 & done; wait", deadline_s=3.0)
        number = len(await bench.handle.processes())
        expect(number < 16, f"{number} processes live under a limit of 16")
        await bench.handle.kill_processes()
        result = await bench.run("for i in 1 2 3; do (echo x); done")
        equal(result.stdout, b"x\nx\nx\n", "output after the bomb")
