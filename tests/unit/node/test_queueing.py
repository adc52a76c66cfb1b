"""Bounded concurrency in fair turns."""

from __future__ import annotations

import asyncio

import pytest

from coldframe.node.queueing import FairQueue
from coldframe.protocol.errors import CapacityError


async def _settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_queue_with_free_slot_takes_it_at_once() -> None:
    """The uncontended path must not suspend."""
    queue = FairQueue("things", 1, 10)

    acquiring = queue.acquire("a")
    with pytest.raises(StopIteration) as ended:
        acquiring.send(None)

    assert ended.value.value == 0.0
    assert not queue.try_acquire()


async def test_queue_serves_owners_in_turn() -> None:
    """A burst of one owner must not hold up another's single request."""
    queue = FairQueue("things", 1, 100)
    await queue.acquire("holder")
    order: list[str] = []

    async def work(owner: str) -> None:
        await queue.acquire(owner)
        order.append(owner)
        queue.release()

    tasks = [asyncio.ensure_future(work(owner)) for owner in ("a", "a", "a", "b", "c", "a")]
    await _settle()
    queue.release()
    await asyncio.gather(*tasks)

    assert order == ["a", "b", "c", "a", "a", "a"]
    assert (queue.free, queue.depth) == (1, 0)


async def test_queue_serves_an_owner_of_many_parts_as_one_of_few() -> None:
    """Who has a thousand sandboxes must not have a thousand times the turns."""
    queue = FairQueue("things", 1, 100)
    await queue.acquire("holder")
    order: list[str] = []

    async def work(owner: str, part: str) -> None:
        await queue.acquire(owner, part)
        order.append(owner + part)
        queue.release()

    asked = ("a1", "a1", "a2", "a3", "b1", "b1")
    tasks = [asyncio.ensure_future(work(*one)) for one in asked]
    await _settle()
    queue.release()
    await asyncio.gather(*tasks)

    assert order == ["a1", "b1", "a2", "b1", "a3", "a1"]


async def test_queue_that_is_full_refuses() -> None:
    """Never a pile-up: the caller is told to come again."""
    queue = FairQueue("things", 1, 1)
    await queue.acquire("a")
    waiting = asyncio.ensure_future(queue.acquire("a"))
    await _settle()

    with pytest.raises(CapacityError, match="1 things are waiting"):
        await queue.acquire("b")

    queue.release()
    await waiting


async def test_queue_does_not_let_newcomers_overtake() -> None:
    """A slot that is given to one who waits is not free."""
    queue = FairQueue("things", 1, 10)
    await queue.acquire("a")
    waiting = asyncio.ensure_future(queue.acquire("b"))
    await _settle()

    queue.release()

    assert not queue.try_acquire()
    assert await waiting > 0


async def test_queue_cancelled_while_waiting_gives_up_its_place() -> None:
    """Else the slot would be lost for ever."""
    queue = FairQueue("things", 1, 10)
    await queue.acquire("a")
    gone = asyncio.ensure_future(queue.acquire("b"))
    waiting = asyncio.ensure_future(queue.acquire("c"))
    await _settle()

    gone.cancel()
    await _settle()
    queue.release()

    await waiting
    assert queue.depth == 0


async def test_queue_cancelled_as_it_gets_its_turn_hands_it_on() -> None:
    """The cancellation and the turn may come in the same moment."""
    queue = FairQueue("things", 1, 10)
    await queue.acquire("a")
    unlucky = asyncio.ensure_future(queue.acquire("b"))
    waiting = asyncio.ensure_future(queue.acquire("c"))
    await _settle()

    queue.release()
    unlucky.cancel()

    await waiting
    queue.release()
    assert (queue.free, queue.depth) == (1, 0)
