"""Whose turn it is to guard a directory."""

from __future__ import annotations

import asyncio

from coldframe.runtimes.native_guard import MOST_AT_ONCE, GuardSlots


async def test_guards_of_one_owner_leave_some_to_others() -> None:
    """One key that guards for ever must not keep every other from grading."""
    slots = GuardSlots()
    of_one = MOST_AT_ONCE * 3 // 4
    for _ in range(of_one):
        await slots.acquire("amber")
    cancelled, waiting = [asyncio.ensure_future(slots.acquire("amber")) for _ in range(2)]
    for _ in range(MOST_AT_ONCE - of_one):
        await asyncio.wait_for(slots.acquire("blue"), 60)
    last = asyncio.ensure_future(slots.acquire(None))
    await asyncio.sleep(0)
    assert not (waiting.done() or last.done())

    cancelled.cancel()
    slots.release("blue")
    await asyncio.wait_for(last, 60)
    slots.release("amber")
    await asyncio.wait_for(waiting, 60)
