"""Checks of a runtime: processes, ports, and the end of sandboxes."""

from __future__ import annotations

import asyncio
import tempfile
from functools import partial
from pathlib import Path

from coldframe.protocol.errors import (
    CapabilityError,
    PortUnreachableError,
    SandboxGoneError,
)
from coldframe.protocol.models import ExecResult, Reason, SandboxSpec
from coldframe.runtimes.self_check_lab import (
    Bench,
    Checks,
    Lab,
    NotApplicableError,
    equal,
    expect,
    pieces,
    raises,
    read_all,
    read_until,
    until,
)

check = Checks()

_LISTENERS = {
    "python3": (
        "exec python3 -c \"import socket; s = socket.create_server(('127.0.0.1', 0));"
        " print(s.getsockname()[1], flush=True); c, _ = s.accept();"
        " c.sendall(b'hello ' + c.recv(9)); c.close(); s.accept()\""
    ),
    "busybox": "echo 18080; exec busybox nc -l -p 18080 -e cat",
}
"""Command lines that listen, print their port, and answer."""


async def _listens(bench: Bench, port: int) -> bool:
    return port in await bench.handle.listening_ports()


async def _listen(bench: Bench) -> int:
    """Start a server in the sandbox and return its port."""
    for program, command in _LISTENERS.items():
        if (await bench.run(f"command -v {program}")).ok:
            running = await bench.start(command)
            port = int(await read_until(running, b"\n"))
            await until(partial(_listens, bench, port))
            return port
    raise NotApplicableError(f"the image has none of {', '.join(_LISTENERS)}")


@check()
async def processes_are_listed_by_their_exec(lab: Lab) -> None:
    """Whose leftovers they are can be told; pid 1 is not among them."""
    async with lab.sandbox() as bench:
        equal(await bench.handle.processes(), (), "processes of a new sandbox")
        one = await bench.start("echo ready; exec sleep 61", operation_id="op-one")
        two = await bench.start("sleep 62 & echo ready; wait", operation_id="op-two")
        await asyncio.gather(read_until(one, b"ready"), read_until(two, b"ready"))
        owners = [process.operation_id for process in await bench.handle.processes()]
        equal(sorted(map(str, owners)), ["op-one", "op-two", "op-two"], "owners")


@check()
async def processes_of_one_exec_can_be_killed(lab: Lab) -> None:
    """And then everything; what was killed is returned once it is dead."""
    async with lab.sandbox() as bench:
        handle = bench.handle
        one = await bench.start("(setsid sleep 61 &); echo ready; sleep 62", operation_id="op-one")
        two = await bench.start("echo ready; exec sleep 63", operation_id="op-two")
        await asyncio.gather(read_until(one, b"ready"), read_until(two, b"ready"))
        killed = await handle.kill_processes("op-one")
        expect(len(killed) >= 2, f"only {killed} were killed")
        equal((await one.wait()).reason, Reason.SIGNAL, "end of the killed")
        left = await handle.processes()
        equal([process.operation_id for process in left], ["op-two"], "what is left")
        equal(len(await handle.kill_processes()), 1, "number of all that is killed")
        equal(await handle.processes(), (), "what is left of all")
        equal(await handle.kill_processes(), (), "killing nothing")
        equal((await bench.run("echo alive")).stdout, b"alive\n", "the sandbox afterwards")


@check("ports")
async def ports_can_be_listed_and_reached(lab: Lab) -> None:
    """A server in the sandbox is reached from within its namespace."""
    async with lab.sandbox() as bench:
        equal(await bench.handle.listening_ports(), (), "ports of a new sandbox")
        port = await _listen(bench)
        equal(await bench.handle.listening_ports(), (port,), "ports")
        reader, writer = await bench.handle.connect(port)
        writer.write(b"there\n")
        await writer.drain()
        expect(b"there" in await reader.readline(), "the server did not answer")
        writer.close()


@check("ports")
async def closed_port_is_a_typed_refusal(lab: Lab) -> None:
    """Nothing listens there."""
    async with lab.sandbox() as bench:
        await raises(PortUnreachableError, bench.handle.connect(9), "a closed port")


@check()
async def upper_can_be_exported(lab: Lab) -> None:
    """What was written becomes a layer; what runs is killed first."""
    async with lab.sandbox() as bench:
        await bench.write("dir/f", b"written", mode=0o640)
        await bench.run("ln -s f dir/l")
        running = await bench.start("echo ready; exec sleep 60")
        await read_until(running, b"ready")
        with tempfile.TemporaryDirectory() as target:
            await bench.handle.export_upper(Path(target))
            await asyncio.to_thread(_check_layer, Path(target, "work/dir"))
        equal((await running.wait()).reason, Reason.SIGNAL, "end of what ran")


def _check_layer(directory: Path) -> None:
    exported = directory / "f"
    equal(exported.read_bytes(), b"written", "content in the layer")
    equal(exported.stat().st_mode & 0o7777, 0o640, "mode in the layer")
    equal(str((directory / "l").readlink()), "f", "link in the layer")


