"""The rules about what a rollout holds, however it was made."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from coldframe.learning.contracts.evidence import Call, PolicyIdentity
from coldframe.learning.contracts.rules import Breaches, Rules
from coldframe.learning.contracts.topologies import TOPOLOGIES

if TYPE_CHECKING:
    from coldframe.learning.contracts.rollouts import AnyRollout, PolicyRollout, TokenRollout

DIGEST = re.compile(r"(?:[a-z0-9]+[:-])?[0-9a-f]{32,128}")
VERSIONED = re.compile(r"[A-Za-z0-9_.-]+@[0-9]+")

rule: Rules[AnyRollout] = Rules()
logprob_rule: Rules[PolicyRollout] = Rules()
algorithm_rule: Rules[TokenRollout] = Rules()


# --- names, split, reward -------------------------------------------------------------


@rule
def names_are_there(rollout: AnyRollout) -> Breaches:
    """Trial and task are named."""
    for field in ("trial_name", "task_name"):
        value = getattr(rollout, field)
        if not isinstance(value, str) or not value:
            yield field, value, "has no name"


@rule
def split_is_train(rollout: AnyRollout) -> Breaches:
    """Only tasks of the split `train` are trained on."""
    if rollout.split != "train":
        yield "split", rollout.split, "wrong split: only 'train' may be trained on"


@rule
def reward_is_there(rollout: AnyRollout) -> Breaches:
    """The named part of the verdict exists. A missing one is never 0."""
    if rollout.reward is None:
        yield "reward", None, f"the verdict has no {rollout.reward_key!r}"


@rule
def reward_is_a_number(rollout: AnyRollout) -> Breaches:
    """The reward is an int or a float."""
    if rollout.reward is not None and not isinstance(rollout.reward, int | float):
        yield "reward", rollout.reward, "is no number"


@rule
def reward_is_no_bool(rollout: AnyRollout) -> Breaches:
    """A bool says that somebody meant something else than a number."""
    if isinstance(rollout.reward, bool):
        yield "reward", rollout.reward, "is a bool, not a number"


@rule
def reward_is_finite(rollout: AnyRollout) -> Breaches:
    """NaN, infinities, and integers that no float can hold would spoil every mean."""
    if isinstance(rollout.reward, int | float) and not _finite(rollout.reward):
        yield "reward", rollout.reward, "is not finite"


# --- rows -----------------------------------------------------------------------------


@rule
def rows_are_lists(rollout: AnyRollout) -> Breaches:
    """A column is a list of rows, a row a list of ids; text and bytes only look like it."""
    yield from _not_lists(rollout, "prompt_token_ids", "completion_token_ids")


@rule
def turns_are_there(rollout: AnyRollout) -> Breaches:
    """There is at least one turn."""
    if not len(rollout.prompt_token_ids) and not len(rollout.completion_token_ids):
        yield "prompt_token_ids", rollout.prompt_token_ids, "the trial has no rollout details"


@rule
def turn_counts_are_equal(rollout: AnyRollout) -> Breaches:
    """Each turn has a prompt and a completion."""
    counts = len(rollout.prompt_token_ids), len(rollout.completion_token_ids)
    if counts[0] != counts[1]:
        yield "completion_token_ids", counts, "lengths differ: turns of prompts and of completions"


@rule
def prompts_are_not_empty(rollout: AnyRollout) -> Breaches:
    """A call without a prompt was not recorded whole."""
    for turn, row in enumerate(rollout.prompt_token_ids):
        if not len(row):
            yield f"prompt_token_ids[{turn}]", row, "has no ids"


@rule
def completions_are_not_empty(rollout: AnyRollout) -> Breaches:
    """A turn in which nothing was said teaches nothing, and was most likely lost."""
    for turn, row in enumerate(rollout.completion_token_ids):
        if not len(row):
            yield f"completion_token_ids[{turn}]", row, "has no ids"


@rule
def ids_are_integers(rollout: AnyRollout) -> Breaches:
    """Ids are ints: no bools, no floats, no text."""
    for field, one in _ids(rollout):
        if type(one) is not int:
            yield field, one, f"is of type {type(one).__name__}, not an integer"


@rule
def ids_are_not_negative(rollout: AnyRollout) -> Breaches:
    """A negative id is some library's mark of something that is no token."""
    for field, one in _ids(rollout):
        if isinstance(one, int | float) and one < 0:
            yield field, one, "is negative"


