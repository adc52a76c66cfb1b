"""Bounded concurrency in fair turns: a burst of one owner does not hold up another's request."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque

from coldframe.protocol.errors import CapacityError


class FairQueue:
    """`slots` at once; those that wait are served owner by owner, of each part by part.

    What waits for the same part of an owner's is served in order of arrival. Taking a free slot
    suspends nothing.
    """

    def __init__(self, what: str, slots: int, limit: int) -> None:
        self._what = what
        self._free = slots
        self._limit = limit
        self._waiting: OrderedDict[str, OrderedDict[str, deque[asyncio.Future[None]]]]
        self._waiting = OrderedDict()
        """By owner and part."""
        self._depth = 0

    @property
    def depth(self) -> int:
        """How many wait."""
        return self._depth

    @property
    def free(self) -> int:
        """How many slots nobody has."""
        return self._free

    def try_acquire(self) -> bool:
        """Take a slot if one is free and nobody waits."""
        if self._free > 0 and self._depth == 0:
            self._free -= 1
            return True
        return False

    async def acquire(self, owner: str, part: str = "") -> float:
        """Take a slot; return how long it took in seconds.

        Raises:
            CapacityError: too many wait already.
        """
        if self.try_acquire():
            return 0.0
        if self._depth >= self._limit:
            raise CapacityError(
                f"{self._depth} {self._what} are waiting already, the node takes no more; "
                "try again later"
            )
        began = time.monotonic()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, OrderedDict()).setdefault(part, deque()).append(turn)
        self._depth += 1
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release()  # the slot had been given to us in the same moment
            else:
                self._withdraw(owner, part, turn)
            raise
        return time.monotonic() - began

    def release(self) -> None:
        """Give a slot back; it goes to the next owner in turn."""
        while self._waiting:
            owner, parts = self._waiting.popitem(last=False)
            part, line = parts.popitem(last=False)
            turn = line.popleft()
            self._depth -= 1
            if line:
                parts[part] = line
            if parts:
                self._waiting[owner] = parts
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1

    def _withdraw(self, owner: str, part: str, turn: asyncio.Future[None]) -> None:
        parts = self._waiting.get(owner, OrderedDict())
        line = parts.get(part, deque())
        if turn in line:
            line.remove(turn)
            self._depth -= 1
            if not line:
                del parts[part]
            if not parts:
                del self._waiting[owner]
