"""Counts that outlive the node that counted."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from coldframe.host import tally


def test_counts_of_a_killed_process_are_kept(tmp_path: Path) -> None:
    """SIGKILL runs no code of ours: what was counted must be in the kernel already."""
    path = tmp_path / tally.FILE
    script = (
        "import os, signal, pathlib\n"
        "from coldframe.host.tally import Tally\n"
        f"counts = Tally(pathlib.Path({str(path)!r}))\n"
        "counts['created'] += 3\n"
        "counts['lost'] += 1\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )

    ended = subprocess.run([sys.executable, "-c", script], check=False)

    assert ended.returncode == -signal.SIGKILL
    assert tally.read_counts(path) == {
        "created": 3,
        "deleted": 0,
        "expired": 0,
        "failed": 0,
        "lost": 1,
    }


def test_hand_in_adds_a_node_once(tmp_path: Path) -> None:
    """A node that is reaped by two collectors at once is still one node."""
    directory = tmp_path / "nodes" / "abcdef"
    directory.mkdir(parents=True)
    tally.Tally(directory / tally.FILE).update(created=5, deleted=2, failed=1)

    tally.hand_in(tmp_path, directory)
    tally.hand_in(tmp_path, directory)

    assert tally.read_totals(tmp_path) == {
        "created": 5,
        "deleted": 2,
        "expired": 0,
        "failed": 1,
        "lost": 2,
    }


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 41])
def test_damaged_counts_are_read_as_none(tmp_path: Path, content: bytes) -> None:
    """The ledger must speak of what is there, whatever a full disk did to this file."""
    path = tmp_path / tally.FILE
    path.write_bytes(content)

    assert set(tally.read_counts(path).values()) == {0}


def test_unknown_count_is_refused(tmp_path: Path) -> None:
    """A misspelt name would unbalance the ledger in silence."""
    counts = tally.Tally(tmp_path / tally.FILE)

    with pytest.raises(KeyError):
        counts["create"] = 1
