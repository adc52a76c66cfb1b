"""From what a run kept of an attempt, its trajectory and its journal of calls, to a `Trial`.

Nothing is decided here: what may not be trained on is for the contract to refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coldframe.learning.contracts import (
    Call,
    ContractError,
    PolicyIdentity,
    Provenance,
    Segment,
    Trial,
    TrialStep,
)
from coldframe.trajectories.calls import CapturedCalls, Declared, Turn
from coldframe.trajectories.schema import Trajectory

Declare = Callable[[int, Sequence[Turn]], Declared | None]

_DISTRIBUTION = (
    *("temperature", "top_p", "top_k", "min_p", "logit_bias"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("min_tokens", "bad_words", "allowed_token_ids", "custom_params", "vllm_xargs"),
    *("best_of", "use_beam_search", "length_penalty"),
    *("response_format", "structured_outputs", "structural_tag", "regex", "ebnf"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)
"""Parameters of vLLM's and SGLang's chat completions that change what is likely, or forbid it; a
seed, a stop or a limit on length does not. `tool_choice` does where it demands a call."""
_FREE_CHOICE = (None, "auto", "none")


def trial_name(trajectory: Trajectory) -> str:
    """Return the name of an attempt within its run: task, sample, attempt."""
    identity = trajectory.identity
    return f"{identity.task.key}.{identity.sample}.{identity.attempt}"


def policy_of(
    trajectory: Trajectory,
    calls: CapturedCalls,
    *,
    tokenizer: str | None = None,
    renderer: str | None = None,
    iteration: int = 0,
) -> PolicyIdentity:
    """Return who sampled: as the run was told, with the sampling parameters that were sent.

    Args:
        tokenizer, renderer: where the run was not told.
    Raises:
        ContractError: the calls were sampled in more than one way.
    """
    name, model = trial_name(trajectory), trajectory.identity.model
    sampling = [shaping(turn.call.sampling_sent) for turn in calls.turns]
    for index, one in enumerate(sampling):
        if one != sampling[0]:
            field = f"calls[{index}].sampling_sent"
            raise ContractError(name, field, one, "is not that of the first call")
    versions = {turn.call.policy_version for turn in calls.turns}
    checkpoint = versions.pop() if len(versions) == 1 else None
    if checkpoint is None and model is not None:
        checkpoint = model.policy_version
    return PolicyIdentity(
        checkpoint=checkpoint or "",
        tokenizer=tokenizer or (model.tokenizer if model else None) or "",
        renderer=renderer or (model.renderer if model else None) or "",
        sampling=sampling[0] if sampling else {},
        iteration=iteration,
    )


def trial_of(
    trajectory: Trajectory,
    calls: CapturedCalls,
    *,
    split: str,
    policy: PolicyIdentity,
    reward_schema: str | None = None,
    declare: Declare | None = None,
) -> Trial:
    """Return an attempt as evidence, as it was kept.

    Args:
        split: that its task is of.
        policy: who sampled; see `policy_of`.
        reward_schema: what its rewards mean, where that is more than their form.
        declare: says what a conversation is that its harness did not declare: gets its number,
            from 0 by begin, and its turns.
    """
    multi_step = bool(trajectory.task_steps)
    steps = tuple(
        TrialStep(
            name=step.name,
            segments=_segments(calls, step.name, declare),
            rewards=step.rewards,
            exception=None if step.failure is None else step.failure.message,
        )
        for step in trajectory.task_steps
    )
    return Trial(
        trial_name=trial_name(trajectory),
        task_name=trajectory.identity.task.key,
        split=split,
        rewards=trajectory.rewards,
        segments=() if multi_step else _segments(calls, "", declare),
        steps=steps,
        exception=_exception(trajectory, calls),
        policy=policy,
        capture=calls.level.value,
        provenance=_provenance(trajectory, reward_schema),
    )


def _exception(trajectory: Trajectory, calls: CapturedCalls) -> str | None:
    if trajectory.failure is not None:
        failure = trajectory.failure
        return f"{failure.side.value}: {failure.code}: {failure.message}"
    if calls.unsettled:
        return f"it is not known whether the answer of {calls.unsettled[0].call_id} was received"
    if any(turn.call.policy_changed for turn in calls.turns):
        return "the weights were changed while a call was in flight"
    if not calls.ended:
        return "its journal of calls has no end"
    return None


def _segments(calls: CapturedCalls, step: str, declare: Declare | None) -> tuple[Segment, ...]:
    """Return the conversations of a step, by their begin."""
    return tuple(
        _segment(order, index, turns, declare)
        for order, (index, turns) in enumerate(calls.segments(step).items())
    )


def _segment(order: int, index: int, turns: list[Turn], declare: Declare | None) -> Segment:
    """Return a conversation. The first is the main one unless it is declared as another; what
    nobody declared is refused by every topology until somebody does."""
    first = turns[0].call
    said = first.declared or (declare(order, turns) if declare is not None else None)
    name, kind, owner = "main" if not order else f"segment-{index}", "main", None
    if said is not None:
        name, kind, owner = said.name, said.kind, said.owner
    elif order:
        kind = "unknown"
    return Segment(
        prompt_token_ids=[turn.prompt_token_ids for turn in turns],
        completion_token_ids=[turn.call.completion_token_ids for turn in turns],
        logprobs=[turn.call.logprobs for turn in turns],
        calls=tuple(_call(turn) for turn in turns),
        name=name,
        kind=kind,
        owner=owner,
        order=order,
        began=None if first.broke is None else first.broke.reason,
    )


def _call(turn: Turn) -> Call:
    call = turn.call
    counts: tuple[Any, Any] = (call.prompt_tokens, call.completion_tokens)
    return Call(call.call_id, *counts, policy=call.policy_version)


def shaping(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of sampling that change what is likely."""
    found = {name: sampling[name] for name in _DISTRIBUTION if sampling.get(name) is not None}
    choice = sampling.get("tool_choice")
    return found if choice in _FREE_CHOICE else found | {"tool_choice": choice}


def _provenance(trajectory: Trajectory, reward_schema: str | None) -> Provenance | None:
    """Return where it is from; None if a part of that is not known."""
    identity = trajectory.identity
    task_digest, verifier_digest = identity.task.digest, identity.verifier.digest
    started_at, ended_at = trajectory.started_at, trajectory.ended_at
    if task_digest is None or verifier_digest is None or started_at is None or ended_at is None:
        return None
    settings = dict(identity.harness.settings)
    # How long an agent may take is the task's own, so it differs within a run.
    limits = {k: v for k, v in settings.pop("limits", {}).items() if k != "wall_s"}
    return Provenance(
        run_id=identity.run_id,
        runner=f"coldframe {identity.versions.client}",
        agent=f"{identity.harness.name} {identity.harness.version}",
        agent_config={**settings, "limits": limits},
        task_digest=task_digest,
        verifier_digest=verifier_digest,
        reward_schema=reward_schema or trajectory.reward_schema_version,
        started_at=started_at,
        ended_at=ended_at,
    )
