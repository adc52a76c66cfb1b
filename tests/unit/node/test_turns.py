"""Turns of commands: as long as those that compute need, and no longer for those that wait."""

from __future__ import annotations

import pytest

from coldframe.node.queueing import FairQueue
from coldframe.node.turns import Turns


def make(most_s: float) -> tuple[Turns, FairQueue]:
    queue = FairQueue("commands", 1, 10)
    return Turns(queue, most_s), queue


async def test_turns_of_commands_that_wait_become_short() -> None:
    """Those of many clients that each wait for something would stand in line for nothing."""
    turns, _ = make(0.02)
    assert turns.hold_s == 0.02
    for _ in range(50):
        turns.end(None)

    assert turns.hold_s == pytest.approx(0.005)


async def test_turns_last_twice_as_long_as_short_commands_take() -> None:
    """Shorter ones would let others start beside them, and who came first end last."""
    turns, _ = make(0.02)
    for took_s in (0.004, 0.008) * 50:
        turns.end(took_s)
    usual = turns.hold_s
    for _ in range(50):
        turns.end(1.0)

    assert usual == pytest.approx(0.012, rel=0.2)
    assert turns.hold_s == 0.02


async def test_place_is_given_back_once_whoever_comes_first() -> None:
    """A place too many would never be taken away again."""
    turns, queue = make(0.01)
    assert queue.try_acquire()
    turn = turns.begin()
    turn.end()
    turn.end()
    assert queue.free == 1

    assert queue.try_acquire()
    late = turns.begin()
    assert await queue.acquire("another") > 0  # its time was over
    late.end()
    assert queue.free == 0
