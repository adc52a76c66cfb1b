"""The first rollout that can be trained on: agent, sandbox, verifier, and the engine's tokens."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from coldframe.cli.main import main
from coldframe.client import AsyncSandboxClient
from coldframe.harnesses.base import ModelSettings
from coldframe.inference.engine import EngineSettings
from coldframe.inference.local import local_capture
from coldframe.inference.proxy import ProxySettings
from coldframe.integrations.harbor_trials import to_atif
from coldframe.learning.captured import policy_of, trial_of
from coldframe.learning.contracts import Batch as TrainingBatch
from coldframe.learning.contracts import ContractError, PolicyRollout, training_sequences
from coldframe.protocol.errors import Side
from coldframe.rollouts.config import RunConfig
from coldframe.rollouts.directory import RunDirectory
from coldframe.rollouts.run import Batch
from coldframe.trajectories.calls import read_calls
from tests.doubles.engine import Fault, Lie, StandInEngine, Status, call, say
from tests.integration.rollouts.test_attempt import make_task
from tests.integration.rollouts.test_steps import steps_task

pytestmark = pytest.mark.root

SOLVE = json.dumps({"command": "echo hello; touch /done"}, separators=(", ", " : "))
DIGEST = "c" * 64
EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "tasks"


def solve(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Do it in two turns, and say so in a third."""
    turn = sum(one["role"] == "assistant" for one in messages)
    if turn < 2:
        return call(SOLVE, call_id=f"call-{turn}", text="hello")
    return say("hello, it is done")


async def run_captured(
    client: AsyncSandboxClient, engine: StandInEngine, tasks: Path, out: Path, **config: Any
) -> RunDirectory:
    """Run tasks with react through a proxy before an engine."""
    model = ModelSettings(
        "stand-in", engine.base_url, api_key="sk-of-the-engine", temperature=0.8,
        policy_version=DIGEST, tokenizer="bytes@1", renderer="tags@1", retry_wait_s=0.01,
    )  # fmt: skip
    settings = ProxySettings(
        EngineSettings(engine.base_url, model.api_key, retry_wait_s=0.01),
        model=model.name,
        policy_version=DIGEST,
    )
    directory = RunDirectory(out)
    async with local_capture(settings) as capture:
        chosen = RunConfig(
            tasks=(tasks,), harness="react", model=model, capture=capture.level, **config
        )
        await Batch(client, chosen, directory, capture=capture).run()
    return directory


def rollouts(directory: RunDirectory, **options: Any) -> list[PolicyRollout]:
    """Return what the contract makes of a run, in order."""
    found = []
    for key, trajectory in sorted(directory.results().items(), key=lambda one: str(one[0])):
        calls = read_calls(directory.calls(key))
        policy = policy_of(trajectory, calls)
        trial = trial_of(trajectory, calls, split="train", policy=policy)
        found.append(PolicyRollout.from_trial(trial, **options))
    return found


async def test_rollout_through_the_proxy_is_the_engines_own_log_bit_for_bit(
    native_async_client: AsyncSandboxClient, tmp_path: Path
) -> None:
    """From a task to a sequence that can be trained on, with nothing made up on the way."""
    make_task(tmp_path / "tasks", "one")
    make_task(tmp_path / "tasks", "two")
    faults: list[Fault | None] = [None, Status(503), None, Status(429)]
    async with StandInEngine(solve, faults=faults) as engine:
        directory = await run_captured(
            native_async_client, engine, tmp_path / "tasks", tmp_path / "out", samples=2
        )
    found = rollouts(directory)

    assert all("token_ids" not in one.unknown for one in directory.results().values())
    assert [one.reward for one in found] == [1.0] * 4
    assert {one.trial_name for one in found} == {f"{t}.{n}.0" for t in ("one", "two") for n in "01"}
    sampled = sorted(
        (one.prompt, one.completion, tuple(map(float.hex, one.logprobs))) for one in engine.log
    )
    turns = sorted(
        (prompt, completion, tuple(map(float.hex, logprobs)))
        for one in found
        for prompt, completion, logprobs in zip(
            one.prompt_token_ids, one.completion_token_ids, one.old_logprobs, strict=True
        )
    )
    assert turns == sampled
    assert len(turns) == 12
    for key, trajectory in directory.results().items():
        calls = read_calls(directory.calls(key))
        atif = to_atif(trajectory, directory.blobs, str(key), calls)
        told = [one["metrics"] for one in atif["steps"] if one["source"] == "agent"]
        assert [
            (tuple(one["prompt_token_ids"]), tuple(one["completion_token_ids"])) for one in told
        ] == [(one.prompt_token_ids, one.call.completion_token_ids) for one in calls.turns]
    sequence = training_sequences(found[0])[0]
    assert sum(sequence.loss_mask) == sum(map(len, found[0].completion_token_ids))
    manifest = TrainingBatch(found).manifest
    assert manifest.policy.sampling == {"temperature": 0.8}
    assert (manifest.policy.checkpoint, manifest.agent) == (DIGEST, "react 3")
    for path in (tmp_path / "out").rglob("*"):  # neither the engine's key nor a minted one
        if path.is_file():
            assert b"sk-of-the-engine" not in path.read_bytes()
            assert b"sk-coldframe-" not in path.read_bytes()


