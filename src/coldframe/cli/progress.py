"""Draw a batch's progress on a terminal, or print one plain line per event elsewhere."""

from __future__ import annotations

import sys
from collections import Counter
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from coldframe.cli import render
from coldframe.rollouts.directory import AttemptKey
from coldframe.trajectories.schema import Termination, Trajectory, score


def outcome(trajectory: Trajectory) -> str:
    """Return how an attempt ended, in a few words."""
    failure = trajectory.failure
    if failure is not None:
        return render.sentence(f"{failure.side} failure {failure.code}: {failure.message}")
    rewards = trajectory.rewards or {}
    text = f"reward {score(rewards):g}"
    if trajectory.termination is Termination.UNKNOWN:
        text += " (why it ended is not known)"
    elif trajectory.termination is not Termination.FINISHED:
        text += f" ({trajectory.termination})"
    return text


def going_on(where: str, lasted_s: float) -> str:
    """Return where an attempt that takes long stands."""
    return f"{where}, {lasted_s:.0f} s so far"


class BatchProgress:
    """Hears a batch (see `rollouts.progress.Progress`) and shows it on stderr."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._live = Live(self._stream) if self._stream.isatty() else None
        self._sides: Counter[str] = Counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def begun(self, tasks: int, total: int, done: int) -> None:
        """Show how many samples are wanted, and how many are there already."""
        if self._live is not None:
            self._live.begin(total, done)
        self.note(f"{_counted(tasks, 'task')}, {_counted(total, 'sample')}")
        if done:
            self.note(f"resuming: {done} of {total} samples have their result")

    def note(self, text: str) -> None:
        """Print a line."""
        line = render.safe(text)
        if self._live is not None:
            self._live.line(line)
        else:
            print(line, file=self._stream, flush=True)

    def attempt_begun(self, key: AttemptKey) -> None:
        """Show that it runs; only where it can be taken back."""
        if self._live is not None:
            self._live.running(key, +1)

    def attempt_goes_on(self, key: AttemptKey, where: str, lasted_s: float) -> None:
        """Print where it stands, where nothing moves on a screen."""
        if self._live is None:
            self.note(f"{key}  {going_on(where, lasted_s)}")

    def attempt_ended(self, key: AttemptKey, trajectory: Trajectory, *, last: bool) -> None:
        """Print how it ended."""
        again = "" if last else "; trying again"
        lasted = render.seconds(trajectory.times.total_s)
        self.note(f"{key}  {outcome(trajectory)}  {lasted} s{again}")
        if trajectory.failure is not None:
            self._sides[trajectory.failure.side.value] += 1
        if self._live is not None:
            self._live.running(key, -1)
            self._live.advance(last, dict(self._sides))

    def attempt_refused(self, key: AttemptKey) -> None:
        """Take it back."""
        if self._live is not None:
            self._live.running(key, -1)
            self._live.advance(True, dict(self._sides))


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


class Live:
    """A bar at the bottom of a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[failures]}", markup=False),
            console=Console(file=stream, soft_wrap=True),
            transient=True,
        )
        self._id: TaskID | None = None
        self._running = 0

    def begin(self, total: int, done: int) -> None:
        """Draw it."""
        self._id = self._bar.add_task("rollouts", total=total, completed=done, failures="")
        self._bar.start()

    def line(self, text: str) -> None:
        """Print above it."""
        self._bar.console.print(text, markup=False, highlight=False)

    def running(self, key: AttemptKey, change: int) -> None:
        """Say how many attempts run."""
        del key
        self._running += change
        if self._id is not None:
            self._bar.update(self._id, description=f"rollouts ({self._running} running)")

    def advance(self, last: bool, sides: dict[str, int]) -> None:
        """Move on by a sample, if it has its result."""
        if self._id is not None:
            failures = ", ".join(f"{count} {side}" for side, count in sorted(sides.items()))
            self._bar.update(self._id, advance=1 if last else 0, failures=failures)

    def stop(self) -> None:
        """Take it away."""
        self._bar.stop()
