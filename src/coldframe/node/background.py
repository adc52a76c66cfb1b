"""Work of a node that comes to its end whoever stops waiting for it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from coldframe.host.outcome import Undertaking
from coldframe.host.patience import wait_while_any_end

T = TypeVar("T")

_MOST_FAULTS = 1000


class Background:
    """Tasks that nobody owns, and what went wrong in those that nobody waits for."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self.faults: dict[str, str] = {}
        """By sandbox, the latest of what has not been mended since: for the close's report."""

    def note_fault(self, sandbox_id: str, error: Exception) -> None:
        """Something went wrong with a sandbox that nobody waits for."""
        self.faults.pop(sandbox_id, None)
        self.faults[sandbox_id] = str(error)
        if len(self.faults) > _MOST_FAULTS:
            del self.faults[next(iter(self.faults))]

    def mended(self, sandbox_id: str) -> None:
        """It has been done all the same."""
        self.faults.pop(sandbox_id, None)

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run something, whoever waits for it."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._on_end)
        return task

    def undertake(
        self, coroutine: Coroutine[Any, Any, T], *, at_once: bool = False
    ) -> Undertaking[T]:
        """As `spawn`, for what tasks wait for that may be cancelled. See `Undertaking`."""
        undertaking = Undertaking(coroutine, at_once=at_once)
        self._tasks.add(undertaking.task)
        undertaking.task.add_done_callback(self._tasks.discard)
        return undertaking

    async def settle(self, patience_s: float) -> None:
        """Return when nothing runs any more, or all that runs is stuck for so long."""
        while self._tasks and not await wait_while_any_end(self._tasks, patience_s):
            pass

    def _on_end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waits gets it; nobody need wait