# --- spans and what proves them -------------------------------------------------------


@rule
def topology_is_declared(rollout: AnyRollout) -> Breaches:
    """The rows were put together in a way that has a name and a version."""
    if rollout.topology not in TOPOLOGIES:
        yield "topology", rollout.topology, f"is none of {', '.join(TOPOLOGIES)}"


@rule
def linear_is_one_span(rollout: AnyRollout) -> Breaches:
    """What calls itself linear is one conversation."""
    if rollout.topology == "linear@1" and len(rollout.spans) > 1:
        yield "spans", [span.name for span in rollout.spans], "linear is one span"


@rule
def spans_cover_every_turn_once(rollout: AnyRollout) -> Breaches:
    """No turn is left out or belongs to two conversations."""
    due = 0
    for index, span in enumerate(rollout.spans):
        if span.first_turn != due or span.end_turn <= span.first_turn:
            found = (span.first_turn, span.end_turn)
            yield f"spans[{index}]", found, f"does not go on at turn {due}"
        due = span.end_turn
    if due != len(rollout.prompt_token_ids):
        yield "spans", due, f"do not cover all {len(rollout.prompt_token_ids)} turns"


@rule
def turns_are_proven(rollout: AnyRollout) -> Breaches:
    """A prompt and a completion in one place are shown to be of one turn.

    Equal counts do not show it: one turn may lack its prompt and another its completion.
    """
    for index, span in enumerate(rollout.spans):
        if not span.calls and span.totals is None:
            yield (
                f"spans[{index}].calls",
                span.calls,
                "nothing proves that rows belong to the same turn: neither the calls nor the "
                "totals of tokens are known",
            )


@rule
def calls_are_as_many_as_turns(rollout: AnyRollout) -> Breaches:
    """Every call has its rows, every row its call."""
    for index, span in enumerate(rollout.spans):
        turns = span.end_turn - span.first_turn
        if span.calls and len(span.calls) != turns:
            field, found = f"spans[{index}].calls", len(span.calls)
            yield field, found, f"lengths differ: calls, and rows of {turns} turns"


@rule
def calls_count_the_tokens_of_their_rows(rollout: AnyRollout) -> Breaches:
    """The engine counted as many tokens as the rows hold, call by call."""
    for field, turn, call in _calls(rollout):
        rows = rollout.prompt_token_ids[turn : turn + 1], rollout.completion_token_ids[turn:][:1]
        found = tuple(len(row[0]) for row in rows if row)
        counted = (call.prompt_tokens, call.completion_tokens)
        if found != counted:
            yield field, counted, f"lengths differ: tokens counted, and in the rows {found}"


@rule
def calls_are_recorded_once(rollout: AnyRollout) -> Breaches:
    """No call stands there twice, so that nothing is trained twice."""
    seen: dict[str, str] = {}
    for field, _, call in _calls(rollout):
        if call.call_id in seen:
            yield f"{field}.call_id", call.call_id, f"the same call as {seen[call.call_id]}"
        seen[call.call_id] = field


@rule
def totals_are_the_sums_of_the_rows(rollout: AnyRollout) -> Breaches:
    """With totals as the only proof, not one token is missing in either column."""
    for index, span in enumerate(rollout.spans):
        if span.totals is None:
            continue
        turns = slice(span.first_turn, span.end_turn)
        found = (
            sum(len(row) for row in rollout.prompt_token_ids[turns]),
            sum(len(row) for row in rollout.completion_token_ids[turns]),
        )
        counted = (span.totals.prompt_tokens, span.totals.completion_tokens)
        if found != counted:
            problem = f"lengths differ: tokens counted, and in the rows {found}"
            yield f"spans[{index}].totals", counted, problem


