"""mini-swe-agent, by its own command, through the proxy in every dialect that it speaks."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from coldframe.learning.captured import policy_of, trial_of
from coldframe.learning.contracts import ContractError, PolicyRollout, training_sequences
from coldframe.trajectories.store import BlobStore
from tests.doubles.engine import call, say
from tests.integration.inference.conftest import Bench, MakeBench
from tests.lanes.conftest import LANE_PYTHON
from tests.unit.trajectories.samples import trajectory

DIALECTS = {
    "chat": ("openai/demo", "litellm", "/v1"),
    "responses": ("openai/demo", "litellm_response", "/v1"),
    "messages": ("anthropic/demo", "litellm", ""),
}
DONE = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def command(text: str, turn: int) -> dict[str, Any]:
    # Spaces that no writer of JSON leaves: whoever writes arguments anew changes them.
    arguments = '{"command" :  ' + json.dumps(text) + "}"
    return call(arguments, call_id=f"call_{turn}", text="hello, I look")


def solve(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Make a file, look at it, and submit."""
    turn = sum(one["role"] == "assistant" for one in messages)
    texts = ["echo hello > made.txt", "cat made.txt", DONE]
    return command(texts[min(turn, 2)], turn)


async def mini(bench: Bench, dialect: str, directory: Path, key: str) -> dict[str, Any]:
    """Run it on a task, and return what it says of itself."""
    model, kind, base = DIALECTS[dialect]
    home, work = directory / "home", directory / "work"
    home.mkdir(exist_ok=True)
    work.mkdir(exist_ok=True)
    settings = {
        "model.model_class": kind,
        "model.cost_tracking": "ignore_errors",
        "model.model_kwargs.api_base": f"{bench.url}{base}",
        "model.model_kwargs.temperature": "0.7",
        "model.model_kwargs.max_tokens": "2000",
        "environment.cwd": str(work),
    }
    if dialect == "responses":
        settings["model.model_kwargs.max_output_tokens"] = settings.pop(
            "model.model_kwargs.max_tokens"
        )
    chosen = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
    process = await asyncio.create_subprocess_exec(
        os.environ[LANE_PYTHON], "-m", "minisweagent.run.mini", "-m", model, "-y", "-l", "0",
        "--exit-immediately", "-t", "Make a file.", "-o", str(directory / "out.json"),
        "-c", "mini.yaml", *chosen,
        env={
            "PATH": os.environ["PATH"], "HOME": str(home), "MSWEA_CONFIGURED": "true",
            "MSWEA_GLOBAL_CONFIG_DIR": str(home), "MSWEA_SILENT_STARTUP": "1",
            "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "2",
            "OPENAI_API_KEY": key, "ANTHROPIC_API_KEY": key,
        },
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        said, _ = await asyncio.wait_for(process.communicate(), 100)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, said.decode("utf-8", "replace")[-4000:]
    found: dict[str, Any] = json.loads((directory / "out.json").read_text())
    return found


def rollout(bench: Bench, directory: Path) -> PolicyRollout:
    one, calls = trajectory(BlobStore(directory / "blobs")), bench.calls()
    policy = policy_of(one, calls, tokenizer="t@1", renderer="r@1")
    return PolicyRollout.from_trial(trial_of(one, calls, split="train", policy=policy))


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_mini_swe_agent_is_captured_bit_for_bit(
    make_bench: MakeBench, tmp_path: Path, dialect: str
) -> None:
    """It works on its task and knows of nothing; every turn is the engine's own log."""
    async with make_bench(script=solve) as bench:
        told = await mini(bench, dialect, tmp_path, bench.mint())
        assert bench.proxy.end("a") == []

        assert told["info"]["exit_status"] == "Submitted"
        assert (tmp_path / "work" / "made.txt").read_text() == "hello\n"
        assert {turn.call.dialect for turn in bench.calls().turns} == {dialect}
        assert len(bench.engine.log) == 3
        bench.assert_is_the_engines_log()
        made = rollout(bench, tmp_path)
        assert [one.name for one in made.spans] == ["main"]
        assert made.prompt_token_ids == tuple(one.prompt for one in bench.engine.log)
        assert made.completion_token_ids == tuple(one.completion for one in bench.engine.log)
        assert made.policy.sampling == {"temperature": 0.7}
        (sequence,) = training_sequences(made)
        assert sequence.trainable_tokens == sum(len(one.completion) for one in bench.engine.log)


async def test_answer_that_mini_swe_agent_drops_from_its_history_is_a_break(
    make_bench: MakeBench, tmp_path: Path
) -> None:
    """It answers a turn without a tool call by a message in the place of that turn."""

    def forgets(messages: list[dict[str, Any]]) -> dict[str, Any]:
        told = any("Tool call error" in str(one.get("content")) for one in messages)
        return command(DONE, 1) if told else say("hello, no tool")

    async with make_bench(script=forgets) as bench:
        told = await mini(bench, "chat", tmp_path, bench.mint())

        assert told["info"]["exit_status"] == "Submitted"
        assert "1 breaks" in bench.proxy.end("a")[0]
        bench.assert_is_the_engines_log()
        with pytest.raises(ContractError, match="the prompt has") as refused:
            rollout(bench, tmp_path)
    assert refused.value.rule == "linear_has_one_segment"


async def test_mini_swe_agent_without_a_key_of_ours_gets_no_answer(
    make_bench: MakeBench, tmp_path: Path
) -> None:
    """Its calls would be nobody's."""
    async with make_bench(script=solve) as bench:
        with pytest.raises(AssertionError, match=r"not that of an attempt|AuthenticationError"):
            await mini(bench, "chat", tmp_path, "sk-unknown")
        assert bench.engine.log == []
