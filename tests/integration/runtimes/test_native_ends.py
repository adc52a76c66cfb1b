"""Commands and native sandboxes that end before their time: destroyed, killed, out of memory."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from coldframe.protocol.errors import (
    SandboxGoneError,
)
from coldframe.protocol.ids import new_operation_id
from coldframe.protocol.models import ExecRequest, PtySize, Reason
from coldframe.runtimes.native import NativeRuntime
from tests.fixtures.runtime import MakeSandbox, open_descriptors, run

MIB = 1 << 20


async def test_exec_in_flight_at_destroy_ends_as_gone_with_its_output(
    make_sandbox: MakeSandbox,
) -> None:
    """An episode that is cut must not look like one that hung."""
    sandbox = await make_sandbox()
    running = await sandbox.start_exec(
        ExecRequest(command="echo before; sleep 1000"), new_operation_id()
    )
    assert (await running.read("stdout", 0, 100)).data == b"before\n"

    await asyncio.gather(sandbox.destroy(), sandbox.destroy())
    result = await running.wait()

    assert (result.reason, result.stdout) == (Reason.SANDBOX_GONE, b"before\n")
    for refused in (
        run(sandbox, "true"),
        sandbox.processes(),
        sandbox.listening_ports(),
        sandbox.files.stat("/"),
        sandbox.connect(80),
    ):
        with pytest.raises(SandboxGoneError):
            await refused


async def test_sandbox_whose_pid_one_is_killed_is_gone_with_its_output(
    make_sandbox: MakeSandbox,
) -> None:
    """The OOM killer may choose it; nobody must wait for ever."""
    sandbox = await make_sandbox()
    running = await sandbox.start_exec(
        ExecRequest(command="echo before; sleep 1000"), new_operation_id()
    )
    await running.read("stdout", 0, 100)
    os.kill(sandbox.parts.created.pid, signal.SIGKILL)

    gone = await asyncio.wait_for(sandbox.gone, 20)
    result = await asyncio.wait_for(running.wait(), 20)

    assert gone.cause == "signal 9"
    assert (result.reason, result.stdout) == (Reason.SANDBOX_GONE, b"before\n")
    with pytest.raises(SandboxGoneError):
        await run(sandbox, "true")
    await sandbox.destroy()


async def test_terminal_in_a_sandbox_whose_pid_one_was_killed_is_refused_as_gone(
    make_sandbox: MakeSandbox,
) -> None:
    """Its /dev/pts goes before anybody is told that it has ended; that is no missing file."""
    for _ in range(10):
        sandbox = await make_sandbox()
        os.kill(sandbox.parts.created.pid, signal.SIGKILL)
        request = ExecRequest(command="true", pty=PtySize())
        while not sandbox.gone.done():
            try:
                running = await sandbox.start_exec(request, new_operation_id())
            except SandboxGoneError:
                continue
            await running.wait()
        await sandbox.destroy()


def choose_for_oom(pid: int) -> None:
    """Make a process the largest that the OOM killer sees."""
    Path(f"/proc/{pid}/oom_score_adj").write_text("1000")


@pytest.mark.parametrize("hog", ["exec", "leftover"])
async def test_sandbox_whose_pid_one_the_oom_killer_chose_is_gone_as_oom(
    make_sandbox: MakeSandbox, hog: str
) -> None:
    """Told from a kill by hand: the sandbox had too little memory, and what ran in it ended so."""
    sandbox = await make_sandbox(memory_bytes=64 * MIB)
    choose_for_oom(sandbox.parts.created.pid)
    waiting = await sandbox.start_exec(
        ExecRequest(command="echo before; sleep 1000"), new_operation_id()
    )
    await waiting.read("stdout", 0, 100)
    # Two, so that neither is as large a victim as all of the memory makes pid 1.
    eating = "echo hog; for n in 1 2; do x=$(head -c 300000000 /dev/zero | tr '\\0' x) & done; wait"
    if hog == "leftover":
        assert (await run(sandbox, f"({eating}) & sleep 0.01")).reason is Reason.EXIT
    else:
        eater = await asyncio.wait_for(run(sandbox, eating), 20)
        assert (eater.reason, eater.stdout) == (Reason.SANDBOX_GONE, b"hog\n")
        assert eater.resources.oom_kills

    gone = await asyncio.wait_for(sandbox.gone, 20)
    result = await asyncio.wait_for(waiting.wait(), 20)

    assert gone.cause == "oom"
    assert (result.reason, result.stdout) == (Reason.SANDBOX_GONE, b"before\n")
    with pytest.raises(SandboxGoneError):
        await run(sandbox, "true")
    await sandbox.destroy()


async def test_memory_hog_ends_as_oom_and_the_sandbox_lives(make_sandbox: MakeSandbox) -> None:
    """The agent's fault is told from ours, and the next command runs."""
    sandbox = await make_sandbox(memory_bytes=64 * MIB)

    result = await run(sandbox, "x=$(head -c 200000000 /dev/zero | tr '\\0' x); echo $?")
    assert result.resources.oom_kills is not None
    assert result.resources.oom_kills > 0
    assert (await run(sandbox, "echo alive")).stdout == b"alive\n"


async def test_idle_sandbox_costs_at_most_two_descriptors(
    make_sandbox: MakeSandbox, native_runtime: NativeRuntime
) -> None:
    """2,000 of them must fit."""
    await make_sandbox()
    before = len(open_descriptors())
    for _ in range(10):
        await run(await make_sandbox(), "true")

    assert len(open_descriptors()) - before <= 20
