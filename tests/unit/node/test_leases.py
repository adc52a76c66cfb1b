"""What ends by itself: leases, what is kept for a while behind them, ends that fail."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from coldframe.node.node import Node
from coldframe.protocol.errors import (
    CapacityError,
    Execution,
    InvalidRequestError,
    SandboxGoneError,
    SandboxStateError,
)
from coldframe.protocol.models import (
    ExecRequest,
    Reason,
    SandboxSpec,
    SandboxState,
)
from tests.fixtures.waiting import until_asked
from tests.unit.node.conftest import SPEC, HeldRuntime, NodeMaker, ended, handle_of

TRUE = ExecRequest(argv=("true",))


async def test_lease_that_ends_deletes_and_counts_apart(node: Node) -> None:
    """Forgotten sandboxes must not pile up, and must be told from deleted ones."""
    info = await node.create_sandbox(SandboxSpec(image="any", ttl_s=0.05))

    last = await ended(node, info.id)

    assert (last.state, last.expired) == (SandboxState.DELETED, True)
    ledger = await node.ledger()
    assert (ledger.expired, ledger.deleted, ledger.live) == (1, 0, 0)
    with pytest.raises(SandboxGoneError, match="lease ended"):
        await node.exec(info.id, TRUE)


async def test_lease_that_is_renewed_lasts(node: Node) -> None:
    """From now on, not from the creation; null means never."""
    short, other = [await node.create_sandbox(SPEC) for _ in range(2)]
    for one in (short, other):
        await node.renew(one.id, 0.2)

    renewed = await node.renew(short.id, 3600)
    assert renewed.expires_at == pytest.approx(time.time() + 3600, abs=5)
    await ended(node, other.id)
    assert (await node.get(short.id)).state is SandboxState.READY

    assert (await node.renew(short.id, None)).expires_at is None


async def test_sandbox_whose_lease_ended_can_be_read_until_its_window_ends(
    make_node: NodeMaker,
) -> None:
    """Whoever lost its client finds out why: files and output are there, and nothing runs on."""
    node = await make_node(quarantine_s=3.0)
    info = await node.create_sandbox(SPEC)
    command = "echo seen > note; echo said; sleep 60"
    running = await node.start_exec(info.id, ExecRequest(command=command, operation_id="op"))
    assert running == "op"
    while not (await node.read_output("op", "stdout")).data:
        pass
    await node.renew(info.id, 0.05)

    result = await node.wait_exec("op")
    kept = await node.get(info.id)

    assert (result.reason, result.stdout) == (Reason.SANDBOX_GONE, b"said\n")
    assert (kept.state, kept.expired) == (SandboxState.TERMINATING, True)
    assert kept.kept_until == pytest.approx(time.time() + 3.0, abs=2.9)
    assert "lease ended" in (kept.reason or "")
    files = node.files(info.id)
    assert b"".join([piece async for piece in files.read("/note")]) == b"seen\n"
    assert (await node.read_output("op", "stdout")).data == b"said\n"
    assert await node.exec(info.id, ExecRequest(command=command, operation_id="op")) == result
    for refused in (
        node.exec(info.id, TRUE),
        node.renew(info.id, 60),
        files.write("/note", _nothing()),
        files.remove("/note"),
    ):
        with pytest.raises(SandboxStateError, match="lease ended"):
            await refused
    assert (await node.ledger()).live == 1

    last = await ended(node, info.id)

    assert (last.state, last.expired) == (SandboxState.DELETED, True)
    ledger = await node.ledger()
    assert (ledger.expired, ledger.live, ledger.leaked) == (1, 0, 0)
    with pytest.raises(SandboxGoneError):
        await files.list("/")


async def test_kept_sandbox_is_deleted_at_once_and_makes_room_when_the_node_is_full(
    make_node: NodeMaker,
) -> None:
    """Diagnosis must be in nobody's way."""
    node = await make_node(quarantine_s=3600.0, max_sandboxes=2)
    first = await node.create_sandbox(SandboxSpec(image="any", ttl_s=0.02))
    await until_asked(lambda: _is(node, first.id, SandboxState.TERMINATING))
    second = await node.create_sandbox(SandboxSpec(image="any", ttl_s=0.02))
    await until_asked(lambda: _is(node, second.id, SandboxState.TERMINATING))

    with pytest.raises(CapacityError):
        await node.create_sandbox(SPEC)
    await ended(node, first.id)
    await node.create_sandbox(SPEC)
    assert (await node.get(second.id)).state is SandboxState.TERMINATING
    assert (await node.delete(second.id)).state is SandboxState.DELETED
    assert (await node.ledger()).expired == 2


