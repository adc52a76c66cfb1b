"""From a trial to the fields of a rollout: the rules about what only the trial knows."""

from __future__ import annotations

from typing import Any, NamedTuple

from coldframe.learning.contracts.errors import ContractError
from coldframe.learning.contracts.evidence import (
    Call,
    PolicyIdentity,
    Segment,
    Totals,
    Trial,
    TrialStep,
)
from coldframe.learning.contracts.rules import Breaches, Rules, not_all
from coldframe.learning.contracts.topologies import TOPOLOGIES, Topology, Wanted


class Admission(NamedTuple):
    """A trial that asks to be trained on, and on what terms."""

    trial: Trial
    policy: PolicyIdentity | None
    behaviour: PolicyIdentity | None


rule: Rules[Admission] = Rules()


@rule
def evidence_is_well_formed(asked: Admission) -> Breaches:
    """Segments, steps, calls and totals are what they are declared to be, in lists."""
    trial = asked.trial
    yield from not_all(trial.segments, Segment, "segments")
    yield from not_all(trial.steps, TrialStep, "steps")
    for number, step in enumerate(trial.steps):
        yield from not_all(step.segments, Segment, f"steps[{number}].segments")
    for path, segment in _segments(trial):
        yield from not_all(segment.calls, Call, f"{path}.calls")
        if segment.totals is not None and not isinstance(segment.totals, Totals):
            yield f"{path}.totals", segment.totals, "is no Totals"


@rule
def trial_has_no_exception(asked: Admission) -> Breaches:
    """A trial that failed has no reward, whatever its verifier wrote."""
    if asked.trial.exception is not None:
        yield "exception", asked.trial.exception, "the trial ended in an exception"


@rule
def steps_have_no_exception(asked: Admission) -> Breaches:
    """An exception of a step stands with that step alone, and counts like the trial's own."""
    for index, step in enumerate(asked.trial.steps):
        if step.exception is not None:
            field = f"steps[{index}].exception"
            yield field, step.exception, f"step {step.name!r} ended in an exception"


@rule
def capture_has_tokens(asked: Admission) -> Breaches:
    """Below the level `tokens` nothing is trainable."""
    if asked.trial.capture != "tokens":
        problem = "only what was captured with its tokens may be trained on"
        yield "capture", asked.trial.capture, problem


@rule
def sampler_is_named(asked: Admission) -> Breaches:
    """Whoever is to be trained on a trial, it is known who sampled it."""
    if asked.policy is not None and not isinstance(asked.trial.policy, PolicyIdentity):
        yield "policy", asked.trial.policy, "the trial has no policy identity"


@rule
def off_policy_is_marked(asked: Admission) -> Breaches:
    """What another policy sampled than is to be trained says so."""
    sampler = asked.trial.policy
    if sampler is None or asked.policy is None or asked.behaviour is not None:
        return
    if asked.policy != sampler:
        problem = "sampled by another policy than is to be trained; mark it with behaviour="
        yield "policy", sampler, problem


@rule
def mark_is_the_sampler(asked: Admission) -> Breaches:
    """The mark of off-policy data names the policy that did sample."""
    if asked.behaviour is not None and asked.behaviour != asked.trial.policy:
        yield "behaviour", asked.behaviour, "is not the policy that sampled this trial"


@rule
def segments_have_equal_turns(asked: Admission) -> Breaches:
    """Each segment has as many prompts as completions and log-probabilities.

    Put end to end, what one lacks another might have too many of.
    """
    for path, segment in _segments(asked.trial):
        columns = (segment.prompt_token_ids, segment.completion_token_ids, segment.logprobs)
        turns = [len(one) for one in columns if isinstance(one, list | tuple)]
        if len(set(turns)) > 1:
            problem = "lengths differ: turns of prompts, completions, log-probabilities"
            yield path, turns, problem


@rule
def turns_have_one_policy(asked: Admission) -> Breaches:
    """No weights were changed while the trial ran."""
    sampler = asked.trial.policy
    if not isinstance(sampler, PolicyIdentity):
        return
    for path, segment in _segments(asked.trial):
        for turn, call in enumerate(segment.calls):
            if call.policy not in (None, sampler.checkpoint):
                field = f"{path}.calls[{turn}].policy"
                yield field, call.policy, f"other weights answered than {sampler.checkpoint}"


def _segments(trial: Trial) -> list[tuple[str, Segment]]:
    own = [(f"segments[{index}]", one) for index, one in enumerate(trial.segments)]
    return own + [
        (f"steps[{number}].segments[{index}]", one)
        for number, step in enumerate(trial.steps)
        for index, one in enumerate(step.segments)
    ]


def admit(
    trial: Trial,
    reward_key: str,
    topology: Topology | str,
    policy: PolicyIdentity | None,
    behaviour: PolicyIdentity | None,
) -> tuple[dict[str, Any], Any]:
    """Return the fields of a rollout, its content yet unchecked, and its log-probabilities.

    Raises:
        ContractError: a rule about the trial, or one of the topology's, is broken.
    """
    if not isinstance(topology, Topology):
        if topology not in TOPOLOGIES:
            problem = f"is none of {', '.join(TOPOLOGIES)}"
            raise ContractError(trial.trial_name, "topology", topology, problem)
        topology = TOPOLOGIES[topology]
    rule.enforce(trial.trial_name, Admission(trial, policy, behaviour))
    wanted = Wanted(trial, reward_key, topology.name)
    topology.rules.enforce(trial.trial_name, wanted)
    rows = topology.assemble(wanted)
    facts = {
        "trial_name": trial.trial_name,
        "task_name": trial.task_name,
        "prompt_token_ids": rows.prompts,
        "completion_token_ids": rows.completions,
        "reward": rows.reward,
        "reward_key": reward_key,
        "split": trial.split,
        "policy": trial.policy if policy is None else policy,
        "topology": topology.name,
        "spans": rows.spans,
        "behaviour": behaviour,
        "provenance": trial.provenance,
        "remarks": rows.remarks,
    }
    return facts, rows.logprobs
