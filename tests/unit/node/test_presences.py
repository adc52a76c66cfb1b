"""Clients that are there, gone, or not yet come, and what ends with them."""

from __future__ import annotations

import asyncio
import os

import pytest

from coldframe.node.node import Node
from coldframe.node.presences import Presence
from coldframe.protocol.models import SandboxInfo
from tests.fixtures.waiting import until_asked
from tests.unit.node.conftest import SPEC, NodeMaker

GONE = "its client has gone"


async def _made(node: Node, name: str, pid: int | None = None) -> SandboxInfo:
    return await node.create_sandbox(SPEC, presence=Presence.of(name, pid))


async def _until_gone(node: Node, sandbox: SandboxInfo) -> None:
    async def gone() -> bool:
        return (await node.get(sandbox.id)).reason == GONE

    await until_asked(gone)


async def test_client_that_never_comes_is_waited_for_as_long_as_its_process_lives(
    make_node: NodeMaker,
) -> None:
    """Its create may overtake its presence; a busy event loop may hold both up for minutes."""
    node = await make_node(return_s=0.05)
    process = await asyncio.create_subprocess_exec("sleep", "60")
    living = await _made(node, "living", os.getpid())
    dying = await _made(node, "dying", process.pid)
    await _until_gone(node, await _made(node, "never"))
    assert (await node.get(dying.id)).state == "ready"
    process.kill()
    await process.wait()
    await _until_gone(node, dying)
    assert (await node.get(living.id)).state == "ready"


async def test_client_ends_what_is_its_own_when_the_last_of_its_connections_is_lost(
    make_node: NodeMaker,
) -> None:
    """One that comes anew before its old connection is known to be lost is there all the time."""
    node = await make_node(return_s=0.05)
    presences = node.presences()
    with presences.there("client"):
        mine, kept, others = [await _made(node, name) for name in ("client", "client", "other")]
        with presences.there("client"):
            presences.bind(kept.id, None)
            presences.bind(others.id, Presence("client"))
            presences.lost("client")
        assert (await node.get(mine.id)).expires_at == mine.expires_at
        presences.lost("client")
    for lost in (mine, others):
        await _until_gone(node, lost)
    assert (await node.get(kept.id)).state == "ready"
    late = await _made(node, "client")
    await _until_gone(node, late)


async def test_client_that_says_goodbye_leaves_what_it_left(make_node: NodeMaker) -> None:
    """What it could not delete is its own affair; nobody was lost."""
    node = await make_node(return_s=0.05)
    with node.presences().there("client"):
        left = await _made(node, "client")
        node.presences().left("client")
    await _until_gone(node, await _made(node, "marker"))
    assert (await node.get(left.id)).state == "ready"


async def test_client_that_came_back_is_there_again(make_node: NodeMaker) -> None:
    """What it makes from then on must not end for what was lost before."""
    node = await make_node(return_s=0.05)
    presences = node.presences()
    presences.lost("client")
    with presences.there("client"):
        pass
    process = await asyncio.create_subprocess_exec("sleep", "60")
    made = await _made(node, "client", process.pid)
    await _until_gone(node, await _made(node, "never"))
    assert (await node.get(made.id)).state == "ready"
    process.kill()
    await process.wait()


async def test_clients_that_have_gone_are_forgotten_the_oldest_first(
    make_node: NodeMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The create of one that has just gone may still come; that of one long gone will not."""
    monkeypatch.setattr("coldframe.node.presences._MOST_GONE", 2)
    node = await make_node(return_s=3600.0)
    for name in ("first", "second", "third"):
        node.presences().lost(name)
    first = await _made(node, "first")
    for name in ("second", "third"):
        await _until_gone(node, await _made(node, name))
    assert (await node.get(first.id)).state == "ready"
