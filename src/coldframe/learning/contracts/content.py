"""The rules about rewards, ids and log-probabilities, however a rollout was made."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from coldframe.learning.contracts.rules import Breaches, Rules

if TYPE_CHECKING:
    from coldframe.learning.contracts.rollouts import AnyRollout, PolicyRollout, TokenRollout

VERSIONED = re.compile(r"[A-Za-z0-9_.-]+@[0-9]+")

rule: Rules[AnyRollout] = Rules()
logprob_rule: Rules[PolicyRollout] = Rules()
algorithm_rule: Rules[TokenRollout] = Rules()


# --- names, split, reward -------------------------------------------------------------


@rule
def names_are_there(rollout: AnyRollout) -> Breaches:
    """Trial and task are named, and the part of the verdict that is the reward."""
    for field in ("trial_name", "task_name", "reward_key"):
        value = getattr(rollout, field)
        if not isinstance(value, str) or not value:
            yield field, value, "has no name"


@rule
def remarks_are_texts(rollout: AnyRollout) -> Breaches:
    """Remarks are for people."""
    whole = isinstance(rollout.remarks, list | tuple)
    if not whole or not all(isinstance(one, str) for one in rollout.remarks):
        yield "remarks", rollout.remarks, "is no list of texts"


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
    """There is at least one turn, with what went in and what came out."""
    for field in ("prompt_token_ids", "completion_token_ids"):
        if not len(getattr(rollout, field)):
            yield field, getattr(rollout, field), "the trial has no rollout details of this kind"


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
