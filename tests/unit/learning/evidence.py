"""A trial that may be trained on, and how to spoil it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from coldframe.learning.contracts import (
    Call,
    PolicyIdentity,
    PolicyRollout,
    Provenance,
    Segment,
    TokenRollout,
    TrainingSequence,
    Trial,
    TrialStep,
)

POLICY = PolicyIdentity(
    checkpoint="sha256:" + "ab" * 32,
    tokenizer="qwen3@2",
    renderer="qwen3-chat@1",
    sampling={"temperature": 1.0, "top_p": 1.0},
    iteration=3,
)
OLDER = replace(POLICY, checkpoint="sha256:" + "cd" * 32, iteration=2)
ORIGIN = Provenance(
    run_id="run-1",
    runner="harbor 0.18.0",
    agent="terminus-2 2.0.0",
    agent_config={"max_turns": 10},
    task_digest="1" * 64,
    verifier_digest="2" * 64,
    reward_schema="examples@1",
    started_at=10.0,
    ended_at=20.0,
)
PROMPTS = ([1, 2], [1, 2, 3, 4, 5])
COMPLETIONS = ([3, 4], [6])
LOGPROBS = ([-0.5, -0.25], [-1.5])


def calls(prompts: Any = PROMPTS, completions: Any = COMPLETIONS, name: str = "c") -> Any:
    """Return what the engine counted of these rows."""
    return tuple(
        Call(f"{name}{turn}", len(prompt), len(completion))
        for turn, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
    )


def segment(**changes: Any) -> Segment:
    """Return the one conversation of the trial."""
    base = Segment(
        prompt_token_ids=[list(row) for row in PROMPTS],
        completion_token_ids=[list(row) for row in COMPLETIONS],
        logprobs=[list(row) for row in LOGPROBS],
        calls=calls(),
    )
    return replace(base, **changes)


def other(name: str, token: int, **changes: Any) -> Segment:
    """Return a conversation of one turn that has nothing in common with others."""
    base = Segment(
        prompt_token_ids=[[token, token]],
        completion_token_ids=[[token + 1]],
        logprobs=[[-0.125]],
        calls=(Call(f"{name}-0", 2, 1),),
        name=name,
    )
    return replace(base, **changes)


def trial(**changes: Any) -> Trial:
    """Return a trial of one segment that keeps every rule."""
    base = Trial(
        trial_name="sum__abc",
        task_name="sum",
        split="train",
        rewards={"reward": 1.0},
        segments=(segment(),),
        policy=POLICY,
        provenance=ORIGIN,
    )
    return replace(base, **changes)


def step(name: str, token: int, rewards: Any, **changes: Any) -> TrialStep:
    """Return a step with one conversation."""
    return replace(TrialStep(name, (other(name, token),), rewards), **changes)


def stepped(*steps: TrialStep, **changes: Any) -> Trial:
    """Return a trial of two steps, by default with the rewards 1 and 0.5."""
    steps = steps or (step("one", 10, {"reward": 1.0}), step("two", 20, {"reward": 0.5}))
    return replace(trial(segments=(), rewards=None, steps=steps), **changes)


def branched(**changes: Any) -> Trial:
    """Return a trial with a sub-agent and a compaction."""
    segments = (
        segment(order=0),
        other("helper", 30, kind="sub_agent", owner="main", order=1),
        other("rest", 40, kind="compaction", owner="main", order=2),
    )
    return replace(trial(segments=segments), **changes)


def spoilt(**changes: Any) -> Trial:
    """Return the trial with its segment changed."""
    return trial(segments=(segment(**changes),))


def rollout(**changes: Any) -> PolicyRollout:
    """Return the trial's rollout, changed by hand."""
    return replace(PolicyRollout.from_trial(trial()), **changes)


def tokens(**changes: Any) -> TokenRollout:
    """Return the trial's rollout without log-probabilities, changed by hand."""
    return replace(TokenRollout.from_trial(trial(), algorithm="sft@1"), **changes)


def sequence(**changes: Any) -> TrainingSequence:
    """Return a sequence of five tokens of which two are trained."""
    base = TrainingSequence(
        trial_name="sum__abc",
        span="main",
        token_ids=[1, 2, 3, 4, 5],
        loss_mask=[False, True, False, True, False],
        old_logprobs=[None, -0.5, None, -0.25, None],
        mask_rule="completions@1",
    )
    return replace(base, **changes)
