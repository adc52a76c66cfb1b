"""What is kept of what has ended: up to so many and so many bytes, fairly by owner."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar


class Owned(Protocol):
    """An operation, or a sandbox."""

    id: str

    @property
    def owner(self) -> str | None:
        """Whose it is."""


T = TypeVar("T", bound=Owned)


@dataclass
class _Share:
    sizes: OrderedDict[str, int] = field(default_factory=OrderedDict)
    """By id, oldest first."""
    held: int = 0


class Pool(Generic[T]):
    """Things by id. Where there is too much, who has the most of it gives its oldest.

    So nobody loses what fits into an equal share of the whole, whatever others do.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._kept: OrderedDict[str, T] = OrderedDict()
        self._shares: dict[str | None, _Share] = {}
        self.held = 0
        """Bytes in all."""

    def get(self, id: str) -> T | None:
        """Return one that is kept."""
        return self._kept.get(id)

    def add(self, operation: T, size: int) -> None:
        """Keep one that has ended, as so many bytes."""
        self._kept[operation.id] = operation
        share = self._shares.setdefault(operation.owner, _Share())
        share.sizes[operation.id] = size
        share.held += size
        self.held += size

    def remove(self, operation: T) -> bool:
        """Keep it no longer; return whether it was kept."""
        if self._kept.pop(operation.id, None) is None:
            return False
        share = self._shares[operation.owner]
        size = share.sizes.pop(operation.id)
        share.held -= size
        self.held -= size
        if not share.sizes:
            del self._shares[operation.owner]
        return True

    def __iter__(self) -> Iterator[T]:
        """Yield all, oldest first."""
        return iter(self._kept.values())

    def surplus(self) -> T | None:
        """Return the one that is to go next; None: there is room for all."""
        if len(self._kept) > self._most:
            share = max(self._shares.values(), key=lambda share: len(share.sizes))
        elif self.held > self._most_bytes:
            share = max(self._shares.values(), key=lambda share: share.held)
        else:
            return None
        return self._kept[next(iter(share.sizes))]
