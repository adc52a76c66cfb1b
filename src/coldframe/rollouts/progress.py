"""What a batch tells while it runs."""

from __future__ import annotations

from typing import Protocol

from coldframe.rollouts.directory import AttemptKey
from coldframe.trajectories.schema import Trajectory


class Progress(Protocol):
    """Hears how a run goes; draws it or prints it."""

    def begun(self, tasks: int, total: int, done: int) -> None:
        """So many samples of so many tasks are wanted, so many have their result already."""

    def note(self, text: str) -> None:
        """Something worth a line: a refused task, a retry."""

    def attempt_begun(self, key: AttemptKey) -> None: ...

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

    def attempt_ended(self, key: AttemptKey, trajectory: Trajectory, *, last: bool) -> None:
        """Say nothing."""

    def attempt_refused(self, key: AttemptKey) -> None:
        """Say nothing."""
