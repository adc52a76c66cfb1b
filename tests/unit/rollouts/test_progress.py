"""Progress goes to people on a terminal and to logs elsewhere; neither is the result."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest

from coldframe.cli.progress import BatchProgress, outcome
from coldframe.rollouts.directory import AttemptKey
from coldframe.trajectories.store import BlobStore
from tests.unit.trajectories.samples import trajectory


class Terminal(StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def follow(progress: BatchProgress, tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path)
    with progress:
        progress.begun(1, 2, 0)
        progress.note("refused: \x1b[31mred\x1b[0m")
        for sample, reward in ((0, 1.0), (1, None)):
            key = AttemptKey("one", sample, 0)
            progress.attempt_begun(key)
            progress.attempt_ended(key, trajectory(blobs, reward=reward), last=reward is not None)


def test_progress_elsewhere_is_one_plain_line_per_event(tmp_path: Path) -> None:
    """A log with cursor movements in it cannot be searched."""
    stream = StringIO()
    follow(BatchProgress(stream), tmp_path)

    assert "\x1b" not in stream.getvalue()
    assert [line.split("  ")[:2] for line in stream.getvalue().splitlines()[2:]] == [
        ["one.0.0", "reward 1"],
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
    assert "\x1b[31mred" not in stream.getvalue()
    assert "\x1b[?25l" in stream.getvalue()


def test_outcome_names_side_and_code_of_a_failure(tmp_path: Path) -> None:
    """A line that says `failed` sends people to the files."""
    assert outcome(trajectory(BlobStore(tmp_path), reward=None)) == "startup failure x: x"
