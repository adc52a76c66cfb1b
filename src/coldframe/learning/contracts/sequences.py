"""A rollout as token sequences with their loss masks, and the gate on their length.

A conversation is one sequence: the last prompt already holds everything before it, so each token
stands there once. Tokens, mask and log-probabilities are one value each per token, and are only
ever cut together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from coldframe.learning.contracts.errors import ContractError
from coldframe.learning.contracts.masks import COMPLETIONS, LossMask
from coldframe.learning.contracts.rollouts import AnyRollout, PolicyRollout
from coldframe.learning.contracts.rules import Breaches, Rules
from coldframe.learning.contracts.topologies import Span
from coldframe.learning.contracts.values import is_number

rule: Rules[TrainingSequence] = Rules()


@dataclass(frozen=True, kw_only=True)
class TrainingSequence:
    """One conversation of a trial, ready to be trained on.

    Raises:
        ContractError: its columns do not fit each other.
    """

    trial_name: str
    span: str
    """Which conversation: `main`, or the name of a step or segment."""
    token_ids: Sequence[int]
    loss_mask: Sequence[bool]
    """True: trained."""
    old_logprobs: Sequence[float | None] | None
    """None where the policy did not write the token; None as a whole without a PolicyRollout."""
    mask_rule: str

    def __post_init__(self) -> None:
        rule.enforce(self.trial_name, self)
        for name in ("token_ids", "loss_mask"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.old_logprobs is not None:
            object.__setattr__(self, "old_logprobs", tuple(self.old_logprobs))

    @property
    def trainable_tokens(self) -> int:
        """How many tokens are trained."""
        return sum(self.loss_mask)


@rule
def columns_are_of_one_length(sequence: TrainingSequence) -> Breaches:
    """Each token has its mask and its log-probability, or the mark that it has none."""
    due = len(sequence.token_ids)
    for field in ("loss_mask", "old_logprobs"):
        column = getattr(sequence, field)
        if column is not None and len(column) != due:
            yield field, len(column), f"lengths differ: values, and {due} tokens"


@rule
def mask_is_of_bools(sequence: TrainingSequence) -> Breaches:
    """A mask says yes or no; a weight between them is an algorithm's, not the contract's."""
    for place, value in enumerate(sequence.loss_mask):
        if not isinstance(value, bool):
            yield f"loss_mask[{place}]", value, "is no bool"


@rule
def trained_tokens_have_logprobs(sequence: TrainingSequence) -> Breaches:
    """No token is trained against a log-probability that nobody measured."""
    pairs = zip(sequence.loss_mask, sequence.old_logprobs or (), strict=False)
    for place, (trained, logprob) in enumerate(pairs):
        if trained and logprob is None:
            yield f"old_logprobs[{place}]", None, "trained, and has no log-probability"


@rule
def sequence_logprobs_are_log_probabilities(sequence: TrainingSequence) -> Breaches:
    """What stands there is finite and at most 0, as the engine gave it."""
    for place, value in enumerate(sequence.old_logprobs or ()):
        if value is not None and not (is_number(value) and value <= 0):
            yield f"old_logprobs[{place}]", value, "is no log-probability"


@rule
def something_is_trained(sequence: TrainingSequence) -> Breaches:
    """A sequence without a trained token would be counted and teach nothing."""
    if not any(sequence.loss_mask):
        yield "loss_mask", len(sequence.loss_mask), f"trains no token by {sequence.mask_rule}"


def training_sequences(
    rollout: AnyRollout, mask: LossMask = COMPLETIONS
) -> tuple[TrainingSequence, ...]:
    """Return the conversations of a rollout of which the mask trains something, in order.

    Raises:
        ContractError: the mask does not fit the completions, or trains nothing at all.
    """
    rows = mask.of(rollout)
    lengths = [len(row) for row in rows]
    due = [len(row) for row in rollout.completion_token_ids]
    if lengths != due:
        problem = f"lengths differ: of {mask.name}, and completions of {due}"
        raise ContractError(rollout.trial_name, "loss_mask", lengths, problem, rule="mask_fits")
    if not any(any(row) for row in rows):
        problem = f"{mask.name} trains no token of this trial"
        raise ContractError(rollout.trial_name, "loss_mask", 0, problem, rule="mask_trains")
    return tuple(
        _sequence(rollout, span, rows, mask.name)
        for span in rollout.spans
        if any(any(row) for row in rows[span.first_turn : span.end_turn])
    )


def _sequence(
    rollout: AnyRollout, span: Span, rows: Sequence[Sequence[bool]], mask_rule: str
) -> TrainingSequence:
    measured = rollout.old_logprobs if isinstance(rollout, PolicyRollout) else None
    ids: list[int] = []
    trained: list[bool] = []
    logprobs: list[float | None] = []
    for turn in range(span.first_turn, span.end_turn):
        prompt, completion = rollout.prompt_token_ids[turn], rollout.completion_token_ids[turn]
        new = prompt[len(ids) :]
        ids += [*new, *completion]
        trained += [*(False for _ in new), *rows[turn]]
        of_turn: Sequence[float | None] = [None] * len(completion)
        logprobs += [*(None for _ in new), *(of_turn if measured is None else measured[turn])]
    return TrainingSequence(
        trial_name=rollout.trial_name,
        span=span.name,
        token_ids=ids,
        loss_mask=trained,
        old_logprobs=None if measured is None else logprobs,
        mask_rule=mask_rule,
    )


@dataclass(frozen=True)
class Gated:
    """A sequence that passed the gate, and what it was before."""

    sequence: TrainingSequence
    full_tokens: int
    """Before the gate."""
    trainable_tokens: int
    """Before the gate."""
    reason: str | None
    """Why it was cut; None: it is whole."""


@dataclass(frozen=True)
class LengthGate:
    """Refuses sequences of over `max_tokens`, or cuts them behind that."""

    max_tokens: int
    over: Literal["refuse", "cut"] = "refuse"

    def apply(self, sequence: TrainingSequence) -> Gated:
        """Return the sequence, whole or cut, with its token counts.

        Raises:
            ContractError: it is too long and is not to be cut, or no trained token would be left.
        """
        full, trainable = len(sequence.token_ids), sequence.trainable_tokens
        if full <= self.max_tokens:
            return Gated(sequence, full, trainable, None)
        reason = (
            f"{full} tokens, {trainable} of them trained, are over the limit of {self.max_tokens}"
        )
        kept = sequence.loss_mask[: max(self.max_tokens, 0)]
        if self.over == "refuse" or not any(kept):
            left = "" if self.over == "refuse" else "; cut there, none that is trained is left"
            trial = sequence.trial_name
            raise ContractError(trial, "token_ids", full, reason + left, rule="length_gate")
        columns: dict[str, Any] = {
            "token_ids": sequence.token_ids[: self.max_tokens],
            "loss_mask": kept,
            "old_logprobs": None
            if sequence.old_logprobs is None
            else sequence.old_logprobs[: self.max_tokens],
        }
        return Gated(replace(sequence, **columns), full, trainable, f"cut: {reason}")
