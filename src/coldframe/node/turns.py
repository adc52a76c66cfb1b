"""A command's turn: until it ends, or has taken twice as long as those that end soon.

Who computes keeps others from starting beside it, so that who came first ends first; who waits for
something else than a processor does not.
"""

from __future__ import annotations

import asyncio

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

    @property
    def hold_s(self) -> float:
        """How long a turn that begins now lasts at most."""
        return min(self._most_s, max(_LEAST * self._most_s, 2 * self._usual_s))

    def begin(self) -> Turn:
        """Return the turn of whoever has just got a place in the queue."""
        return Turn(self, self._loop, self.hold_s)

    def end(self, took_s: float | None) -> None:
        """Give a place back. None: the command goes on."""
        if took_s is None:
            self._usual_s *= _LESS
        else:
            self._usual_s += _OF_ONE * (took_s - self._usual_s)
        self._queue.release()


class Turn:
    """A place in the queue, given back once."""

    __slots__ = ("_began", "_loop", "_timer", "_turns")

    def __init__(self, turns: Turns, loop: asyncio.AbstractEventLoop, hold_s: float) -> None:
        self._turns: Turns | None = turns
        self._loop, self._began = loop, loop.time()
        self._timer = loop.call_at(self._began + hold_s, self._give_back, None)

    def end(self) -> None:
        """The command has ended, or was never started."""
        self._timer.cancel()
        self._give_back(self._loop.time() - self._began)

    def _give_back(self, took_s: float | None) -> None:
        turns, self._turns = self._turns, None
        if turns is not None:
            turns.end(took_s)
