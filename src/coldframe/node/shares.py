"""How much of something each owner holds at the moment, up to a limit for each."""

from __future__ import annotations

from collections import defaultdict

from coldframe.protocol.errors import CapacityError


class Shares:
    """Bytes by owner. Who has no owner is the node's own, and has no limit."""

    def __init__(self, limit: int, what: str) -> None:
        """`what` names in refusals what is held."""
        self._limit, self._what = limit, what
        self._held: defaultdict[str, int] = defaultdict(int)

    def take(self, owner: str | None, amount: int) -> None:
        """Hold so much more.

        Raises:
            CapacityError: with it the owner would hold more than the limit.
        """
        if owner is None:
            return
        held = self._held.get(owner, 0)
        if held + amount > self._limit:
            raise CapacityError(
                f"{self._what} of owner {owner!r} hold {held} bytes, and may hold {self._limit}: "
                f"{amount} more do not fit now; ask for less at once"
            )
        self._held[owner] = held + amount

    def give_back(self, owner: str | None, amount: int) -> None:
        """Hold so much less."""
        if owner is None:
            return
        self._held[owner] -= amount
        if not self._held[owner]:
            del self._held[owner]
