"""How the conversations of a trial become the rows of one rollout. Explicit and versioned.

The default takes one conversation and no more. What has several needs an adapter that the caller
names, since only he knows what they are to each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from coldframe.learning.contracts.evidence import Call, Segment, Totals, Trial, TrialStep
from coldframe.learning.contracts.rules import Breaches, Rules
from coldframe.learning.contracts.values import is_number

KINDS = ("main", "sub_agent", "compaction")


@dataclass(frozen=True)
class Span:
    """Turns that are one conversation: `prompt_token_ids[first_turn:end_turn]` and its like."""

    name: str
    kind: str
    owner: str | None
    first_turn: int
    end_turn: int
    calls: tuple[Call, ...] = ()
    totals: Totals | None = None
    reward: float | None = None
    """Of a step; None: it has no such part, or this is no step."""

    def __post_init__(self) -> None:
        if isinstance(self.calls, list):
            object.__setattr__(self, "calls", tuple(self.calls))


class Assembled(NamedTuple):
    """The rows of a rollout before anything in them is checked."""

    prompts: Sequence[Any]
    completions: Sequence[Any]
    logprobs: Sequence[Any] | None
    spans: tuple[Span, ...]
    reward: Any
    remarks: tuple[str, ...] = ()


class Wanted(NamedTuple):
    """A trial and the part of its reward that is asked for."""

    trial: Trial
    reward_key: str
    topology: str


@dataclass(frozen=True)
class Topology:
    """One way of putting a rollout together, and what a trial must be for it."""

    name: str
    """With its version, as `linear@1`; a version never changes what it does."""
    rules: Rules[Wanted]
    assemble: Callable[[Wanted], Assembled]


def part(rewards: Any, key: str) -> Any:
    """Return the part of a reward, or None if it is not there."""
    return rewards.get(key) if isinstance(rewards, Mapping) else None


def _rows(column: Any) -> list[Any]:
    """Return the rows; what is no column stands there as one row, to be refused by name."""
    if column is None:
        return []
    return list(column) if isinstance(column, list | tuple) else [column]


def _joined(
    segments: Iterable[tuple[Segment, str, Any]],
) -> tuple[list[Any], list[Any], list[Any] | None, tuple[Span, ...]]:
    """Return prompts, completions, log-probabilities and spans of segments put end to end."""
    prompts: list[Any] = []
    completions: list[Any] = []
    logprobs: list[Any] | None = None
    spans: list[Span] = []
    for segment, kind, reward in segments:
        first = len(prompts)
        prompts += _rows(segment.prompt_token_ids)
        completions += _rows(segment.completion_token_ids)
        if segment.logprobs is not None:
            logprobs = [*(logprobs or ()), *_rows(segment.logprobs)]
        calls = tuple(segment.calls)
        spans.append(
            Span(
                segment.name,
                kind,
                segment.owner,
                first,
                len(prompts),
                calls,
                segment.totals,
                reward,
            )
        )
    return prompts, completions, logprobs, tuple(spans)


# --- linear ---------------------------------------------------------------------------

linear_rule: Rules[Wanted] = Rules()


@linear_rule
def linear_has_no_steps(wanted: Wanted) -> Breaches:
    """A trial of several steps is not one conversation."""
    names = [step.name for step in wanted.trial.steps]
    if names:
        advice = "needs a step-aware adapter: name topology multi_step.mean@1 or multi_step.final@1"
        yield "steps", names, f"a trial of several steps {advice}"


@linear_rule
def linear_has_one_segment(wanted: Wanted) -> Breaches:
    """A trial with a second segment is not one conversation."""
    names = [segment.name for segment in wanted.trial.segments]
    if len(names) > 1:
        reasons = [f"{one.name}: {one.began}" for one in wanted.trial.segments if one.began]
        yield (
            "segments",
            names,
            "more than one segment (a sub-agent, a compaction, a rewritten history); "
            "name topology segments@1 if every one of them is to be trained"
            + "".join(f"; {one}" for one in reasons[:1]),
        )


def _linear(wanted: Wanted) -> Assembled:
    first = wanted.trial.segments[:1]
    rows = _joined((one, one.kind, None) for one in first)
    return Assembled(*rows, part(wanted.trial.rewards, wanted.reward_key))


# --- multi_step -----------------------------------------------------------------------

multi_step_rule: Rules[Wanted] = Rules()


@multi_step_rule
def steps_have_one_segment_each(wanted: Wanted) -> Breaches:
    """There are steps, and each has one conversation."""
    if not wanted.trial.steps:
        yield "steps", wanted.trial.steps, "has no steps; name topology linear@1"
    for index, step in enumerate(wanted.trial.steps):
        if len(step.segments) != 1:
            names = [segment.name for segment in step.segments]
            yield f"steps[{index}].segments", names, "a step is one segment of its own"


@multi_step_rule
def steps_are_named(wanted: Wanted) -> Breaches:
    """Steps have names, and no two the same."""
    names = [step.name for step in wanted.trial.steps]
    for index, name in enumerate(names):
        if not isinstance(name, str) or not name or name in names[:index]:
            yield f"steps[{index}].name", name, "steps have names of their own"


@multi_step_rule
def steps_have_verdicts(wanted: Wanted) -> Breaches:
    """Every step that was run was graded, so that tokens and rewards stay aligned."""
    for index, step in enumerate(wanted.trial.steps):
        if not isinstance(step.rewards, Mapping):
            yield f"steps[{index}].rewards", step.rewards, "this step has no verdict"


@multi_step_rule
def step_rewards_are_numbers(wanted: Wanted) -> Breaches:
    """What a step's verifier wrote under the key is a finite number, in every step."""
    for index, step in enumerate(wanted.trial.steps):
        if not isinstance(step.rewards, Mapping) or wanted.reward_key not in step.rewards:
            continue
        value = step.rewards[wanted.reward_key]
        if not is_number(value):
            field = f"steps[{index}].rewards[{wanted.reward_key!r}]"
            yield field, value, "is no finite number"


