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
    tmp_path: Path,
) -> None:
    """What a killed `task check` leaves would else lie in /tmp for ever."""
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


def test_scratch_that_is_reaped_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may come between the two; neither may end up without a directory."""
    locked, reaped = module._open, []

    def reap_first(directory: Path) -> int:
        if not reaped:
            monkeypatch.setattr(module, "_open", locked)
            reaped.extend(module.reap(tmp_path))
        return locked(directory)

    monkeypatch.setattr(module, "_open", reap_first)
    with scratch(tmp_path) as own:
        assert len(reaped) == 1
        assert module.reap(tmp_path) == ()
        assert list(tmp_path.iterdir()) == [own]
    assert list(tmp_path.iterdir()) == []


def test_nothing_but_directories_of_that_name_is_reaped(tmp_path: Path) -> None:
    """The system's directory is everybody's; a link there leads wherever somebody likes."""
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "file").write_text("kept")
    (tmp_path / f"{module.PREFIX}link").symlink_to(tmp_path / "target")
    (tmp_path / f"{module.PREFIX}file").write_text("kept")
    (tmp_path / "other").mkdir()
    before = set(tmp_path.rglob("*"))

    assert module.reap(tmp_path) == ()
    assert set(tmp_path.rglob("*")) == before