async def test_key_of_the_engine_that_is_revoked_in_the_middle_is_inference_and_not_tried_again(
    native_async_client: AsyncSandboxClient, tmp_path: Path
) -> None:
    """To ask again with a wrong key helps nobody, and the policy could do nothing about it."""
    make_task(tmp_path / "tasks", "one")
    async with StandInEngine(solve, faults=[None, *[Status(401)] * 99]) as engine:
        directory = await run_captured(
            native_async_client, engine, tmp_path / "tasks", tmp_path / "out", attempts=1
        )
        asked = len(engine.requests)
    (trajectory,) = directory.results().values()

    assert asked == 2
    assert trajectory.rewards is None
    assert trajectory.failure
    assert (trajectory.failure.side, trajectory.failure.code) == (
        Side.INFERENCE,
        "inference_failed",
    )
    assert "status 401" in trajectory.failure.message
    with pytest.raises(ContractError, match="exception"):
        rollouts(directory)


@pytest.mark.parametrize("fault", ["lie", "dead"])
async def test_rollout_with_an_engine_that_lies_or_dies_is_refused_by_name(
    native_async_client: AsyncSandboxClient, tmp_path: Path, fault: str
) -> None:
    """The task is solved all the same: nothing but the contract stands in between."""

    def drop(answer: dict[str, Any]) -> None:
        answer["choices"][0]["token_ids"].pop()

    make_task(tmp_path / "tasks", "one")
    faults: list[Fault | None] = (
        [None, Lie(drop)] if fault == "lie" else [None, *[Status(500)] * 99]
    )
    async with StandInEngine(solve, faults=faults) as engine:
        directory = await run_captured(
            native_async_client, engine, tmp_path / "tasks", tmp_path / "out", attempts=1
        )
    with pytest.raises(ContractError) as refused:
        rollouts(directory)
    (trajectory,) = directory.results().values()
    told = [one for one in trajectory.warnings if "cannot be trained on" in one]
    assert len(told) == (fault == "lie")

    expected = {"lie": "capture_has_tokens", "dead": "trial_has_no_exception"}
    assert refused.value.rule == expected[fault]


async def test_command_captures_a_shipped_task(tmp_path: Path, debian_image: object) -> None:
    """From the command line to a rollout, and nothing of the proxy is left behind."""
    name = "recover-binary-log"
    solution = (EXAMPLES / name / "solution" / "solve.sh").read_text()
    text = f"cat > /tmp/solve.sh <<'END-OF-SCRIPT'\n{solution}\nEND-OF-SCRIPT\nsh /tmp/solve.sh"

    def script(messages: list[dict[str, Any]]) -> dict[str, Any]:
        begun = any(one["role"] == "assistant" for one in messages)
        return say("hello") if begun else call(json.dumps({"command": text}), call_id="call-0")

    async with StandInEngine(script) as engine:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "coldframe.cli.main", "rollout", "run", str(EXAMPLES / name),
            "--harness", "react", "--model", "stand-in", "--base-url", engine.base_url,
            "--capture", "tokens", "--temperature", "1",
            "--policy-version", DIGEST, "--tokenizer", "bytes@1",
            "--renderer", "tags@1", "--out", str(tmp_path / "out"),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        _, said = await process.communicate()
    assert process.returncode == 0, said.decode()
    (rollout,) = rollouts(RunDirectory(tmp_path / "out"))

    assert rollout.reward == 1.0
    assert rollout.completion_token_ids == tuple(one.completion for one in engine.log)
    assert rollout.old_logprobs == tuple(one.logprobs for one in engine.log)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--temperature", "1"], "--policy-version"),
        (["--temperature", "1", "--policy-version", "latest"], "no digest"),
        (["--policy-version", DIGEST, "--seed", "3"], "say how is sampled, such as --temperature"),
        ([], "say which weights act, --policy-version sha256:...; and how is sampled"),
    ],
)
def test_capture_that_could_never_be_trained_on_is_refused_at_the_start(
    tmp_path: Path, given: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before a sandbox is made, and before hours of them."""
    model = ["--model", "m", "--base-url", "http://127.0.0.1:9/v1", "--capture", "tokens"]
    code = main(["rollout", "run", str(EXAMPLES), *model, "--out", str(tmp_path / "out"), *given])

    assert code == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


async def test_steps_of_a_task_are_captured_apart(
    native_async_client: AsyncSandboxClient, tmp_path: Path
) -> None:
    """Each step's tokens stand with its own reward."""
    steps_task(tmp_path / "tasks", one={}, two={})
    async with StandInEngine(lambda messages: say("hello")) as engine:
        directory = await run_captured(
            native_async_client, engine, tmp_path / "tasks", tmp_path / "out"
        )
    (rollout,) = rollouts(directory, topology="multi_step.mean@1")

    assert len(rollout.spans) == len(rollout.prompt_token_ids) == len(engine.log) == 2
