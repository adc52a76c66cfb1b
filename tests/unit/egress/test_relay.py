"""Whose turn it is when all connections have more to carry than there is time for."""

from __future__ import annotations

import asyncio
import gc
import time

from coldframe.host.egress import relay
from coldframe.host.egress.flows import Meter
from tests.fixtures.waiting import until


class Busy:
    """A direction that always has more to carry, and takes its time for a piece."""

    def __init__(self, meter: Meter) -> None:
        self._meter, self.turns, self.over = meter, 0, False

    def pump(self) -> None:
        self.turns += 1
        time.sleep(0.0001)
        if not self.over:
            turns = relay.turns_of(asyncio.get_running_loop())
            turns.add(self, self._meter)  # type: ignore[arg-type]


def meter() -> Meter:
    """One without limits."""
    return Meter(None, None, lambda: None)


async def test_sandbox_with_many_streams_has_as_many_turns_as_one_with_few() -> None:
    """Turns are the sandboxes', not the connections'; and commands are answered between them."""
    greedy, modest = meter(), meter()
    many, one = [Busy(greedy) for _ in range(30)], Busy(modest)
    for busy in (*many, one):
        busy.pump()
    others = 0
    end = asyncio.get_running_loop().time() + 0.5
    while asyncio.get_running_loop().time() < end:
        others += 1
        await asyncio.sleep(0)
    for busy in (*many, one):
        busy.over = True
    await until(lambda: not relay.turns_of(asyncio.get_running_loop())._waiting)

    taken = sum(busy.turns for busy in many)
    assert abs(taken - one.turns) <= 0.1 * taken + 62
    assert max(busy.turns for busy in many) - min(busy.turns for busy in many) <= 2
    assert others > (taken + one.turns) / 20


def test_turns_of_a_loop_that_has_ended_are_not_waited_for_in_the_next() -> None:
    """A thread may run one event loop after the other; each client of the SDK has its own."""

    async def begin(*, over: bool) -> int:
        busy = Busy(meter())
        busy.pump()
        if over:
            await asyncio.sleep(0.05)
        busy.over = True
        return busy.turns

    assert asyncio.run(begin(over=False)) == 1
    assert asyncio.run(begin(over=True)) > 1
    gc.collect()
    assert len(relay._turns) == 0
