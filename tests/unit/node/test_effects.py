"""Changes that are asked for again while the first is being made."""

from __future__ import annotations

import asyncio

import pytest

from coldframe.node.effects import Reply
from coldframe.node.node import Node


async def test_who_waits_for_a_change_that_came_to_nothing_makes_it(node: Node) -> None:
    """A body that broke off was never a request; who sends it again must not hear of that."""
    begun, broken = asyncio.Event(), asyncio.Event()
    cut, done = Reply(499, None, b"", final=False), Reply(204, None, b"")

    async def breaks_off() -> Reply:
        begun.set()
        await broken.wait()
        return cut

    async def succeeds() -> Reply:
        return done

    first = asyncio.ensure_future(node.once("id", "asked", None, breaks_off))
    await begun.wait()
    second = asyncio.ensure_future(node.once("id", "asked", None, succeeds))
    await asyncio.sleep(0)
    broken.set()

    assert await first is cut
    assert await second is done
    assert await node.once("id", "asked", None, breaks_off) is done


async def test_change_whose_caller_was_cancelled_is_perhaps_made_and_not_made_again(
    node: Node,
) -> None:
    """Here, too, nobody knows how far it had come."""
    begun = asyncio.Event()

    async def waits() -> Reply:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    making = asyncio.ensure_future(node.once("id", "asked", None, waits))
    await begun.wait()
    making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making
    told = await node.once("id", "asked", None, waits)
    assert (told.status, b"perhaps_executed" in told.content) == (503, True)
