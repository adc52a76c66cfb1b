"""Connections that other processes carry: they must be as good as those that the node carries."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from coldframe.host.egress import annex, desk
from coldframe.host.egress.events import EventLog
from coldframe.host.egress.flows import Budget, Flow
from coldframe.host.egress.policy import Engine
from coldframe.host.egress.resolver import Names, SystemResolver
from coldframe.images.base import Image
from coldframe.images.store import ImageStore
from coldframe.protocol.ids import new_operation_id, new_sandbox_id
from coldframe.protocol.models import ExecRequest, SandboxSpec
from coldframe.protocol.network import EgressDecision, EgressKind, NetworkPolicy
from coldframe.runtimes.base import RunningExec
from tests.fixtures.egress import (
    OTHER,
    WEB,
    Fenced,
    Internet,
    MakeFenced,
    fenced_runtime,
    open_flows,
)
from tests.fixtures.waiting import until
from tests.integration.egress.conftest import SWAP, TALK

HOLD = """
import socket, sys
links = [socket.create_connection((host, 7), 5) for host in sys.argv[1:]]
for link in links: link.recv(6)
print("ready", flush=True)
sys.stdin.readline()
for host, link in zip(sys.argv[1:], links):
    try:
        link.sendall(b"still")
        print(host, link.recv(5))
    except OSError as error: print(host, type(error).__name__)
"""


@pytest.fixture(autouse=True)
def scarce(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node's own descriptors count as scarce from the first connection on."""
    monkeypatch.setattr(desk, "_SCARCE", -1.0)


async def hold(box: Fenced, *hosts: str) -> RunningExec:
    """Open connections inside, and return when all have been answered."""
    request = ExecRequest(argv=("python3", "-c", HOLD, *hosts), stdin_open=True, deadline_s=60.0)
    running = await box.sandbox.start_exec(request, new_operation_id())
    await running.read("stdout", 0, 100)
    return running


def pids(box: Fenced) -> tuple[int, ...]:
    """Processes that carry for a sandbox's node."""
    gateway = box.sandbox.parts.egress._gateway
    assert gateway is not None
    return gateway.desk.room.annex.pids


def runs(pid: int) -> bool:
    """Whether there is such a process."""
    return Path(f"/proc/{pid}").exists()


async def test_much_arrives_whole_and_each_way_ends_by_itself(
    servers: Internet, fenced: MakeFenced
) -> None:
    """Nothing of a connection may be lost on its way to another process."""
    box = await fenced(WEB, "web.example:80")
    assert await box.python(SWAP, "32") == "True\n"
    assert len(pids(box)) == 1
    closed = await box.event(decision=EgressDecision.CLOSED)
    assert (closed.bytes_out, closed.bytes_in) == (32 << 20, (32 << 20) + 6)


async def test_new_policy_cuts_what_it_does_not_allow_before_it_is_in_force(
    servers: Internet, fenced: MakeFenced
) -> None:
    """Another process must not keep a door open for a moment longer."""
    box = await fenced(WEB, OTHER)
    running = await hold(box, WEB, OTHER)
    gateway = box.sandbox.parts.egress._gateway
    assert gateway is not None
    assert open_flows(gateway.desk) == 2

    await box.set(OTHER)
    assert open_flows(gateway.desk) == 1
    await running.write_stdin(b"\n")

    lines = (await running.wait()).stdout.decode().splitlines()
    assert lines == ["ready", f"{WEB} ConnectionResetError", f"{OTHER} b'still'"]
    cut = await box.event(decision=EgressDecision.CUT)
    assert (cut.address, cut.bytes_out, cut.bytes_in) == (WEB, 0, 6)


async def test_limits_that_come_later_cut_what_they_cannot_hold(
    servers: Internet, fenced: MakeFenced
) -> None:
    """Limits are counted in the node: a connection elsewhere would escape them."""
    box = await fenced(WEB)
    running = await hold(box, WEB)

    await box.set(WEB, max_bytes=1000)
    await running.write_stdin(b"\n")

    assert b"ConnectionResetError" in (await running.wait()).stdout
    cut = await box.event(decision=EgressDecision.CUT)
    assert "limits" in cut.reason
    said = await box.python(TALK, WEB, "7", (b"x" * 5000).hex())
    assert said.count("x") < 1000


PATIENT = """
import socket, sys
links = [socket.create_connection(("203.0.113.10", 77), 60) for _ in range(int(sys.argv[1]))]
def answered(link):
    try:
        link.sendall(b"x")
        return link.recv(1) == b"x"
    except OSError: return False
print(sum(map(answered, links)))
"""
"""Opens so many connections before it says a word, and counts those that were answered."""


