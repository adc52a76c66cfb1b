"""The spawner workers of one native runtime: who makes the next sandbox, who replaces the dead."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator

from coldframe.host.fsthreads import FileThreads
from coldframe.host.removal import remove_tree
from coldframe.host.spawner import Spawner
from coldframe.protocol.errors import SpawnerLostError


class Spawners:
    """Spawners, the newest last; workers that died are replaced by those of a new one."""

    def __init__(
        self, wanted: int, make: Callable[[int], Spawner], started: Callable[[Spawner], None]
    ) -> None:
        """Keep `wanted` workers; `make` gives a spawner of so many, `started` is told of it."""
        self._wanted, self._make, self._started = wanted, make, started
        self._all: list[Spawner] = []
        self._restarting = asyncio.Lock()
        self._turn = 0

    def __iter__(self) -> Iterator[Spawner]:
        return iter(self._all)

    @property
    def newest(self) -> Spawner:
        """The one that was started last."""
        return self._all[-1]

    @property
    def pids(self) -> tuple[int, ...]:
        """Host pids of all workers."""
        return tuple(pid for spawner in self._all for pid in spawner.pids)

    async def start(self) -> None:
        """Start the workers that are missing. Raises CapabilityError."""
        missing = self._wanted - len(self.pids)
        if missing > 0:
            spawner = self._make(missing)
            await spawner.start()
            self._all.append(spawner)
            self._started(spawner)

    def adopt(self, spawner: Spawner) -> None:
        """Go on with one whose workers another process has left."""
        self._all.append(spawner)

    async def current(self) -> Spawner:
        """The one for the next create."""
        async with self._restarting:
            await self.start()
            self._all = [spawner for spawner in self._all if spawner.pids]
        # Each worker gets its turn, whichever spawner it belongs to.
        by_worker = [spawner for spawner in self._all for _ in spawner.pids]
        self._turn += 1
        return by_worker[self._turn % len(by_worker)]

    def idle(self) -> Spawner | None:
        """Whoever is to make the next blank."""
        return next((one for one in reversed(self._all) if one.pids), None)

    async def remove_tree(self, threads: FileThreads, directory: int, name: str) -> int:
        """Remove a tree by a worker, or in a thread if none lives. See `Spawner.remove_tree`."""
        for spawner in reversed(self._all):
            if spawner.pids:
                with contextlib.suppress(SpawnerLostError):
                    return await spawner.remove_tree(directory, name)
        with contextlib.suppress(FileNotFoundError):
            await threads.run((0, 0), remove_tree, directory, os.fsencode(name))
        return 0

    async def close(self, patience_s: float) -> None:
        """End them all; see `Spawner.close`."""
        for spawner in self._all:
            await spawner.close(patience_s)

    async def leave(self) -> None:
        """Let go of them all; see `Spawner.leave`."""
        for spawner in self._all:
            await spawner.leave()
