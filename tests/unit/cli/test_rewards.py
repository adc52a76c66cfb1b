"""Rewards of a run computed again: new records beside the old."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coldframe.cli.main import main
from coldframe.trajectories.store import BlobStore, write_trajectory
from tests.unit.cli.test_schemas import FIXTURES, SCHEMA
from tests.unit.trajectories import samples


def _run(directory: Path) -> Path:
    blobs = BlobStore(directory / "blobs")
    for sample, reward in enumerate((1.0, 0.25, None)):
        made = samples.trajectory(blobs, task="sum", sample=sample, reward=reward)
        write_trajectory(directory / "attempts" / f"sum.{sample}.0", made, blobs)
    return directory


def test_rewards_of_a_run_are_derived_again_and_drift_is_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Between two versions of a schema it is seen which trials moved a mean."""
    run, out = _run(tmp_path / "run"), tmp_path / "derived.jsonl"
    old, new = tmp_path / "old.toml", tmp_path / "new.toml"
    old.write_text(SCHEMA.format(code="") + FIXTURES)
    gate = '[[gate]]\nkey = "reward"\nat_least = 0.5\notherwise = 0\n'
    new.write_text(SCHEMA.format(code="").replace("version = 3", "version = 4") + gate)

    assert main(["rewards", "derive", str(run), "--schema", str(old), "--out", str(out)]) == 0
    assert "3 records added, 0 were there; 2 have a scalar" in capsys.readouterr().out
    before = out.read_bytes()
    assert main(["rewards", "drift", str(out)]) == 0
    assert "0 changes" in capsys.readouterr().out
    for _ in range(2):
        assert main(["rewards", "derive", str(run), "--schema", str(new), "--out", str(out)]) == 0
    assert "0 records added, 3 were there" in capsys.readouterr().out
    assert out.read_bytes().startswith(before)

    assert main(["rewards", "drift", str(out)]) == 0
    said = capsys.readouterr().out
    assert "run-1/sum.1.0" in said
    assert "1 changes" in said
    assert main(["rewards", "drift", "--json", str(out)]) == 0
    (change,) = json.loads(capsys.readouterr().out)["changes"]
    assert (change["before"]["value"], change["after"]["value"]) == (0.25, 0.0)
    again = ["--schema", str(new), "--out", str(out)]
    assert main(["rewards", "derive", "--json", str(run), *again]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {"added": 0, "there": 3, "with_scalar": 2}


@pytest.mark.parametrize("arguments", [["drift", "absent"], ["derive", ".", "--schema", "absent"]])
def test_what_is_not_there_is_named(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The caller's mistake, in one sentence."""
    more = ["--out", str(tmp_path / "out")] if arguments[0] == "derive" else []

    assert main(["rewards", *arguments, *more]) == 2
    assert "absent" in capsys.readouterr().err


def test_drift_of_a_run_says_what_to_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is there, so it is not missing."""
    assert main(["rewards", "drift", str(tmp_path)]) == 2
    assert "is a directory; name the file that" in capsys.readouterr().err
