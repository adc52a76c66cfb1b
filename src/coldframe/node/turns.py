"""A command's turn: until it ends, or has taken twice as long as those that end soon.

Who computes keeps others from starting beside it, so that who came first ends first; who waits for
something else than a processor does not.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from coldframe.node.queueing import FairQueue

_OF_ONE = 1 / 8
"""How much one command that ends in its turn counts for what is usual."""
_LESS = 0.9
"""What one that does not end in it makes of that."""
_LEAST = 1 / 4


class Turns:
    """The turns of a node's commands."""

    def __init__(self, queue: FairQueue, most_s: float) -> None:
        """`most_s`: how long a turn lasts at most; at least a quarter of that."""
        self._queue, self._most_s = queue, most_s
        self._usual_s = most_s / 2
        self._loop = asyncio.get_running_loop()
        self._until: dict[Turn, float] = {}
        """When each of those that have a place is to give it back."""
        self._timer: asyncio.TimerHandle | None = None
        """Comes no later than the first of them; most end before theirs."""

    @property
    def hold_s(self) -> float:
        """How long a turn that begins now lasts at most."""
        return min(self._most_s, max(_LEAST * self._most_s, 2 * self._usual_s))

    def begin(self) -> Turn:
        """Return the turn of whoever has just got a place in the queue."""
        turn = Turn(self, self._loop.time())
        self._until[turn] = until = turn.began + self.hold_s
        if self._timer is None or until < self._timer.when():
            self._set_timer(until)
        return turn

    def give_back(self, turn: Turn) -> None:
        """The command has ended, or was never started. Twice is fine."""
        if self._until.pop(turn, None) is not None:
            self.end(self._loop.time() - turn.began)

    def end(self, took_s: float | None) -> None:
        """A place is free. None: the command goes on."""
        if took_s is None:
            self._usual_s *= _LESS
        else:
            self._usual_s += _OF_ONE * (took_s - self._usual_s)
        self._queue.release()

    def _set_timer(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(when, self._take_back)

    def _take_back(self) -> None:
        self._timer = None
        now = self._loop.time()
        for turn in [turn for turn, until in self._until.items() if until <= now]:
            del self._until[turn]
            self.end(None)
        if self._until:
            self._set_timer(min(self._until.values()))


@dataclass(frozen=True, eq=False, slots=True)
class Turn:
    """A place in the queue, given back once."""

    turns: Turns
    began: float

    def end(self) -> None:
        """See `Turns.give_back`."""
        self.turns.give_back(self)
