"""Checks of a runtime: reading, stdin, terminals and signals while a command runs."""

from __future__ import annotations

import asyncio
import signal
from functools import partial

from coldframe.protocol.errors import InvalidRequestError
from coldframe.protocol.models import PtySize, Reason, SignalScope
from coldframe.runtimes.base import RunningExec
from coldframe.runtimes.self_check_lab import (
    Bench,
    Checks,
    Lab,
    equal,
    expect,
    raises,
    read_all,
    read_until,
    until,
)

check = Checks()
_WAIT_FOR_GO = "while [ ! -e go ]; do sleep 0.02; done"


# --- reading --------------------------------------------------------------------------


@check()
async def output_can_be_read_while_it_runs(lab: Lab) -> None:
    """Streaming: bytes come before the end, eof only at the end, any cursor again."""
    async with lab.sandbox() as bench:
        running = await bench.start(f"echo one; {_WAIT_FOR_GO}; echo two")
        first = await running.read("stdout", 0, 1 << 16)
        equal((first.data, first.eof), (b"one\n", False), "first chunk")
        nothing = await running.read("stdout", 4, 1 << 16, wait=False)
        equal((nothing.data, nothing.eof), (b"", False), "nothing yet")
        await bench.write("go", b"")
        equal(await read_until(running, b"two\n"), b"one\ntwo\n", "the whole")
        await running.wait()
        equal(b"".join(c.data for c in await read_all(running)), b"one\ntwo\n", "read again")
        part = await running.read("stdout", 2, 3)
        equal((part.offset, part.data), (2, b"e\nt"), "a part")


@check()
async def cancelled_read_loses_nothing(lab: Lab) -> None:
    """A client that lost its connection reads on from its cursor."""
    async with lab.sandbox() as bench:
        running = await bench.start(f"{_WAIT_FOR_GO}; echo there")
        reading = asyncio.ensure_future(running.read("stdout", 0, 100))
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait([reading])
        await bench.write("go", b"")
        equal(await read_until(running, b"\n"), b"there\n", "read after the cancelled one")


@check()
async def several_may_wait_and_be_cancelled(lab: Lab) -> None:
    """One waiter that gives up does not end the command for the others."""
    async with lab.sandbox() as bench:
        running = await bench.start(f"{_WAIT_FOR_GO}; exit 3")
        waiters = [asyncio.ensure_future(running.wait()) for _ in range(3)]
        await asyncio.sleep(0)
        waiters[0].cancel()
        await bench.write("go", b"")
        results = await asyncio.gather(*waiters[1:])
        equal({result.exit_code for result in results}, {3}, "what the others got")


@check()
async def mark_is_a_boundary_of_output(lab: Lab) -> None:
    """Whatever was written before is below the totals. Sessions tell commands apart by it."""
    async with lab.sandbox() as bench:
        running = await bench.start(f"echo out; echo err >&2; touch said; {_WAIT_FOR_GO}")
        await until(lambda: bench.has("said"))
        equal(await running.mark(), (4, 4), "totals")
        chunk = await running.read("stdout", 0, 100, wait=False)
        equal(chunk.data, b"out\n", "what can be read at once")


@check()
async def forgotten_output_is_gone_but_the_rest_goes_on(lab: Lab) -> None:
    """Dropping a spool ends nothing."""
    async with lab.sandbox() as bench:
        running = await bench.start("sleep 60 & echo x")
        await running.wait()
        await running.forget()
        equal(len(await bench.process_names()), 1, "processes after forget")


@check()
async def status_pipe_is_a_stream_apart(lab: Lab) -> None:
    """Sessions learn exit codes by it, without markers in stdout."""
    async with lab.sandbox() as bench:
        running = await bench.start("echo 5 >&3; echo out", status_pipe=True)
        result = await running.wait()
        equal(result.stdout, b"out\n", "stdout")
        equal(b"".join(c.data for c in await read_all(running, "status")), b"5\n", "status")
        plain = await bench.start("true")
        await raises(InvalidRequestError, plain.read("status", 0, 10), "status without a pipe")


# --- stdin ----------------------------------------------------------------------------


@check()
async def stdin_is_closed_by_default(lab: Lab) -> None:
    """A command that reads must not hang."""
    async with lab.sandbox() as bench:
        result = await bench.run("cat; echo end")
        equal(result.stdout, b"end\n", "output of cat with closed stdin")
        plain = await bench.start("true")
        await raises(InvalidRequestError, plain.write_stdin(b"x"), "write to a closed stdin")


@check()
async def stdin_that_is_given_arrives_whole(lab: Lab) -> None:
    """More than a pipe holds, then end of file."""
    async with lab.sandbox() as bench:
        data = bytes(range(256)) * 2000
        result = await bench.run("cat", stdin=data)
        expect(result.stdout == data, f"{len(result.stdout)} of {len(data)} bytes came back")
        ignored = await bench.run("true", stdin=data)
        equal(ignored.reason, Reason.EXIT, "a command that reads none of it")


