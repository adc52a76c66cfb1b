"""A batch says where each of its rollouts is from, and what is written stays as it is."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from coldframe.learning.contracts import Batch, BatchManifest, ContractError, PolicyRollout
from coldframe.protocol.errors import InvalidRequestError
from tests.unit.learning.evidence import OLDER, ORIGIN, POLICY, rollout, trial


def _batch() -> Batch:
    older = trial(trial_name="sum__old", policy=OLDER)
    marked = PolicyRollout.from_trial(older, policy=POLICY, behaviour=OLDER)
    return Batch((rollout(), marked))


def test_manifest_names_everything_that_a_batch_rests_on() -> None:
    """Months later it is all that is left to explain a checkpoint by."""
    made = _batch().manifest

    assert made.run_id == "run-1"
    assert made.runner == "harbor 0.18.0"
    assert (made.agent, made.agent_config) == ("terminus-2 2.0.0", {"max_turns": 10})
    assert made.policy.checkpoint == POLICY.checkpoint
    assert made.policy.sampling == {"temperature": 1.0, "top_p": 1.0}
    assert made.reward_schema == "examples@1"
    first, second = made.entries
    assert (first.task, first.task_digest, first.verifier_digest) == ("sum", "1" * 64, "2" * 64)
    assert (first.split, first.topology, first.behaviour) == ("train", "linear@1", None)
    assert (first.started_at, first.ended_at) == (10.0, 20.0)
    assert second.behaviour is not None
    assert second.behaviour.iteration == OLDER.iteration


def test_manifest_holds_what_is_nested_as_it_was_given() -> None:
    """A provenance holds it as what cannot be changed, which no JSON is."""
    config = {"limits": {"steps": 3}, "paths": ["a", "b"]}
    made = Batch((rollout(provenance=replace(ORIGIN, agent_config=config)),)).manifest

    assert json.loads(made.model_dump_json())["agent_config"] == config


def test_samples_of_one_task_by_two_verifiers_are_no_batch() -> None:
    """Their rewards are of two measures, and a mean is taken over them."""
    other = rollout(provenance=replace(ORIGIN, verifier_digest="3" * 64), trial_name="sum__2")

    with pytest.raises(ContractError, match=r"verifier_digest: that of task 'sum' is 2222"):
        Batch((rollout(), other))


def test_manifest_is_written_once_and_read_only(tmp_path: Path) -> None:
    """A manifest that can be edited proves nothing."""
    made, path = _batch().manifest, tmp_path / "manifest.json"

    made.write(path)
    made.write(path)

    assert path.stat().st_mode & 0o777 == 0o444
    assert BatchManifest.model_validate(json.loads(path.read_bytes())) == made
    other = Batch((rollout(provenance=replace(ORIGIN, run_id="run-2")),)).manifest
    assert other.digest != made.digest
    with pytest.raises(InvalidRequestError, match="frozen with other content"):
        other.write(path)
    assert BatchManifest.model_validate(json.loads(path.read_bytes())) == made
    assert [one.name for one in tmp_path.iterdir()] == ["manifest.json"]


def test_learning_loads_neither_torch_nor_the_serving_half() -> None:
    """A trainer imports the contract; it must not get a node, a runner or another torch."""
    names = "coldframe.learning.contracts"
    script = f"import coldframe.learning, {names}, sys; print(*sys.modules)"
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )

    loaded = set(ended.stdout.split())
    rooms = {name.split(".")[1] for name in loaded if name.startswith("coldframe.")}
    assert rooms <= {"learning", "protocol", "trajectories"}
    assert not {"torch", "harbor", "litellm", "httpx", "numpy"} & loaded
