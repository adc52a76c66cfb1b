"""Tokens, masks and log-probabilities: one value each per token, cut together or not at all."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldframe.learning.contracts import (
    MASKS,
    MULTI_STEP_MEAN,
    SEGMENTS,
    ContractError,
    LengthGate,
    LossMask,
    PolicyRollout,
    Segment,
    TokenRollout,
    training_sequences,
)
from tests.unit.learning.evidence import branched, rollout, sequence, stepped, tokens, trial
from tests.unit.learning.test_contract_rollouts import conversations


def test_conversation_is_one_sequence_with_each_token_once() -> None:
    """The second prompt repeats the first: trained twice, its tokens would weigh double."""
    (made,) = training_sequences(rollout())

    assert made.token_ids == (1, 2, 3, 4, 5, 6)
    assert made.loss_mask == (False, False, True, True, False, True)
    assert made.old_logprobs == (None, None, -0.5, -0.25, None, -1.5)
    assert (made.mask_rule, made.span, made.trainable_tokens) == ("completions@1", "main", 3)


@settings(max_examples=60, deadline=None)
@given(conversations())
def test_every_completion_token_is_trained_once_with_its_own_log_probability(
    given_: Segment,
) -> None:
    """Whatever the turns are: nothing is lost, nothing doubled, nothing zero-filled."""
    made = PolicyRollout.from_trial(trial(segments=(given_,)))
    (one,) = training_sequences(made)
    columns = zip(one.token_ids, one.loss_mask, one.old_logprobs or (), strict=True)

    trained = [(token, logprob) for token, mask, logprob in columns if mask]
    assert trained == [
        (token, logprob)
        for ids, logprobs in zip(given_.completion_token_ids, given_.logprobs, strict=True)
        for token, logprob in zip(ids, logprobs, strict=True)
    ]
    assert list(one.token_ids) == given_.prompt_token_ids[-1] + given_.completion_token_ids[-1]
    untrained = zip(one.loss_mask, one.old_logprobs or (), strict=True)
    assert all(logprob is None for mask, logprob in untrained if not mask)


def test_sequence_of_a_token_rollout_has_no_log_probabilities() -> None:
    """None as a whole, so that no zero is taken for one."""
    (made,) = training_sequences(tokens())

    assert made.old_logprobs is None
    assert made.trainable_tokens == 3


@pytest.mark.parametrize(
    ("mask", "trained"),
    [
        ("completions@1", {"main": [3, 4, 6], "helper": [31], "rest": [41]}),
        ("no_sub_agents@1", {"main": [3, 4, 6], "rest": [41]}),
        ("last_turns@1", {"main": [6], "helper": [31], "rest": [41]}),
    ],
)
def test_named_mask_trains_what_its_name_says(mask: str, trained: dict[str, list[int]]) -> None:
    """A version of a rule never changes: results are compared by it."""
    made = training_sequences(PolicyRollout.from_trial(branched(), topology=SEGMENTS), MASKS[mask])

    found = {
        one.span: [token for token, on in zip(one.token_ids, one.loss_mask, strict=True) if on]
        for one in made
    }
    assert found == trained
    assert {one.mask_rule for one in made} == {mask}


def test_steps_are_sequences_of_their_own() -> None:
    """Each step's conversation begins anew."""
    made = training_sequences(PolicyRollout.from_trial(stepped(), topology=MULTI_STEP_MEAN))

    assert [(one.span, one.token_ids) for one in made] == [
        ("one", (10, 10, 11)),
        ("two", (20, 20, 21)),
    ]


@pytest.mark.parametrize("rows", [(), ((True,),), ((True, True), (True, True))])
def test_mask_that_does_not_fit_is_refused(rows: tuple[tuple[bool, ...], ...]) -> None:
    """A mask shorter than its completion would be filled up by somebody."""
    with pytest.raises(ContractError, match="lengths differ"):
        training_sequences(rollout(), LossMask("mine@1", lambda rollout: rows))


def test_mask_that_trains_nothing_is_refused() -> None:
    """A rollout that teaches nothing must not count in a batch."""
    nothing = LossMask(
        "none@1",
        lambda made: tuple((False,) * len(row) for row in made.completion_token_ids),
    )

    with pytest.raises(ContractError, match="none@1 trains no token"):
        training_sequences(TokenRollout.from_trial(trial(), algorithm="sft@1"), nothing)


# --- the length gate ------------------------------------------------------------------


def test_gate_lets_through_what_fits_and_counts_it() -> None:
    """Counts are kept of everything, so that a limit can be chosen by them."""
    gated = LengthGate(5).apply(sequence())

    assert gated.sequence == sequence()
    assert (gated.full_tokens, gated.trainable_tokens, gated.reason) == (5, 2, None)


def test_gate_refuses_what_is_too_long_by_default() -> None:
    """Cutting changes what is learnt; nobody gets it unasked."""
    with pytest.raises(ContractError, match="5 tokens, 2 of them trained, are over") as caught:
        LengthGate(4).apply(sequence())

    assert (caught.value.field, caught.value.value) == ("token_ids", 5)


@given(st.integers(-1, 6))
def test_gate_cuts_tokens_mask_and_log_probabilities_together(limit: int) -> None:
    """Never one of them alone, never without the reason, never down to nothing."""
    whole = sequence()
    try:
        gated = LengthGate(limit, "cut").apply(whole)
    except ContractError as error:
        assert "none that is trained is left" in str(error)
        assert limit < 2
        return
    kept = gated.sequence
    assert whole.old_logprobs is not None
    assert kept.token_ids == whole.token_ids[:limit]
    assert kept.loss_mask == whole.loss_mask[:limit]
    assert kept.old_logprobs == whole.old_logprobs[:limit]
    assert (gated.full_tokens, gated.trainable_tokens) == (5, 2)
    assert (gated.reason is None) == (limit >= 5)


def test_gate_cuts_sequences_without_log_probabilities_too() -> None:
    """For algorithms that need none."""
    gated = LengthGate(2, "cut").apply(sequence(old_logprobs=None))

    assert gated.sequence.old_logprobs is None
    assert gated.sequence.token_ids == (1, 2)
    assert gated.reason is not None