@check()
async def stdin_that_is_open_can_be_written(lab: Lab) -> None:
    """A conversation with a running program."""
    async with lab.sandbox() as bench:
        running = await bench.start("cat", stdin=b"given ", stdin_open=True)
        await running.write_stdin(b"and written\n")
        equal(await read_until(running, b"\n"), b"given and written\n", "echo")
        await running.close_stdin()
        await running.close_stdin()
        equal((await running.wait()).reason, Reason.EXIT, "end after end of file")


@check()
async def open_stdin_does_not_hold_the_end(lab: Lab) -> None:
    """A command that ends without reading ends."""
    async with lab.sandbox() as bench:
        equal((await bench.run("echo x", stdin_open=True)).stdout, b"x\n", "output")


@check()
async def writing_to_nobody_is_a_broken_pipe(lab: Lab) -> None:
    """Else a writer would wait for ever."""
    async with lab.sandbox() as bench:
        running = await bench.start("exec <&-; echo closed; sleep 60", stdin_open=True)
        await read_until(running, b"closed\n")
        await raises(BrokenPipeError, running.write_stdin(b"x" * (1 << 20)), "write to nobody")


# --- terminals ------------------------------------------------------------------------


@check("pty")
async def terminal_is_one_and_has_its_size(lab: Lab) -> None:
    """Programs that ask get a terminal of the size that was asked for."""
    async with lab.sandbox() as bench:
        result = await bench.run(
            "[ -t 0 ] && [ -t 1 ] && [ -t 2 ] && stty size; echo err >&2",
            pty=PtySize(rows=33, cols=111),
        )
        equal(result.stdout.replace(b"\r", b""), b"33 111\nerr\n", "output")
        equal(result.stderr, b"", "stderr")


@check("pty")
async def terminal_can_be_resized(lab: Lab) -> None:
    """The program is told by SIGWINCH."""
    async with lab.sandbox() as bench:
        running = await bench.start(
            "trap 'stty size' WINCH; echo ready; while :; do sleep 0.05; done", pty=PtySize()
        )
        await read_until(running, b"ready")
        await running.resize(40, 132)
        await read_until(running, b"40 132")
        plain = await bench.start("true")
        await raises(InvalidRequestError, plain.resize(10, 10), "resize without a terminal")


@check("pty")
async def control_c_reaches_the_foreground(lab: Lab) -> None:
    """What is typed goes through the line discipline."""
    async with lab.sandbox() as bench:
        running = await bench.start("echo ready; exec sleep 60", pty=PtySize(), stdin_open=True)
        await read_until(running, b"ready")
        await running.write_stdin(b"\x03")
        result = await running.wait()
        equal((result.reason, result.signal), (Reason.SIGNAL, signal.SIGINT), "end")


# --- signals --------------------------------------------------------------------------

_FAMILY = (
    "setsid sh -c ': > far; exec sleep 61' & sleep 62 & "
    "while [ ! -e far ]; do sleep 0.02; done; echo ready; wait; echo waited"
)
"""A leader, one child in its group, and one in a session of its own."""


async def _family(bench: Bench) -> RunningExec:
    """Start a leader with children in its group and in another session."""
    running = await bench.start(_FAMILY)
    await read_until(running, b"ready")
    return running


async def _has_processes(bench: Bench, number: int) -> bool:
    return len(await bench.handle.processes()) == number


@check()
async def signal_to_the_leader_reaches_it_alone(lab: Lab) -> None:
    """Its children become leftovers."""
    async with lab.sandbox() as bench:
        running = await _family(bench)
        equal(await running.signal(signal.SIGKILL, SignalScope.LEADER), 1, "processes reached")
        result = await running.wait()
        equal((result.reason, result.signal), (Reason.SIGNAL, 9), "end")
        equal(len(await bench.process_names()), 2, "processes left")
        equal(await running.signal(signal.SIGKILL, SignalScope.LEADER), 0, "reached after the end")


@check()
async def signal_to_the_group_spares_other_sessions(lab: Lab) -> None:
    """As control-C would."""
    async with lab.sandbox() as bench:
        running = await _family(bench)
        equal(await running.signal(signal.SIGKILL), 2, "processes reached")
        await running.wait()
        await until(partial(_has_processes, bench, 1))


@check()
async def signal_to_the_tree_reaches_all(lab: Lab) -> None:
    """Daemonised ones too."""
    async with lab.sandbox() as bench:
        running = await _family(bench)
        equal(await running.signal(signal.SIGKILL, SignalScope.TREE), 3, "processes reached")
        result = await running.wait()
        equal((result.reason, result.signal), (Reason.SIGNAL, 9), "end")


@check()
async def signal_to_the_children_spares_the_leader(lab: Lab) -> None:
    """A session's shell survives the time-out of its command."""
    async with lab.sandbox() as bench:
        running = await _family(bench)
        equal(await running.signal(signal.SIGKILL, SignalScope.CHILDREN), 2, "processes reached")
        result = await running.wait()
        equal((result.reason, result.exit_code), (Reason.EXIT, 0), "end of the leader")
        expect(result.stdout.endswith(b"waited\n"), "the leader did not go on")
