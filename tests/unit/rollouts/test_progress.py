"""Progress goes to people on a terminal and to logs elsewhere; neither is the result."""

from __future__ import annotations

import asyncio
from io import StringIO
from pathlib import Path

import pytest

from coldframe.cli.progress import BatchProgress, outcome
from coldframe.rollouts import progress
from coldframe.rollouts.directory import AttemptKey
from coldframe.trajectories.store import BlobStore
from tests.unit.trajectories.samples import trajectory


class Terminal(StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def follow(shown: BatchProgress, tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path)
    with shown:
        shown.begun(1, 2, 0)
        shown.note("refused: \x1b[31mred\x1b[0m")
        for sample, reward in ((0, 1.0), (1, None)):
            key = AttemptKey("one", sample, 0)
            shown.attempt_begun(key)
            shown.attempt_goes_on(key, "verify, step two", 20.4)
            shown.attempt_ended(key, trajectory(blobs, reward=reward), last=reward is not None)


def test_progress_elsewhere_is_one_plain_line_per_event(tmp_path: Path) -> None:
    """A log with cursor movements in it cannot be searched."""
    stream = StringIO()
    follow(BatchProgress(stream), tmp_path)

    assert "\x1b" not in stream.getvalue()
    assert [line.split("  ")[:2] for line in stream.getvalue().splitlines()[2:]] == [
        ["one.0.0", "verify, step two, 20 s so far"],
        ["one.0.0", "reward 1"],
        ["one.1.0", "verify, step two, 20 s so far"],
        ["one.1.0", "startup failure x: x"],
    ]
    assert stream.getvalue().startswith("1 task, 2 samples\n")
    assert stream.getvalue().endswith("; trying again\n")


def test_progress_on_a_terminal_draws_and_keeps_the_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hostile text in a line must not drive the terminal either."""
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    follow(BatchProgress(stream), tmp_path)

    assert "one.0.0  reward 1" in stream.getvalue()
    assert "so far" not in stream.getvalue()
    assert "\x1b[31mred" not in stream.getvalue()
    assert "\x1b[?25l" in stream.getvalue()


def test_outcome_names_side_and_code_of_a_failure(tmp_path: Path) -> None:
    """A line that says `failed` sends people to the files."""
    assert outcome(trajectory(BlobStore(tmp_path), reward=None)) == "startup failure x: x"


async def test_what_takes_long_is_told_at_growing_distances_and_no_more_when_it_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a log silence looks like a standstill, and a line per second like noise."""
    monkeypatch.setattr(progress, "LONG_S", 0.01)
    told: list[tuple[str, float]] = []
    third = asyncio.Event()

    def tell(where: str, lasted_s: float) -> None:
        told.append((where, lasted_s))
        if len(told) == 3:
            third.set()

    with progress.telling(lambda: f"phase {len(told)}", tell):
        await asyncio.wait_for(third.wait(), 10)
    await asyncio.sleep(0.1)

    assert [where for where, _ in told] == ["phase 0", "phase 1", "phase 2"]
    assert all(lasted >= least for (_, lasted), least in zip(told, (0.01, 0.02, 0.04), strict=True))
