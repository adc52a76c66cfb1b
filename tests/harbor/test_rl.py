"""The adapter over true Harbor jobs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from harbor.models.job.config import JobConfig
from harbor.models.trial.config import TaskConfig

from coldframe.integrations.harbor_rl import (
    Caps,
    ContractError,
    HarborRLAdapter,
    PolicyIdentity,
    RLTask,
)
from coldframe.integrations.harbor_rl import runner as job_runner
from coldframe.integrations.harbor_rl.adapter import BIG_JOB
from coldframe.learning.contracts import MULTI_STEP_FINAL, MULTI_STEP_MEAN, Batch, Topology
from tests.harbor.doubles import COMPLETIONS, LOGPROBS, PROMPTS

POLICY = PolicyIdentity("ab" * 32, "tok@1", "chat@1", {"temperature": 1.0}, 0)


def task(directory: Path, key: str) -> Path:
    """Write a task that any environment takes."""
    root = directory / key
    for name in ("environment", "tests", "solution"):
        (root / name).mkdir(parents=True)
    (root / "task.toml").write_text(
        'version = "1.0"\n[metadata]\n[verifier]\n[agent]\n[environment]\n'
    )
    (root / "instruction.md").write_text("Do it.")
    (root / "environment" / "Dockerfile").write_text("FROM scratch\n")
    (root / "tests" / "test.sh").write_text("#!/bin/sh\n")
    (root / "solution" / "solve.sh").write_text("#!/bin/sh\n")
    return root


def adapter(directory: Path, **changes: Any) -> HarborRLAdapter:
    """Return an adapter on the fakes."""
    scenarios, rewards = changes.pop("scenarios", {}), changes.pop("rewards", {})
    return HarborRLAdapter(
        directory / "jobs",
        "demo/model",
        "tests.harbor.doubles:FakeEnvironment",
        agent="tests.harbor.doubles:FakeAgent",
        agent_kwargs={"scenarios": scenarios},
        environment_kwargs={"rewards": rewards},
        **{"policy": POLICY, "reward_schema": "demo@1"} | changes,
    )


def specs(directory: Path, *keys: str, split: str = "train") -> list[RLTask]:
    return [RLTask(key, split, TaskConfig(path=task(directory, key))) for key in keys]


def test_configuration_is_one_that_harbor_takes(tmp_path: Path) -> None:
    """Every field that is set is a field of Harbor's, of this version."""
    made = adapter(
        tmp_path,
        api_base="http://127.0.0.1:1/v1",
        model_info={"max_input_tokens": 1},
        agent_timeout_multiplier=2.0,
        max_retries=1,
    ).build_config(specs(tmp_path, "one"), phase="train", run_id="r", attempts=3, concurrency=2)

    assert isinstance(made, JobConfig)
    assert (made.job_name, made.n_attempts, made.n_concurrent_trials) == ("r", 3, 2)
    assert made.retry.max_retries == 1
    assert made.agent_timeout_multiplier == 2.0
    assert made.agents[0].kwargs["api_base"] == "http://127.0.0.1:1/v1"
    assert made.environment.import_path == "tests.harbor.doubles:FakeEnvironment"


def test_job_gives_rollouts_and_rejects_the_others_by_name(tmp_path: Path) -> None:
    """Every trap in one job: groups in order, each rejected trial with its rule."""
    scenarios = {
        "whole": "whole",
        "dropped": "ids dropped",
        "lost": "turns lost here and there",
        "nan": "nan",
        "sub": "sub-agent",
        "fails": "fails",
    }
    rewards = {
        "planted": {"reward.json": '{"reward": 1}', "reward.txt": "0"},
        "text": {"reward.json": '{"reward": "1"}'},
        "bool": {"reward.json": '{"reward": true}'},
        "absent": {},
    }
    asked = specs(tmp_path, *scenarios, *rewards)

    made = asyncio.run(
        adapter(tmp_path, scenarios=scenarios, rewards=rewards).generate(
            asked, run_id="run-1", attempts=2, concurrency=4
        )
    )

    found = {
        group.key: {one.error.rule or one.error.field for one in group.rejected}
        for group in made.groups
    }
    assert list(found) == [one.key for one in asked]
    whole = made.groups[0]
    assert len(whole.rollouts) == 2
    assert [list(row) for row in whole.rollouts[0].prompt_token_ids] == PROMPTS
    assert [list(row) for row in whole.rollouts[0].completion_token_ids] == COMPLETIONS
    assert [list(row) for row in whole.rollouts[0].old_logprobs] == LOGPROBS
    assert found == {
        "whole": set(),
        "dropped": {"segments_have_equal_turns"},
        "lost": {"totals_are_the_sums_of_the_rows"},
        "nan": {"logprobs_are_finite"},
        "sub": {"linear_has_one_segment"},
        "fails": {"trial_has_no_exception"},
        "planted": {"reward_file"},
        "text": found["text"],
        "bool": found["bool"],
        "absent": {"trial_has_no_exception"},
    }
    for key in ("text", "bool"):
        assert found[key] and found[key] <= {"reward_file", "trial_has_no_exception"}
    assert len(made.rollouts) == 2
    manifest = Batch(made.rollouts).manifest
    assert manifest.run_id == "run-1"
    assert manifest.runner.startswith("harbor 0.")
    assert len(manifest.entries[0].verifier_digest) == 64