@multi_step_rule
def steps_agree_with_the_trial(wanted: Wanted) -> Breaches:
    """The reward of the whole, where the runner gave one, is what its steps come to."""
    if wanted.trial.rewards is None:
        return
    given = part(wanted.trial.rewards, wanted.reward_key)
    ours = AGGREGATES[wanted.topology](wanted.trial.steps, wanted.reward_key)
    if is_number(ours) and not (is_number(given) and math.isclose(given, ours, rel_tol=1e-9)):
        yield (
            f"rewards[{wanted.reward_key!r}]",
            given,
            f"is not what the steps come to by {wanted.topology}, which is {ours!r}",
        )


def _mean(steps: Sequence[TrialStep], key: str) -> Any:
    """Return the mean over steps with a verdict; one without the part counts 0, as in Harbor."""
    verdicts = [step.rewards for step in steps if isinstance(step.rewards, Mapping)]
    if not any(key in one for one in verdicts):
        return None
    try:
        # `sum` rounds otherwise before Python 3.12, and Harbor has that.
        return math.fsum(one.get(key, 0.0) for one in verdicts) / len(verdicts)
    except OverflowError:
        return math.inf  # which is refused as any reward that is not finite


def _final(steps: Sequence[TrialStep], key: str) -> Any:
    return part(steps[-1].rewards, key) if steps else None


AGGREGATES = {"multi_step.mean@1": _mean, "multi_step.final@1": _final}


def _multi_step(wanted: Wanted) -> Assembled:
    steps, key = wanted.trial.steps, wanted.reward_key
    rows = _joined(
        (replace(step.segments[0], name=step.name), "step", part(step.rewards, key))
        for step in steps
    )
    reward = AGGREGATES[wanted.topology](steps, key)
    remarks = tuple(
        f"step {step.name}: has no {key!r}, which {wanted.topology} counts as 0"
        for step in steps
        if wanted.topology == "multi_step.mean@1" and part(step.rewards, key) is None
    )
    return Assembled(*rows, reward, remarks)


# --- segments -------------------------------------------------------------------------

segments_rule: Rules[Wanted] = Rules()


@segments_rule
def segments_have_no_steps(wanted: Wanted) -> Breaches:
    """Segments are those of a task of one step."""
    names = [step.name for step in wanted.trial.steps]
    if names:
        yield "steps", names, "a trial of several steps needs a step-aware adapter: multi_step"


@segments_rule
def segment_kinds_are_known(wanted: Wanted) -> Breaches:
    """Each segment says what it is."""
    for index, one in enumerate(wanted.trial.segments):
        if one.kind not in KINDS:
            yield f"segments[{index}].kind", one.kind, f"is none of {', '.join(KINDS)}"


@segments_rule
def segment_names_differ(wanted: Wanted) -> Breaches:
    """Owners are named, so no two segments have the same name."""
    names = [one.name for one in wanted.trial.segments]
    for index, name in enumerate(names):
        if not name or name in names[:index]:
            yield f"segments[{index}].name", name, "segments have names of their own"


@segments_rule
def segment_order_is_stated(wanted: Wanted) -> Breaches:
    """The orders are 0, 1, 2... in the order given: nobody has to guess what came first."""
    for index, one in enumerate(wanted.trial.segments):
        if type(one.order) is not int or one.order != index:
            yield f"segments[{index}].order", one.order, f"states no order; {index} is due here"


@segments_rule
def segments_begin_with_the_only_main(wanted: Wanted) -> Breaches:
    """There is one main segment, and it is the first."""
    kinds = [one.kind for one in wanted.trial.segments]
    if kinds and (kinds[0] != "main" or kinds.count("main") != 1):
        yield "segments", kinds, "the first segment and no other is the main one"


@segments_rule
def segments_have_owners(wanted: Wanted) -> Breaches:
    """A sub-agent or compaction names the earlier segment that began it; main has none."""
    seen: list[str] = []
    for index, one in enumerate(wanted.trial.segments):
        field = f"segments[{index}].owner"
        if one.kind == "main" and one.owner is not None:
            yield field, one.owner, "the main segment has no owner"
        if one.kind != "main" and one.owner not in seen:
            yield field, one.owner, f"a {one.kind} segment is owned by an earlier one"
        seen.append(one.name)


def _segments(wanted: Wanted) -> Assembled:
    rows = _joined((one, one.kind, None) for one in wanted.trial.segments)
    return Assembled(*rows, part(wanted.trial.rewards, wanted.reward_key))


LINEAR = Topology("linear@1", linear_rule, _linear)
MULTI_STEP_MEAN = Topology("multi_step.mean@1", multi_step_rule, _multi_step)
MULTI_STEP_FINAL = Topology("multi_step.final@1", multi_step_rule, _multi_step)
SEGMENTS = Topology("segments@1", segments_rule, _segments)
TOPOLOGIES = {one.name: one for one in (LINEAR, MULTI_STEP_MEAN, MULTI_STEP_FINAL, SEGMENTS)}