async def test_connections_wait_for_a_process_that_is_slow_to_begin(
    servers: Internet, fenced: MakeFenced, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes long on a busy machine; what was refused meanwhile would be lost without need."""
    monkeypatch.setattr(annex, "_START", f"import time; time.sleep(1); {annex._START}")
    monkeypatch.setattr(desk, "_SCARCE", 0.25)
    box = await fenced(WEB)
    gateway = box.sandbox.parts.egress._gateway
    assert gateway is not None
    gateway.desk.room = replace(gateway.desk.room, near=Budget(64))

    with servers.echo_process(WEB, 77):
        assert await box.python(PATIENT, "1000", deadline_s=60.0) == "1000\n"
    assert not box.events(decision=EgressDecision.REFUSED)


async def test_connections_on_their_way_to_a_process_that_dies_are_carried_all_the_same(
    servers: Internet, fenced: MakeFenced
) -> None:
    """What it never got is still the node's; nobody may wait for an answer of the dead."""
    box = await fenced(WEB, OTHER)
    held = await hold(box, WEB)
    (pid,) = pids(box)
    os.kill(pid, signal.SIGSTOP)
    request = ExecRequest(argv=("python3", "-c", PATIENT, "1000"), deadline_s=60.0)
    gateway = box.sandbox.parts.egress._gateway
    assert gateway is not None
    with servers.echo_process(WEB, 77):
        running = await box.sandbox.start_exec(request, new_operation_id())
        await until(lambda: open_flows(gateway.desk) == 1001)
        os.kill(pid, signal.SIGKILL)
        result = await running.wait()
    await held.write_stdin(b"\n")
    await held.wait()
    assert 0 < int(result.stdout) < 1000


async def test_process_that_dies_breaks_its_connections_and_is_replaced(
    servers: Internet, fenced: MakeFenced
) -> None:
    """Whoever waits must be told, and the next connection must not suffer."""
    box = await fenced(WEB)
    running = await hold(box, WEB)
    (pid,) = pids(box)

    os.kill(pid, signal.SIGKILL)
    await until(lambda: bool(box.events(decision=EgressDecision.CLOSED)))
    await running.write_stdin(b"\n")

    assert b"still" not in (await running.wait()).stdout
    assert await box.python(TALK, WEB, "7", b"x".hex()) == "hello\nx"
    assert pids(box) != (pid,)


async def test_process_that_does_not_let_go_is_ended(
    servers: Internet, fenced: MakeFenced, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy must not wait for ever for somebody who does not listen."""
    monkeypatch.setattr(annex, "_END_S", 0.2)
    box = await fenced(WEB)
    running = await hold(box, WEB)
    (pid,) = pids(box)

    os.kill(pid, signal.SIGSTOP)
    await box.set(OTHER)
    assert not runs(pid)
    await running.write_stdin(b"\n")

    assert b"still" not in (await running.wait()).stdout
    assert (await box.event(decision=EgressDecision.CUT)).address == WEB


async def test_no_process_outlives_its_node(
    servers: Internet, tmp_path: Path, image_store: ImageStore, debian_image: Image
) -> None:
    """They hold the sandbox's sockets, and so its network."""
    async with fenced_runtime(tmp_path, image_store, servers) as runtime:
        spec = SandboxSpec(image=debian_image.name, network=NetworkPolicy.parse(WEB))
        box = Fenced(await runtime.create(new_sandbox_id(runtime.node_id), spec, debian_image))
        await hold(box, WEB, WEB)
        (pid,) = pids(box)
        assert runs(pid)
        await box.sandbox.destroy()
    assert not runs(pid)


@pytest.mark.root
async def test_process_has_no_rights_and_ends_with_a_node_that_is_killed() -> None:
    """It needs nothing but what it is given; and nobody is left to end it."""
    script = """
import asyncio
from coldframe.host.egress.annex import Annex
async def main():
    annex = Annex(20000)
    print(annex._with_room().pid, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""
    node = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=-1)
    assert node.stdout is not None
    pid = int(await node.stdout.readline())
    await until(lambda: field(pid, "Uid") == ["65534"] * 4)
    assert field(pid, "CapEff") == field(pid, "CapPrm") == ["0" * 16]
    assert field(pid, "Groups") == []

    node.kill()
    await node.wait()
    await until(lambda: not runs(pid))


def field(pid: int, name: str) -> list[str]:
    """Words of a line of a process' status."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return value.split()
    return []


def test_sandbox_that_takes_all_it_can_leaves_room_for_others() -> None:
    """Descriptors are the node's: one sandbox must not starve its neighbours of them."""
    budget = Budget(1000)
    taken = [0] * 4
    for number in range(4):
        while budget.take(taken[number]):
            taken[number] += 1

    assert taken == [500, 250, 125, 63]
    for _ in range(taken[0]):
        budget.give_back()
    assert budget.take(taken[3])


async def test_connection_that_is_cut_as_it_comes_leaves_nothing() -> None:
    """A flood meets the end of a policy: what was never served must be given back all the same."""
    near, engine = Budget(4), Engine(NetworkPolicy.parse(WEB), lambda _: False, ())
    names = Names(SystemResolver())
    desk_ = desk.Desk(engine, names, EventLog("sb"), desk.Room(near, annex.Annex(20_000)))
    ours, theirs = socket.socketpair()

    async def never(_: Flow) -> None:
        raise AssertionError

    with ours:
        desk_.serve(EgressKind.TCP, theirs, never)
        await desk_.close()
        assert (near.taken, open_flows(desk_), theirs.fileno()) == (0, 0, -1)
