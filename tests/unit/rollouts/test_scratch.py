"""Directories for the time of a block."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from coldframe.rollouts import scratch as module
from coldframe.rollouts.scratch import scratch

HOLD = (
    "import sys, time; from pathlib import Path; from coldframe.rollouts.scratch import scratch\n"
    "with scratch(Path(sys.argv[1])) as directory:\n"
    "    (directory / 'file').write_text('x'); print(directory, flush=True); time.sleep(60)\n"
)


def test_scratch_of_a_killed_process_goes_with_the_next_and_that_of_a_live_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a killed `task check` leaves would else lie in /tmp for ever."""
    monkeypatch.setattr(module, "_JUST_MADE_S", 0.0)
    words = [sys.executable, "-c", HOLD, str(tmp_path)]
    with (
        subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as killed,
        subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as live,
    ):
        try:
            assert killed.stdout
            assert live.stdout
            dead, held = (
                Path(killed.stdout.readline().strip()),
                Path(live.stdout.readline().strip()),
            )
            killed.kill()
            killed.wait()
            assert dead.is_dir()
            with scratch(tmp_path) as own:
                found = set(tmp_path.iterdir())
        finally:
            live.kill()

    assert found == {own, held}
    assert not own.exists()
