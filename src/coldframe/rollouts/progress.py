"""What a batch tells while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from coldframe.rollouts.directory import AttemptKey
from coldframe.trajectories.schema import Trajectory

LONG_S = 10.0
"""For which nobody is told anything of what runs."""


@contextmanager
def telling(where: Callable[[], str], tell: Callable[[str, float], None]) -> Iterator[None]:
    """Tell where something stands, and for how many seconds it has run, once it has taken LONG_S
    and whenever that has doubled: silence looks like a standstill.
    """
    loop = asyncio.get_running_loop()
    begun = loop.time()
    waiting: asyncio.TimerHandle

    def wait(after_s: float) -> None:
        nonlocal waiting
        waiting = loop.call_later(after_s, due)

    def due() -> None:
        lasted_s = loop.time() - begun
        tell(where(), lasted_s)
        wait(lasted_s)

    wait(LONG_S)
    try:
        yield
    finally:
        waiting.cancel()


class Progress(Protocol):
    """Hears how a run goes; draws it or prints it."""

    def begun(self, tasks: int, total: int, done: int) -> None:
        """So many samples of so many tasks are wanted, so many have their result already."""

    def note(self, text: str) -> None:
        """Something worth a line: a refused task, a retry."""

    def attempt_begun(self, key: AttemptKey) -> None: ...

    def attempt_goes_on(self, key: AttemptKey, where: str, lasted_s: float) -> None:
        """It takes long; `where` it stands."""

    def attempt_ended(self, key: AttemptKey, trajectory: Trajectory, *, last: bool) -> None:
        """`last`: no retry follows, the sample has its result."""

    def attempt_refused(self, key: AttemptKey) -> None:
        """It was no attempt: its task is refused, which a note has said."""


class Silent:
    """Says nothing."""

    def begun(self, tasks: int, total: int, done: int) -> None:
        """Say nothing."""

    def note(self, text: str) -> None:
        """Say nothing."""

    def attempt_begun(self, key: AttemptKey) -> None:
        """Say nothing."""

    def attempt_goes_on(self, key: AttemptKey, where: str, lasted_s: float) -> None:
        """Say nothing."""

    def attempt_ended(self, key: AttemptKey, trajectory: Trajectory, *, last: bool) -> None:
        """Say nothing."""

    def attempt_refused(self, key: AttemptKey) -> None:
        """Say nothing."""