def test_run_id_is_used_once(tmp_path: Path) -> None:
    """A second job would otherwise resume the first, and count its trials again."""
    runner, asked = adapter(tmp_path), specs(tmp_path, "one")
    asyncio.run(runner.generate(asked, run_id="r", attempts=1, concurrency=1))

    with pytest.raises(ContractError, match="never used again"):
        asyncio.run(runner.generate(asked, run_id="r", attempts=1, concurrency=1))


def test_evaluation_gives_rewards_and_its_trials_are_never_trained_on(tmp_path: Path) -> None:
    """In a directory of its own, which tells the split of what lies in it."""
    runner = adapter(tmp_path, rewards={"one": "0.25"})
    asked = specs(tmp_path, "one", split="eval")

    made = asyncio.run(runner.evaluate(asked, run_id="e", attempts=2, concurrency=2))

    assert [(one.key, one.reward, one.failure) for one in made.records] == [("one", 0.25, None)] * 2
    from harbor.models.trial.result import TrialResult

    (file, _) = sorted((tmp_path / "jobs" / "eval" / "e").glob("*/result.json"))
    with pytest.raises(ContractError, match="wrong split"):
        runner.to_policy_rollout(TrialResult.model_validate_json(file.read_text()))


def test_retries_are_reported_and_no_samples(tmp_path: Path) -> None:
    """Harbor deletes the failed try and keeps its name."""
    runner = adapter(tmp_path, scenarios={"one": "fails"}, max_retries=1)

    made = asyncio.run(
        runner.generate(specs(tmp_path, "one", "two"), run_id="r", attempts=1, concurrency=2)
    )

    assert made.retries == 1
    assert [(len(one.rollouts), len(one.rejected)) for one in made.groups] == [(0, 1), (1, 0)]


@pytest.mark.parametrize(
    ("caps", "scenario", "words"),
    [
        (Caps(cost_usd=1.0), "whole", "cost: "),
        (Caps(wall_s=2.0), "slow", "time: "),
        (Caps(failure_rate=0.2, failures_from=2), "fails", "failures: "),
        (Caps(disk_bytes=250_000), "slow", "disk: "),
    ],
)
def test_job_is_stopped_at_a_cap_with_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caps: Caps, scenario: str, words: str
) -> None:
    """The trials that ended are kept, those that did not are counted as missing."""
    # On a quiet machine the whole job takes less than the second between two looks.
    monkeypatch.setattr(job_runner, "WATCH_S", 0.01)
    runner = adapter(tmp_path, caps=caps, scenarios={"one": scenario})
    attempts = BIG_JOB - 1  # a bigger one is preceded by a job that may reach the cap itself

    made = asyncio.run(
        runner.generate(specs(tmp_path, "one"), run_id="r", attempts=attempts, concurrency=1)
    )

    assert made.stopped is not None
    assert made.stopped.startswith(words)
    (group,) = made.groups
    ended = group.rejected if scenario == "fails" else group.rollouts
    assert len(ended) >= 1
    # The trial that was cut off is told as rejected.
    assert len(group.rollouts) + len(group.rejected) + group.missing == attempts
    assert group.missing > 0


STEPS = """
multi_step_reward_strategy = "{strategy}"
schema_version = "1.3"
[task]
name = "demo/steps"
[environment]
[[steps]]
name = "one"
[[steps]]
name = "two"
"""


@pytest.mark.parametrize(
    ("strategy", "topology", "rewards", "total"),
    [
        ("mean", MULTI_STEP_MEAN, ['{"reward": 1}', '{"reward": 0.25}'], 0.625),
        ("mean", MULTI_STEP_MEAN, ['{"reward": 1}', '{"style": 1}'], 0.5),
        ("final", MULTI_STEP_FINAL, ['{"reward": 1}', '{"reward": 0.25}'], 0.25),
    ],
)
def test_steps_come_to_what_this_harbor_makes_of_them(
    tmp_path: Path, strategy: str, topology: Topology, rewards: list[str], total: float
) -> None:
    """Each step's tokens with its own reward, and the whole as Harbor itself aggregates it."""
    root = task(tmp_path, "steps")
    (root / "instruction.md").unlink()
    (root / "task.toml").write_text(STEPS.format(strategy=strategy))
    for name in ("one", "two"):
        (root / "steps" / name / "tests").mkdir(parents=True)
        (root / "steps" / name / "instruction.md").write_text("Do it.")
        (root / "steps" / name / "tests" / "test.sh").write_text("#!/bin/sh\n")
    asked = [RLTask("steps", "train", TaskConfig(path=root))]
    files = {"steps": [{"reward.json": one} for one in rewards]}

    made = asyncio.run(
        adapter(tmp_path, rewards=files, topology=topology).generate(
            asked, run_id="r", attempts=1, concurrency=1
        )
    )
    (group,) = made.groups
    assert [str(one.error) for one in group.rejected] == []
    (rollout,) = group.rollouts
    assert rollout.reward == total
    assert [span.name for span in rollout.spans] == ["one", "two"]
    assert rollout.spans[0].reward == 1
    assert [list(row) for row in rollout.completion_token_ids] == [[3, 4], [6], [103, 104], [106]]

    wrong = MULTI_STEP_FINAL if strategy == "mean" else MULTI_STEP_MEAN
    refused = asyncio.run(
        adapter(tmp_path, rewards=files, topology=wrong).generate(
            asked, run_id="wrong", attempts=1, concurrency=1
        )
    )
    assert refused.groups[0].rollouts == ()
    linear = asyncio.run(
        adapter(tmp_path, rewards=files).generate(asked, run_id="l", attempts=1, concurrency=1)
    )
    assert "step-aware" in str(linear.groups[0].rejected[0].error)
