"""Trials of the true Harbor as trajectories, and trajectories as what Harbor itself takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harbor.utils.trajectory_validator import TrajectoryValidator

from coldframe.integrations.harbor_rl import Generation
from coldframe.integrations.harbor_trials import import_job, to_atif
from coldframe.rollouts.directory import RunDirectory
from coldframe.trajectories.schema import Trajectory
from coldframe.trajectories.store import BlobStore, read_trajectory
from tests.harbor.engine import Engine
from tests.harbor.test_terminus import REJECTED, _run, engine, job, made
from tests.unit.integrations.atif_samples import every_kind

__all__ = ["engine", "job", "made"]


def assert_harbor_takes(document: dict[str, Any], directory: Path) -> None:
    path = directory / "checked.json"
    path.write_text(json.dumps(document))
    validator = TrajectoryValidator()
    assert validator.validate(path), validator.get_errors()


@pytest.fixture(scope="module")
def imported(
    made: Generation, job: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Trajectory, RunDirectory]]:
    """Import the job of every scenario; by task, each read back from disk."""
    assert made.groups
    out = tmp_path_factory.mktemp("imported")
    report = import_job(job, out)
    assert report.refused == []
    run = RunDirectory(out)
    return {key.task: (one, run) for key, one in run.results().items()}


def test_trials_become_trajectories_with_what_is_missing_marked(
    imported: dict[str, tuple[Trajectory, RunDirectory]], engine: Engine
) -> None:
    """Rewards, model, harness and steps as they were; digests and times of ours as unknown."""
    assert set(imported) == {"whole", *REJECTED}
    one, run = imported["whole"]

    assert one.rewards == {"reward": 1.0}
    assert one.identity.harness.name == "terminus-2"
    assert one.origin is not None
    assert one.origin.runner_version is not None
    assert [document.kind for document in one.origin.documents] == ["main"]
    assert len(one.steps) == len(engine.log["whole"])
    assert [step.usage.completion_tokens for step in one.steps] == [
        len(completion) for _, completion, _ in engine.log["whole"]
    ]
    assert all(step.shown for step in one.steps)
    assert one.identity.task.digest is one.times.model_s is one.totals.calls is None
    assert {"identity.task.digest", "times.model_s", "totals.calls"} <= one.unknown.keys()
    assert run.blobs.get(one.identity.harness.prompt[0]).startswith(b'{"role": "user"')


def test_log_probabilities_that_are_no_json_cost_the_steps_and_say_so(
    imported: dict[str, tuple[Trajectory, RunDirectory]],
) -> None:
    """The verdict stands; what the agent did is not known, and that is no empty conversation."""
    one, _ = imported["not-a-number"]

    assert one.rewards == {"reward": 1.0}
    assert one.steps == ()
    assert "agent/trajectory.json: holds NaN" in one.unknown["steps"]


def test_what_was_imported_is_exported_as_harbor_takes_it(
    imported: dict[str, tuple[Trajectory, RunDirectory]], engine: Engine, tmp_path: Path
) -> None:
    """With the ids and log-probabilities of the engine's own log, bit for bit."""
    for task, (one, run) in imported.items():
        if one.steps:
            assert_harbor_takes(to_atif(one, run.blobs, f"{task}.0.0"), tmp_path)
    one, run = imported["whole"]
    steps = to_atif(one, run.blobs, "whole.0.0")["steps"]

    metrics = [step["metrics"] for step in steps if step["source"] == "agent"]
    assert [
        (m["prompt_token_ids"], m["completion_token_ids"], [*map(float.hex, m["logprobs"])])
        for m in metrics
    ] == [(p, c, [*map(float.hex, v)]) for p, c, v in engine.log["whole"]]


def test_summarised_context_keeps_its_documents_with_owner_and_order(
    engine: Engine, tmp_path: Path
) -> None:
    """What sub-agents said is no step of the conversation; copied context stands there once."""
    _run(engine, tmp_path, ("summarised",), enable_summarize=True)
    report = import_job(tmp_path / "jobs" / "train" / "r", tmp_path / "out")
    (one,) = report.attempts.values()

    assert one.origin is not None
    documents = one.origin.documents
    assert [document.kind for document in documents] == ["main", *["sub_agent"] * 3]
    assert {document.owner for document in documents[1:]} == {documents[0].path}
    assert [document.order for document in documents] == [0, 1, 2, 3]
    assert sum(document.copied_steps for document in documents) >= 2
    blobs = BlobStore(tmp_path / "out" / "blobs")
    assert_harbor_takes(to_atif(one, blobs, "summarised.0.0"), tmp_path)


def test_every_kind_of_attempt_of_ours_is_atif_that_harbor_takes(tmp_path: Path) -> None:
    """Models, solutions, several steps, broken arguments, half characters, failures, tokens."""
    blobs = BlobStore(tmp_path / "blobs")
    for name, (one, calls) in every_kind(blobs, tmp_path).items():
        directory = tmp_path / name
        assert_harbor_takes(to_atif(one, blobs, name, calls), tmp_path)
        assert not directory.exists()


def test_trial_is_read_back_as_it_was_written(
    imported: dict[str, tuple[Trajectory, RunDirectory]],
) -> None:
    """Every blob that it names is there, with the content of its digest."""
    one, run = imported["whole"]

    path = run.root / "attempts" / "whole.0.0" / "trajectory.json"
    assert read_trajectory(path, run.blobs, verify_blobs=True) == one
