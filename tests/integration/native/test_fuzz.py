"""The fuzzer of the frame parser is itself tested: one that finds nothing looks like good news."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[3] / "native"


@pytest.mark.timeout(280)
def test_fuzzer_finds_a_planted_fault_and_what_it_saved_shows_it_again(tmp_path: Path) -> None:
    """It lies behind three comparisons of one input, which chance alone does not meet."""
    subprocess.run(
        ["make", "-s", "-C", NATIVE, "fuzzer", "PLANTED=-DPLANTED", f"BUILD={tmp_path}"],
        check=True,
    )

    def fuzz(seconds: int, corpus: Path) -> int:
        command = [tmp_path / "fuzz-frame", str(seconds), corpus]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode

    found = tmp_path / "found"
    found.mkdir()

    assert fuzz(200, NATIVE / "tests/corpus") != 0
    (tmp_path / "crash").rename(found / "crash")
    assert fuzz(0, found) != 0
