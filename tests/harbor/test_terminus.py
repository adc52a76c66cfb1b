"""terminus-2 itself, through a true Harbor job, against a stand-in engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harbor.models.trial.config import TaskConfig

from coldframe.integrations.harbor_rl import Generation, HarborRLAdapter, RLTask
from tests.harbor.engine import Engine
from tests.harbor.test_rl import POLICY, task

REJECTED = {
    "completion-dropped": "segments_have_equal_turns",
    "prompt-dropped": "segments_have_equal_turns",
    "here-and-there": "totals_are_the_sums_of_the_rows",
    "bools": "ids_are_integers",
    "off-by-one": "logprobs_are_one_per_token",
    "not-a-number": "logprobs_are_finite",
    "over-zero": "logprobs_are_not_positive",
    "rendered-anew": "turns_extend_what_came_before",
    "reordered": "turns_extend_what_came_before",
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Run one for the module; its log is what is compared with."""
    with Engine() as running:
        yield running


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the job of `made` lies."""
    return tmp_path_factory.mktemp("terminus") / "jobs" / "train" / "r"


@pytest.fixture(scope="module")
def made(engine: Engine, job: Path) -> Generation:
    """Run one job with every scenario."""
    return _run(engine, job.parents[2], ("whole", *REJECTED))


def _run(
    engine: Engine,
    directory: Path,
    keys: Iterable[str],
    *,
    api_base: str | None = None,
    api_key: str = "none",
    **agent_kwargs: Any,
) -> Generation:
    specs = []
    for key in keys:
        root = task(directory, key)
        (root / "instruction.md").write_text(f"Do it. scenario: {key}\n")
        specs.append(RLTask(key, "train", TaskConfig(path=root)))
    adapter = HarborRLAdapter(
        directory / "jobs",
        "openai/demo",
        "tests.harbor.doubles:FakeEnvironment",
        policy=POLICY,
        api_base=api_base or engine.url,
        agent_kwargs=agent_kwargs,
        model_info={"max_input_tokens": 100_000, "max_output_tokens": 1000},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_API_KEY", api_key)
        return asyncio.run(adapter.generate(specs, run_id="r", attempts=1, concurrency=4))


def test_terminus_gives_the_tokens_that_the_engine_sampled(
    made: Generation, engine: Engine
) -> None:
    """Bit for bit the engine's own log: nothing was rendered or tokenized again."""
    (whole,) = (group for group in made.groups if group.key == "whole")
    assert [str(one.error) for one in whole.rejected] == []
    (rollout,) = whole.rollouts

    prompts, completions, logprobs = zip(*engine.log["whole"], strict=True)
    assert len(prompts) >= 2
    assert [list(row) for row in rollout.prompt_token_ids] == list(prompts)
    assert [list(row) for row in rollout.completion_token_ids] == list(completions)
    assert [[one.hex() for one in row] for row in rollout.old_logprobs] == [
        [one.hex() for one in row] for row in logprobs
    ]


@pytest.mark.parametrize("scenario", REJECTED)
def test_terminus_with_an_engine_that_lies_is_rejected_by_name(
    made: Generation, scenario: str
) -> None:
    """Not one of them becomes a rollout."""
    (group,) = (group for group in made.groups if group.key == scenario)

    assert group.rollouts == ()
    assert [one.error.rule for one in group.rejected] == [REJECTED[scenario]], [
        str(one.error) for one in group.rejected
    ]


def test_terminus_that_summarised_its_context_is_rejected_by_name(
    engine: Engine, tmp_path: Path
) -> None:
    """What its sub-agents said is no turn of the conversation, and that was rewritten."""
    made = _run(engine, tmp_path, ("summarised",), enable_summarize=True)

    (group,) = made.groups
    assert len(engine.log["summarised"]) > 3
    assert group.rollouts == ()
    assert [one.error.rule for one in group.rejected] == ["linear_has_one_segment"], [
        str(one.error) for one in group.rejected
    ]
