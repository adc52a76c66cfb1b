"""Sandboxes half made ahead: what needs neither image nor limits takes longer than the rest.

A blank has its sandbox's id and range of ids, cgroups, namespaces and a pid 1 that waits; nothing
has run in it. It becomes that one sandbox or is ended, never given to a second one. Why they
exist: docs/adr/0005-sandboxes-half-made-ahead.md
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from coldframe.host.idranges import IdRanges
from coldframe.host.spawner import Place, Spawner, SpawnerFault
from coldframe.protocol.errors import CapacityError, ColdframeError, SpawnerLostError
from coldframe.protocol.ids import new_sandbox_id

_PATIENCE_S = 0.02
"""So long a new sandbox's first command is waited for, which a blank would hold up."""
_PAUSE_S = 0.001
"""Between that command's end, or a blank, and the next blank."""
_OFFER_S = 5.0


@dataclass(eq=False, slots=True)
class Blank:
    """One half-made sandbox."""

    sandbox_id: str
    id_base: int
    spawner: Spawner
    place: Place | None = None
    """None: not made yet."""


class Blanks:
    """The blanks of one node; belongs to one event loop."""

    def __init__(
        self,
        node_id: str,
        ids: IdRanges,
        spawner: Callable[[], Spawner | None],
        reap: Callable[[str], Awaitable[None]],
        wanted: int,
    ) -> None:
        """Keep up to `wanted`, once `create_noted` has been called.

        Args:
            node_id: what their ids name.
            ids: where their ranges come from.
            spawner: gives the one that is to make the next; None: none can.
            reap: takes a sandbox's cgroups, and all in them, from the kernel.
            wanted: how many; 0 makes none.
        """
        self._node_id, self._ids, self._spawner, self._reap = node_id, ids, spawner, reap
        self._wanted = wanted
        self._there: dict[str, Blank] = {}
        """All of which the kernel may hold something."""
        self._ready: deque[Blank] = deque()
        self._offered: dict[str, tuple[Blank, asyncio.TimerHandle]] = {}
        self._ending: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._quiet_from = 0.0
        self._making = False
        self._open = True

    @property
    def there(self) -> tuple[Blank, ...]:
        """All of which the kernel may hold something: made, being made or being ended."""
        return tuple(self._there.values())

    @property
    def ready(self) -> int:
        """How many can be offered."""
        return len(self._ready)

    def create_noted(self) -> None:
        """A sandbox was asked for: see a little later whether a blank is missing."""
        self._quiet_from = self._loop.time() + _PATIENCE_S
        self._arm()

    def command_ended(self) -> None:
        """A command did, of whatever sandbox: now is a good moment for what is missing."""
        soon = self._loop.time() + _PAUSE_S
        if self._timer is not None and soon < self._quiet_from:
            self._quiet_from = soon
            self._timer.cancel()
            self._timer = self._loop.call_at(soon, self._quiet)

    def offer(self) -> str | None:
        """Return the id of a blank that is ready, if there is one.

        It is kept for a sandbox of that id, and ended if none is created within 5 s.
        """
        if not self._ready:
            return None
        blank = self._ready.popleft()
        timer = self._loop.call_later(_OFFER_S, self._withdraw, blank.sandbox_id)
        self._offered[blank.sandbox_id] = blank, timer
        return blank.sandbox_id

    async def take(self, sandbox_id: str) -> Blank | None:
        """Return the blank that was offered under an id; None if there is none (any more).

        It is no blank any more, and its range the taker's.
        """
        ending = self._ending.get(sandbox_id)
        if ending is not None:
            await asyncio.shield(ending)
        offered = self._offered.pop(sandbox_id, None)
        if offered is None:
            return None
        blank, timer = offered
        timer.cancel()
        del self._there[sandbox_id]
        return blank

    async def undo(self, blank: Blank) -> None:
        """Take everything of a blank from the kernel, whatever became of it."""
        try:
            await blank.spawner.destroy(blank.sandbox_id)
        except (SpawnerFault, SpawnerLostError):
            # It went with its worker, or is unknown: the kernel is asked instead.
            await self._reap(blank.sandbox_id)
        self._ids.give_back(blank.id_base)

    def lose(self, sandbox_ids: Iterable[str]) -> None:
        """These have ended by themselves, or with their worker; those that are blanks go."""
        lost = {blank_id for blank_id in sandbox_ids if blank_id in self._there}
        for blank in [blank for blank in self._ready if blank.sandbox_id in lost]:
            self._ready.remove(blank)
            self._end(blank)
        for blank_id in lost & self._offered.keys():
            self._withdraw(blank_id)

    def abandon(self) -> None:
        """Make no more; they end with the connection to their workers."""
        self._open = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def close(self) -> None:
        """End all of them."""
        self._open = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for blank_id in list(self._offered):
            self._withdraw(blank_id)
        while self._tasks or self._ready:
            while self._ready:
                self._end(self._ready.popleft())
            await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- inside -----------------------------------------------------------------------

    def _missing(self) -> bool:
        return not self._making and len(self._there) < self._wanted

    def _arm(self) -> None:
        if self._timer is None and self._open and self._missing():
            self._timer = self._loop.call_at(self._quiet_from, self._quiet)

    def _quiet(self) -> None:
        self._timer = None
        if self._loop.time() < self._quiet_from:
            self._timer = self._loop.call_at(self._quiet_from, self._quiet)
        elif self._missing() and (spawner := self._spawner()) is not None:
            try:
                id_base = self._ids.take()
            except (CapacityError, OSError):
                return  # whoever asks for a sandbox will be told
            blank = Blank(new_sandbox_id(self._node_id), id_base, spawner)
            self._making = True
            self._there[blank.sandbox_id] = blank
            self._undertake(self._make(blank))

    async def _make(self, blank: Blank) -> None:
        try:
            blank.place = await blank.spawner.prepare(blank.sandbox_id, blank.id_base)
        except (SpawnerFault, ColdframeError):
            self._making = False  # until the next create; who needs one then will be told why
            self._end(blank)
            return
        self._making = False
        self._ready.append(blank)
        self._quiet_from = max(self._quiet_from, self._loop.time() + _PAUSE_S)
        self._arm()

    def _withdraw(self, sandbox_id: str) -> None:
        blank, timer = self._offered.pop(sandbox_id)
        timer.cancel()
        self._end(blank)

    def _end(self, blank: Blank) -> None:
        task = self._undertake(self._ended(blank))
        self._ending[blank.sandbox_id] = task

    async def _ended(self, blank: Blank) -> None:
        try:
            await self.undo(blank)
        finally:
            del self._there[blank.sandbox_id], self._ending[blank.sandbox_id]

    def _undertake(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