@check()
async def destroy_ends_what_runs_as_sandbox_gone(lab: Lab) -> None:
    """With what was printed; a reader sees the end, never a hang. Twice is fine."""
    async with lab.sandbox() as bench:
        running = await bench.start("echo there; (setsid sleep 61 &); sleep 60", stdin_open=True)
        await read_until(running, b"there\n")
        reading = asyncio.ensure_future(running.read("stdout", 6, 100))
        waiting = asyncio.ensure_future(running.wait())
        await asyncio.gather(bench.handle.destroy(), bench.handle.destroy())
        result = await waiting
        equal((result.reason, result.stdout), (Reason.SANDBOX_GONE, b"there\n"), "end")
        equal((await reading).eof, True, "eof for a reader")
        chunks = await read_all(running)
        equal(b"".join(chunk.data for chunk in chunks), b"there\n", "output afterwards")
        await bench.handle.destroy()
        expect(not bench.handle.gone.done(), "a destroyed sandbox counts as gone by itself")


@check()
async def destroy_meets_commands_that_start(lab: Lab) -> None:
    """Each ends at once, as gone or never begun; none hangs and none survives."""
    for steps in range(6):
        async with lab.sandbox() as bench:
            runs = [asyncio.ensure_future(bench.run("echo x; sleep 60")) for _ in range(3)]
            for _ in range(steps):
                await asyncio.sleep(0)
            await bench.handle.destroy()
            for outcome in await asyncio.gather(*runs, return_exceptions=True):
                if isinstance(outcome, ExecResult):
                    equal(outcome.reason, Reason.SANDBOX_GONE, "end of a command")
                else:
                    gone = isinstance(outcome, SandboxGoneError)
                    expect(gone, f"a command that had begun: {outcome!r}")


@check()
async def destroyed_sandbox_refuses_everything(lab: Lab) -> None:
    """By one typed error."""
    async with lab.sandbox() as bench:
        handle = bench.handle
        await handle.destroy()
        await raises(SandboxGoneError, bench.run("true"), "exec")
        await raises(SandboxGoneError, handle.files.stat("/"), "stat")
        await raises(SandboxGoneError, handle.files.write("/f", pieces(b"x")), "write")
        await raises(SandboxGoneError, handle.processes(), "processes")
        await raises(SandboxGoneError, handle.connect(80), "connect")


@check("end_sandbox")
async def sandbox_that_dies_is_noticed(lab: Lab) -> None:
    """`gone` resolves, commands end with what they printed, nothing hangs."""
    async with lab.sandbox() as bench:
        running = await bench.start("echo there; sleep 60")
        await read_until(running, b"there\n")
        assert lab.end_sandbox is not None
        await lab.end_sandbox(bench.handle)
        gone = await asyncio.wait_for(asyncio.shield(bench.handle.gone), 20)
        expect(bool(gone.cause), "no cause is given")
        result = await running.wait()
        equal((result.reason, result.stdout), (Reason.SANDBOX_GONE, b"there\n"), "end")
        await raises(SandboxGoneError, bench.run("true"), "exec afterwards")


@check()
async def strays_are_described(lab: Lab) -> None:
    """A live sandbox that should not be alive is a leak, and no other is."""
    async with lab.sandbox() as one, lab.sandbox() as other:
        await one.start("sleep 61")
        live = [one.handle.id, other.handle.id]
        equal(await _strays(lab, live), [], "strays while all should be alive")
        strays = await _strays(lab, [other.handle.id])
        expect(len(strays) > 0, "a sandbox that should not be alive is no stray")
    equal(await _strays(lab, []), [], "strays in the end")


async def _strays(lab: Lab, live: list[str]) -> list[str]:
    """Strays that name a sandbox of this check: others may have some of their own."""
    return [
        stray for stray in await lab.runtime.leaks(live) if any(made in stray for made in lab.made)
    ]


@check()
async def unenforceable_disk_limit_is_refused(lab: Lab) -> None:
    """A limit that is taken is kept."""
    if "disk" in lab.runtime.capabilities().limits:
        raise NotApplicableError("this runtime enforces disk_bytes")
    spec = SandboxSpec(image=lab.image.name, disk_bytes=1 << 20)
    create = lab.runtime.create("sb-000000-0000000000", spec, lab.image)
    await raises(CapabilityError, create, "disk_bytes")
    strays = await lab.runtime.leaks([])
    expect(not any("sb-000000-0000000000" in stray for stray in strays), "something was left")


@check()
async def sandboxes_share_no_files(lab: Lab) -> None:
    """Each has an upper of its own."""
    async with lab.sandbox() as one, lab.sandbox() as other:
        await one.write("mine", b"x")
        equal((await other.run("ls")).stdout, b"", "files of another")


@check("disk")
async def disk_limit_is_enforced(lab: Lab) -> None:
    """A full disk is the sandbox's own, and the command learns it."""
    async with lab.sandbox(disk_bytes=16 << 20) as bench:
        result = await bench.run("head -c 100000000 /dev/zero > big")
        expect(not result.ok, "100 MB were written under a limit of 16 MiB")