@rule
def turns_extend_what_came_before(rollout: AnyRollout) -> Breaches:
    """Within a conversation a prompt begins with the prompt and completion before it, id by id.

    If not, the history was rewritten or rows changed places.
    """
    for span in rollout.spans:
        for turn in range(span.first_turn + 1, span.end_turn):
            prompts, completions = rollout.prompt_token_ids, rollout.completion_token_ids
            before = [*prompts[turn - 1], *completions[turn - 1]]
            prompt = list(prompts[turn])
            if prompt[: len(before)] != before:
                both = zip(before, prompt, strict=False)
                at = next(
                    (place for place, (old, new) in enumerate(both) if old != new), len(prompt)
                )
                yield (
                    f"prompt_token_ids[{turn}][{at}]",
                    prompt[at : at + 1],
                    f"does not extend turn {turn - 1} by exact ids (reordered rows, or a history "
                    "that was rewritten, which begins a segment of its own)",
                )


@rule
def turns_are_not_repeated(rollout: AnyRollout) -> Breaches:
    """No two turns are the same to the last id: context that was copied is not trained twice."""
    seen: dict[tuple[object, object], int] = {}
    pairs = zip(rollout.prompt_token_ids, rollout.completion_token_ids, strict=False)
    for turn, (prompt, completion) in enumerate(pairs):
        key = tuple(prompt), tuple(completion)
        if key in seen:
            yield f"prompt_token_ids[{turn}]", prompt, f"turn {turn} repeats turn {seen[key]}"
        seen[key] = turn


# --- policy ---------------------------------------------------------------------------


@rule
def policy_is_named(rollout: AnyRollout) -> Breaches:
    """There is a policy identity, and the mark of off-policy data is one too."""
    if not isinstance(rollout.policy, PolicyIdentity):
        yield "policy", rollout.policy, "has no policy identity"
    if rollout.behaviour is not None and not isinstance(rollout.behaviour, PolicyIdentity):
        yield "behaviour", rollout.behaviour, "is no policy identity"


@rule
def checkpoint_is_a_digest(rollout: AnyRollout) -> Breaches:
    """Weights are named by their content: `latest` is another thing tomorrow."""
    for field, policy in _policies(rollout):
        if not isinstance(policy.checkpoint, str) or not DIGEST.fullmatch(policy.checkpoint):
            yield f"{field}.checkpoint", policy.checkpoint, "is no digest (32 hex digits or more)"


@rule
def tokenizer_is_named(rollout: AnyRollout) -> Breaches:
    """Ids mean nothing without their tokenizer."""
    for field, policy in _policies(rollout):
        if not isinstance(policy.tokenizer, str) or not policy.tokenizer:
            yield f"{field}.tokenizer", policy.tokenizer, "has no tokenizer"


@rule
def renderer_is_named(rollout: AnyRollout) -> Breaches:
    """What made ids of messages is known, with its version."""
    for field, policy in _policies(rollout):
        if not isinstance(policy.renderer, str) or not policy.renderer:
            yield f"{field}.renderer", policy.renderer, "has no renderer or template version"


@rule
def sampling_is_stated(rollout: AnyRollout) -> Breaches:
    """The parameters that shaped the distribution are there, none of them NaN or infinite."""
    for field, policy in _policies(rollout):
        if not isinstance(policy.sampling, Mapping) or not policy.sampling:
            yield f"{field}.sampling", policy.sampling, "has no sampling parameters"
            continue
        for name, value in policy.sampling.items():
            if isinstance(value, float) and not math.isfinite(value):
                yield f"{field}.sampling[{name!r}]", value, "is not finite"


@rule
def iteration_is_counted(rollout: AnyRollout) -> Breaches:
    """Which iteration of training sampled is an int from 0."""
    for field, policy in _policies(rollout):
        if type(policy.iteration) is not int or policy.iteration < 0:
            yield f"{field}.iteration", policy.iteration, "is no iteration (an int from 0)"


@rule
def mark_names_another_policy(rollout: AnyRollout) -> Breaches:
    """On-policy data is not marked as off-policy."""
    if rollout.behaviour is not None and rollout.behaviour == rollout.policy:
        problem = "marked as off-policy, but sampled by the policy that is to be trained"
        yield "behaviour", rollout.behaviour, problem


# --- log-probabilities ----------------------------------------------------------------


