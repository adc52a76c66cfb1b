"""The spawner workers of one native runtime: who makes the next sandbox, who replaces the dead."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from coldframe.host.fsthreads import FileThreads
from coldframe.host.removal import remove_tree
from coldframe.host.spawner import SandboxGone, Spawner, SpawnerConfig
from coldframe.protocol.errors import SpawnerLostError
from coldframe.runtimes import native_takeover
from coldframe.runtimes.native_ground import Ground
from coldframe.runtimes.native_keeping import Keeping
from coldframe.runtimes.native_takeover import Left
from coldframe.runtimes.outliving import NothingFoundError


class Spawners:
    """Spawners, the newest last; workers that died are replaced by those of a new one."""

    def __init__(
        self,
        ground: Ground,
        wanted: int,
        binary: Path | None,
        keeping: Keeping | None,
        *,
        gone: Callable[[SandboxGone], None],
        lost: Callable[[Sequence[str]], None],
    ) -> None:
        """Keep `wanted` workers of a program, None: the package's own. Who is told: `Spawner`."""
        self._ground, self._wanted, self._binary = ground, wanted, binary
        self._keeping, self._gone, self._lost = keeping, gone, lost
        self._all: list[Spawner] = []
        self._restarting = asyncio.Lock()
        self._turn = 0

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
            spawner = self._make(missing, self._ground.cgroups.paths)
            await spawner.start()
            self._all.append(spawner)
            self.keep_node(spawner)

    async def take_over(self) -> Left:
        """Reach the workers that another process has left. Raises as `Outlives.outlive` says."""
        spawner = self._make(0, {})
        complete = await native_takeover.connect(self._ground.workers, spawner)
        try:
            left = await native_takeover.look(spawner, complete=complete)
        except NothingFoundError:
            await spawner.close()  # they were only just being started
            raise
        except BaseException:
            await spawner.leave()
            raise
        self._all.append(spawner)
        spawner.program_sha256 = left.program
        return left

    def _make(self, workers: int, cgroups: Mapping[str, Path]) -> Spawner:
        keeping = self._keeping
        config = SpawnerConfig(
            self._ground.layers,
            self._ground.spool,
            cgroups,
            workers=workers,
            sockets=None if keeping is None else self._ground.workers,
            grace_s=0.0 if keeping is None else keeping.grace_s,
            binary=self._binary,
        )
        return Spawner(config, gone=self._gone, lost=self._lost)

    def keep_node(self, spawner: Spawner) -> None:
        """Let the workers of a spawner hold what another process needs to go on."""
        if self._keeping is not None:
            self._keeping.keep_node(spawner, self._ground.cgroups, self._ground.ids)

    def keep_anew(self) -> None:
        """Something of that has changed."""
        for spawner in self._all:
            self.keep_node(spawner)

    def keep_block(self, number: int, lock: int) -> None:
        """Let all workers hold one more block of id ranges."""
        if self._keeping is not None:
            for spawner in self._all:
                self._keeping.keep_block(spawner, number, lock)

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
