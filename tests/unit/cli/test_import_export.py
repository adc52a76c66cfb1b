"""What others made comes in and what we made goes out, and what is refused is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coldframe.cli.main import main
from tests.unit.integrations.test_harbor_trials import atif, result, write


def test_job_is_imported_shown_and_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code says that one trial was refused, JSON says which and why."""
    job, run = str(tmp_path / "job"), str(tmp_path / "run")
    write(tmp_path / "job", result("good__1"), atif("a"))
    write(tmp_path / "job", result("bad__2", task_name=7))

    assert main(["import", "harbor", job, "--out", run, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert [(one["attempt"], one["trial"], one["steps"]) for one in told["attempts"]] == [
        ("demo-one.0.0", "good__1", 1)
    ]
    assert told["refused"] == [
        {
            "file": "bad__2/result.json",
            "field": "task_name",
            "problem": "Input should be a valid string",
        }
    ]
    assert main(["import", "harbor", job, "--out", run]) == 1
    shown = capsys.readouterr().out
    assert "refused: bad__2/result.json: task_name" in shown
    assert main(["rollout", "show", run]) == 0
    shown = capsys.readouterr().out
    assert "demo-one.0.0" in shown
    assert "reward 1 (why it ended is not known)" in shown
    assert "imported from harbor: there is no summary" in shown
    assert "run it again" not in shown
    assert main(["rollout", "show", run, "--attempt", "demo-one.0.0"]) == 0
    assert "step 0  atif  - s\n  : a\n" in capsys.readouterr().out

    assert main(["export", "atif", run, "--out", str(tmp_path / "atif"), "--json"]) == 0
    (path,) = json.loads(capsys.readouterr().out)["written"]
    assert json.loads(Path(path).read_text())["schema_version"] == "ATIF-v1.7"


def test_attempt_without_a_step_is_refused_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rather than left out in silence."""
    job, run = str(tmp_path / "job"), str(tmp_path / "run")
    write(tmp_path / "job", result("good__1"))
    assert main(["import", "harbor", job, "--out", run]) == 0
    assert "the agent left none" in capsys.readouterr().out

    assert main(["export", "atif", run, "--out", str(tmp_path / "atif")]) == 1
    said = capsys.readouterr().out
    assert "refused: demo-one.0.0: steps: unknown, agent/trajectory.json: the agent left" in said
    assert "did nothing" not in said
    out = str(tmp_path / "other")
    assert main(["export", "atif", run, "--attempt", "no.0.0", "--out", out]) == 2
    assert "there are: demo-one.0.0" in capsys.readouterr().err


def test_directory_that_is_no_job_is_the_callers_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what to name instead."""
    assert main(["import", "harbor", str(tmp_path), "--out", str(tmp_path / "run")]) == 2
    assert "it has no config.json; name the directory of one job" in capsys.readouterr().err


def test_verdicts_whose_verifier_is_not_known_are_not_derived(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Drift between verifiers could not be told."""
    run = str(tmp_path / "run")
    write(tmp_path / "job", result("good__1"))
    assert main(["import", "harbor", str(tmp_path / "job"), "--out", run]) == 0

    schema = str(Path("examples/tasks/rewards.toml").resolve())
    out = str(tmp_path / "derived.jsonl")
    assert main(["rewards", "derive", run, "--schema", schema, "--out", out]) == 2
    assert "which verifier graded is not known" in capsys.readouterr().err