async def test_command_that_waits_for_its_turn_ends_with_the_lease(make_node: NodeMaker) -> None:
    """Whoever asked would wait as long as others compute, for what is never run."""
    node = await make_node(quarantine_s=3600.0, exec_slots=1, exec_hold_s=60.0)
    others, leased = [await node.create_sandbox(SPEC) for _ in range(2)]
    holds = await node.start_exec(others.id, ExecRequest(command="sleep 60"))
    waits = asyncio.ensure_future(node.exec(leased.id, TRUE))
    await asyncio.sleep(0)

    await node.renew(leased.id, 0.02)

    with pytest.raises(SandboxGoneError) as refused:
        await asyncio.wait_for(waits, 30)
    assert refused.value.execution is Execution.NOT_EXECUTED
    await node.cancel_exec(holds)


async def _nothing() -> AsyncIterator[bytes]:
    yield b""


async def test_lease_that_ends_while_its_sandbox_is_deleted_is_no_fault(
    make_node: NodeMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is gone has no processes to be killed; a service ended with an error for it."""
    node = await make_node(quarantine_s=3600.0)
    info = await node.create_sandbox(SPEC.model_copy(update={"ttl_s": 0.05}))
    killing, gone = asyncio.Event(), asyncio.Event()

    async def kill_what_is_being_deleted(_: str | None = None) -> tuple[()]:
        killing.set()
        await gone.wait()
        raise SandboxGoneError("it is gone")

    handle = handle_of(node, info.id)
    monkeypatch.setattr(handle, "kill_processes", kill_what_is_being_deleted)
    async with asyncio.timeout(20):
        await killing.wait()
    monkeypatch.undo()
    await node.delete(info.id)
    gone.set()
    await asyncio.sleep(0)

    assert (await node.close()).failures == ()


@pytest.mark.parametrize("ttl_s", [0, -1, float("nan"), float("inf"), 1e12])
async def test_lease_of_absurd_length_is_refused(node: Node, ttl_s: float) -> None:
    """It is named, and the old lease holds."""
    info = await node.create_sandbox(SPEC)

    with pytest.raises(InvalidRequestError, match="ttl_s"):
        await node.renew(info.id, ttl_s)

    assert (await node.get(info.id)).expires_at == info.expires_at


async def test_lease_whose_end_fails_is_tried_again(
    make_node: NodeMaker, held: HeldRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A destroy that fails once must not make a sandbox immortal."""
    monkeypatch.setattr("coldframe.node.leases._RETRY_S", 0.02)
    node = await make_node(held)
    held.destroy_error = OSError("busy")
    info = await node.create_sandbox(SandboxSpec(image="any", ttl_s=0.02))
    await until_asked(lambda: _is(node, info.id, SandboxState.TERMINATING))

    held.destroy_error = None

    assert (await ended(node, info.id)).expired
    assert (await node.close()).failures == ()  # it was done all the same


@pytest.mark.parametrize("quarantine_s", [0, 60])
@pytest.mark.parametrize("turns", range(4))
async def test_renewal_in_the_moment_of_the_end_holds_or_is_refused(
    make_node: NodeMaker, quarantine_s: float, turns: int
) -> None:
    """Who was told that it goes on must not lose it in the next moment."""
    node = await make_node(quarantine_s=quarantine_s)
    info = await node.create_sandbox(SPEC)
    sandbox = node._works.register.find(info.id)
    node._works.sandboxes.leases.expire(sandbox)
    for _ in range(turns):
        await asyncio.sleep(0)

    try:
        await node.renew(info.id, 60)
    except (SandboxStateError, SandboxGoneError):
        return
    assert (await node.exec(info.id, TRUE)).ok
    assert (await node.get(info.id)).state is SandboxState.READY


async def _is(node: Node, sandbox_id: str, state: SandboxState) -> bool:
    return (await node.get(sandbox_id)).state is state