@logprob_rule
def logprob_rows_are_lists(rollout: PolicyRollout) -> Breaches:
    """They were captured, and as for ids, a row is a list."""
    if rollout.old_logprobs is None:
        problem = "has no log-probabilities; a TokenRollout is for algorithms that need none"
        yield "old_logprobs", None, problem
    yield from _not_lists(rollout, "old_logprobs")


@logprob_rule
def logprob_turns_are_equal(rollout: PolicyRollout) -> Breaches:
    """Each turn has its row of them."""
    counts = len(rollout.old_logprobs), len(rollout.completion_token_ids)
    if counts[0] != counts[1]:
        problem = "lengths differ: turns of log-probabilities and of completions"
        yield "old_logprobs", counts, problem


@logprob_rule
def logprobs_are_one_per_token(rollout: PolicyRollout) -> Breaches:
    """Each completion token has one."""
    rows = zip(rollout.old_logprobs, rollout.completion_token_ids, strict=False)
    for turn, (logprobs, ids) in enumerate(rows):
        if len(logprobs) != len(ids):
            found = (len(logprobs), len(ids))
            problem = "lengths differ: log-probabilities and completion ids"
            yield f"old_logprobs[{turn}]", found, problem


@logprob_rule
def logprobs_are_numbers(rollout: PolicyRollout) -> Breaches:
    """None, bools and text are no log-probabilities."""
    for field, value in _logprobs(rollout):
        if isinstance(value, bool) or not isinstance(value, int | float):
            yield field, value, f"is of type {type(value).__name__}, not a number"


@logprob_rule
def logprobs_are_finite(rollout: PolicyRollout) -> Breaches:
    """An engine that gives -inf for a token that it sampled gave something else."""
    for field, value in _logprobs(rollout):
        if isinstance(value, int | float) and not _finite(value):
            yield field, value, "is not finite"


@logprob_rule
def logprobs_are_not_positive(rollout: PolicyRollout) -> Breaches:
    """No probability is over 1, not by a rounding error either: it is refused, never clipped."""
    for field, value in _logprobs(rollout):
        if isinstance(value, int | float) and value > 0 and _finite(value):
            yield field, value, "is over 0, so no log-probability"


@algorithm_rule
def algorithm_is_declared(rollout: TokenRollout) -> Breaches:
    """Whoever takes tokens without log-probabilities says for what."""
    if not isinstance(rollout.algorithm, str) or not VERSIONED.fullmatch(rollout.algorithm):
        yield "algorithm", rollout.algorithm, "declares no algorithm, as NAME@VERSION"


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int that no float can hold
        return False


def _not_lists(rollout: AnyRollout, *columns: str) -> Breaches:
    for name in columns:
        column = getattr(rollout, name)
        if not isinstance(column, list | tuple):
            yield name, column, "is no list of rows"
            continue
        for turn, row in enumerate(column):
            if not isinstance(row, list | tuple):
                yield f"{name}[{turn}]", row, "is no list"


def _ids(rollout: AnyRollout) -> Iterator[tuple[str, Any]]:
    yield from _cells("prompt_token_ids", rollout.prompt_token_ids)
    yield from _cells("completion_token_ids", rollout.completion_token_ids)


def _logprobs(rollout: PolicyRollout) -> Iterator[tuple[str, Any]]:
    return _cells("old_logprobs", rollout.old_logprobs)


def _cells(name: str, column: Iterable[Iterable[Any]]) -> Iterator[tuple[str, Any]]:
    for turn, row in enumerate(column):
        for place, value in enumerate(row):
            yield f"{name}[{turn}][{place}]", value


def _calls(rollout: AnyRollout) -> Iterator[tuple[str, int, Call]]:
    for index, span in enumerate(rollout.spans):
        for place, call in enumerate(span.calls):
            yield f"spans[{index}].calls[{place}]", span.first_turn + place, call


def _policies(rollout: AnyRollout) -> Iterator[tuple[str, PolicyIdentity]]:
    for field in ("policy", "behaviour"):
        policy = getattr(rollout, field)
        if isinstance(policy, PolicyIdentity):
            yield field, policy
