"""A few uppers that are ready before anybody asks: making one takes longer than a create may."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import deque
from collections.abc import Collection, Mapping

from coldframe.host.roottree import closing
from coldframe.host.storage_base import RemoveTree, Storage
from coldframe.protocol.errors import ColdframeError

_SPARES = 8
SPARE = "spare-"
"""How their names begin."""


class SpareUppers(Storage):
    """A storage that keeps spare uppers of another one's. See `Storage`.

    A spare keeps its own name below and is known by a sandbox's id once it has been taken. So
    what is there is still asked of the storage below, and each name must be accounted for here.
    """

    def __init__(self, below: Storage, spares: int = _SPARES) -> None:
        """Keep up to `spares` of the storage `below`, which is taken over."""
        self._below, self._wanted = below, spares
        self.name, self.enforces_disk = below.name, below.enforces_disk
        self.fallback_from = below.fallback_from
        self._numbers = itertools.count()
        self._spare: set[str] = set()
        """Names of those that nobody has, ready or just being made."""
        self._ready: deque[str] = deque()
        self._taken: dict[str, str] = {}
        """Names below, by the id of the sandbox that has one, or is just getting it."""

    @property
    def low(self) -> bool:
        """Whether it is time to `refill`."""
        return len(self._spare) <= self._wanted // 2

    def refill(self) -> None:
        """Make spares until there are enough; blocks.

        What keeps it from that is told to whoever asks for an upper when there are none left.
        """
        with contextlib.suppress(OSError, ColdframeError):
            self._below.require_space()
            while len(self._spare) < self._wanted:
                self._make_spare()

    def _make_spare(self) -> None:
        name = f"{SPARE}{next(self._numbers)}"
        self._spare.add(name)
        try:
            directory = self._below.make(name, None)
        except BaseException:
            self._spare.discard(name)
            raise
        # The spawner would make them: it does so where they are missing.
        with closing(directory), contextlib.suppress(OSError):
            for inner in ("upper", "work"):
                os.mkdir(inner, dir_fd=directory)
                os.chmod(inner, 0o755, dir_fd=directory)  # whatever the umask
        self._ready.append(name)

    def take(self, sandbox_id: str, disk_bytes: int | None) -> int | None:
        """Give a spare to a sandbox, at once; None where `make` is needed: there is none, or no
        room, or it is to have a limit of its own.

        The descriptor belongs to the receiver.
        """
        if disk_bytes is not None or not self._ready:
            return None
        try:
            self._below.require_space()
        except ColdframeError:
            return None  # `make` waits for what was dropped lately, or says what is wrong
        while self._ready:
            name = self._ready.popleft()
            self._spare.discard(name)
            if not self._below.why_read_only(name):  # else it was made before the disk was full
                self._taken[sandbox_id] = name
                return self._below.open(name)
        return None

    def make(self, sandbox_id: str, disk_bytes: int | None) -> int:
        """See `Storage.make`."""
        self._taken[sandbox_id] = sandbox_id
        try:
            return self._below.make(sandbox_id, disk_bytes)
        except BaseException:
            del self._taken[sandbox_id]
            raise

    def open(self, sandbox_id: str) -> int:
        """See `Storage.open`."""
        return self._below.open(self.name_of(sandbox_id))

    def widen(self, sandbox_id: str, disk_bytes: int) -> None:
        """See `Storage.widen`."""
        self._below.widen(self.name_of(sandbox_id), disk_bytes)

    async def remove(self, sandbox_id: str, remove_tree: RemoveTree) -> None:
        """See `Storage.remove`."""
        await self._below.remove(self.name_of(sandbox_id), remove_tree)
        self._taken.pop(sandbox_id, None)

    async def clear(self, remove_tree: RemoveTree) -> None:
        """Remove all that is there, spares too. Nobody may use it any more."""
        for name in self._below.names():
            await self._below.remove(name, remove_tree)

    def require_disk(self) -> None:
        """See `Storage.require_disk`."""
        self._below.require_disk()

    def require_space(self) -> None:
        """See `Storage.require_space`."""
        self._below.require_space()

    def names(self) -> tuple[str, ...]:
        """See `Storage.names`; spares are nobody's and not told."""
        there = self._below.names()
        owners = {name: sandbox_id for sandbox_id, name in self._taken.items()}
        return tuple(sorted(owners.get(name, name) for name in there if name not in self._spare))

    def look(self) -> float | None:
        """See `Storage.look`."""
        return self._below.look()

    def settle(self, used: Collection[str] = ()) -> bool:
        """See `Storage.settle`; those in use are known here."""
        return self._below.settle({*self._taken.values(), *used})

    def why_read_only(self, sandbox_id: str) -> str:
        """See `Storage.why_read_only`."""
        return self._below.why_read_only(self.name_of(sandbox_id))

    def kept(self, sandbox_id: str | None = None) -> tuple[int, ...]:
        """See `Storage.kept`."""
        return self._below.kept(None if sandbox_id is None else self.name_of(sandbox_id))

    def name_of(self, sandbox_id: str) -> str:
        """What a sandbox's upper is called in the storage below."""
        return self._taken.get(sandbox_id, sandbox_id)

    async def adopt(self, names: Mapping[str, str], remove_tree: RemoveTree) -> None:
        """These uppers are those sandboxes', by id; remove all others."""
        self._taken = dict(names)
        spares = (name for name in names.values() if name.startswith(SPARE))
        numbers = [int(name.removeprefix(SPARE)) for name in spares]
        self._numbers = itertools.count(max(numbers, default=-1) + 1)
        wanted = set(names.values())
        for name in self._below.names():
            if name not in wanted:
                await self._below.remove(name, remove_tree)

    def close(self) -> None:
        """See `Storage.close`."""
        self._below.close()
