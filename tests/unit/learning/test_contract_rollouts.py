"""What comes out is what went in, put together as the topology says."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields, is_dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldframe.learning.contracts import (
    MULTI_STEP_FINAL,
    MULTI_STEP_MEAN,
    SEGMENTS,
    Batch,
    Call,
    ContractError,
    LengthGate,
    PolicyRollout,
    Segment,
    TokenRollout,
    Totals,
    Trial,
    training_sequences,
)
from tests.unit.learning.evidence import (
    COMPLETIONS,
    LOGPROBS,
    OLDER,
    POLICY,
    PROMPTS,
    branched,
    rollout,
    segment,
    spoilt,
    step,
    stepped,
    trial,
)

IDS = st.integers(0, 200_000)


@st.composite
def conversations(draw: st.DrawFn) -> Segment:
    """Return a conversation as an honest engine and harness leave it."""
    prompts: list[list[int]] = []
    completions: list[list[int]] = []
    logprobs: list[list[float]] = []
    context: list[int] = []
    for _ in range(draw(st.integers(1, 4))):
        context += draw(st.lists(IDS, min_size=1, max_size=5))
        prompts.append(list(context))
        said = draw(st.lists(IDS, min_size=1, max_size=5))
        completions.append(said)
        finite = st.floats(max_value=0.0, allow_nan=False, allow_infinity=False)
        logprobs.append(draw(st.lists(finite, min_size=len(said), max_size=len(said))))
        context += said
    counts = zip(prompts, completions, strict=True)
    calls = tuple(Call(f"c{turn}", len(p), len(c)) for turn, (p, c) in enumerate(counts))
    return Segment(prompts, completions, logprobs, calls)


def _plain(rows: Any) -> list[list[Any]]:
    return [list(row) for row in rows]


@settings(max_examples=60, deadline=None)
@given(conversations(), st.floats(allow_nan=False, allow_infinity=False))
def test_rollout_holds_exactly_what_the_engine_gave(given_: Segment, reward: float) -> None:
    """Nothing is filled up, clipped, rounded, rendered again or left out."""
    made = PolicyRollout.from_trial(trial(segments=(given_,), rewards={"reward": reward}))

    assert _plain(made.prompt_token_ids) == given_.prompt_token_ids
    assert _plain(made.completion_token_ids) == given_.completion_token_ids
    assert [[one.hex() for one in row] for row in made.old_logprobs] == [
        [one.hex() for one in row] for row in given_.logprobs
    ]
    assert made.reward.hex() == reward.hex()


_ROTTEN = st.sampled_from(
    [None, True, False, 1.5, float("nan"), float("inf"), -1, "1", b"\x01", [], {}, 2**70]
)


@settings(max_examples=150, deadline=None)
@given(conversations(), st.data())
def test_spoilt_evidence_is_refused_or_kept_as_it_is(given_: Segment, data: st.DataObject) -> None:
    """Whatever is dropped, added or replaced: never a rollout that differs from its evidence."""
    column = data.draw(st.sampled_from(["prompt_token_ids", "completion_token_ids", "logprobs"]))
    rows = copy.deepcopy(getattr(given_, column))
    turn = data.draw(st.integers(0, len(rows) - 1))
    place = data.draw(st.integers(0, len(rows[turn]) - 1))
    match data.draw(st.sampled_from(["row", "cell", "drop row", "drop cell", "swap"])):
        case "row":
            rows[turn] = data.draw(_ROTTEN)
        case "cell":
            rows[turn][place] = data.draw(_ROTTEN)
        case "drop row":
            del rows[turn]
        case "drop cell":
            del rows[turn][place]
        case _:
            rows[turn], rows[-1] = rows[-1], rows[turn]
    evidence = replace(given_, **{column: rows})

    try:
        made = PolicyRollout.from_trial(trial(segments=(evidence,)))
    except ContractError:
        return
    assert _plain(made.prompt_token_ids) == evidence.prompt_token_ids
    assert _plain(made.completion_token_ids) == evidence.completion_token_ids
    assert _plain(made.old_logprobs) == evidence.logprobs


@settings(max_examples=100, deadline=None)
@given(conversations(), st.data())
def test_rows_lost_here_and_there_never_give_equal_counts(
    given_: Segment, data: st.DataObject
) -> None:
    """A harness that appends only what it got leaves equal counts of rows that do not match."""
    turns = len(given_.prompt_token_ids)
    lost_prompt, lost_completion = (data.draw(st.integers(0, turns - 1)) for _ in range(2))
    prompts = [row for turn, row in enumerate(given_.prompt_token_ids) if turn != lost_prompt]
    keep = [turn for turn in range(turns) if turn != lost_completion]
    totals = Totals(
        sum(len(row) for row in given_.prompt_token_ids),
        sum(len(row) for row in given_.completion_token_ids),
    )
    spoiled = replace(
        given_,
        prompt_token_ids=prompts,
        completion_token_ids=[given_.completion_token_ids[turn] for turn in keep],
        logprobs=[given_.logprobs[turn] for turn in keep],
    )
    for proof in ({}, {"calls": (), "totals": totals}, {"calls": ()}):
        with pytest.raises(ContractError):
            PolicyRollout.from_trial(trial(segments=(replace(spoiled, **proof),)))


JUNK = st.sampled_from(
    [
        None,
        True,
        0,
        -1,
        2**70,
        1.5,
        float("nan"),
        "",
        "train",
        b"x",
        (),
        [],
        [None],
        [[]],
        {},
        {1: 2},
        {"reward": []},
        POLICY,
        segment(),
        Call("c", 2, 2),
        Totals(7, 3),
        {1, 2},
        [{}],
    ]
)


def _spoil(value: Any, draw: Callable[..., Any]) -> Any:
    """Return evidence with something in it, at any depth, replaced by junk."""
    if draw(st.integers(0, 3)) == 0:
        return draw(JUNK)
    if is_dataclass(value) and not isinstance(value, type):
        name = draw(st.sampled_from([one.name for one in fields(value)]))
        return replace(value, **{name: _spoil(getattr(value, name), draw)})  # type: ignore[type-var]
    if isinstance(value, list | tuple) and value:
        place = draw(st.integers(0, len(value) - 1))
        return [*value[:place], _spoil(value[place], draw), *value[place + 1 :]]
    return draw(JUNK)


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(
        [
            (trial(), "linear@1"),
            (stepped(), "multi_step.mean@1"),
            (stepped(), "multi_step.final@1"),
            (branched(), "segments@1"),
        ]
    ),
    st.data(),
)
def test_junk_anywhere_in_the_evidence_is_refused_by_name_or_taken_whole(
    valid: tuple[Trial, str], data: st.DataObject
) -> None:
    """A harness may write anything; a trainer that catches ContractError must not fall over it."""
    evidence, topology = valid
    name = data.draw(st.sampled_from([one.name for one in fields(evidence)]))
    spoiled = replace(evidence, **{name: _spoil(getattr(evidence, name), data.draw)})

    with contextlib.suppress(ContractError):
        made = PolicyRollout.from_trial(spoiled, topology=topology)
        assert pickle.loads(pickle.dumps(made)).reward == made.reward


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_junk_anywhere_in_a_rollout_is_refused_by_name(data: st.DataObject) -> None:
    """Made by hand it holds the same rules."""
    made = rollout()
    name = data.draw(st.sampled_from([one.name for one in fields(made)]))

    with contextlib.suppress(ContractError):
        spoiled = replace(made, **{name: _spoil(getattr(made, name), data.draw)})
        for one in training_sequences(spoiled):
            LengthGate(100).apply(one)
        Batch((spoiled,)).manifest.model_dump_json()


def test_totals_prove_rows_as_calls_do() -> None:
    """What some runners know is only how many tokens there were in all."""
    made = PolicyRollout.from_trial(spoilt(calls=(), totals=Totals(7, 3)))

    assert _plain(made.prompt_token_ids) == [list(row) for row in PROMPTS]


def test_rollout_cannot_be_changed() -> None:
    """What was checked is what is trained on."""
    source = segment()
    made = PolicyRollout.from_trial(trial(segments=(source,)))
    source.completion_token_ids[0].append(99)

    assert _plain(made.completion_token_ids) == [list(row) for row in COMPLETIONS]
    with pytest.raises(FrozenInstanceError):
        made.reward = 2.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        made.policy.sampling["temperature"] = 0.0  # type: ignore[index]


def test_rollout_travels_between_processes() -> None:
    """Rollouts are made where agents run, and trained on elsewhere."""
    assert pickle.loads(pickle.dumps(rollout())) == rollout()


def test_rollout_changed_by_hand_is_checked_again() -> None:
    """There is no way round the rules: not `replace`, not the constructor."""
    with pytest.raises(ContractError, match="lengths differ"):
        rollout(old_logprobs=[[-0.5], LOGPROBS[1]])


def test_rollout_of_integers_that_are_log_probabilities_is_taken() -> None:
    """JSON writes the log-probability of certainty as 0."""
    made = PolicyRollout.from_trial(spoilt(logprobs=[[0, -0.0], [-1]]))

    assert _plain(made.old_logprobs) == [[0, -0.0], [-1]]


# --- off-policy, and without log-probabilities ----------------------------------------


def test_off_policy_rollout_carries_the_policy_that_sampled() -> None:
    """An algorithm has to know whose log-probabilities those are."""
    made = PolicyRollout.from_trial(trial(policy=OLDER), policy=POLICY, behaviour=OLDER)

    assert (made.policy, made.behaviour, made.off_policy) == (POLICY, OLDER, True)
    assert not rollout().off_policy


def test_token_rollout_has_no_log_probabilities_and_says_why() -> None:
    """What has none must not be taken for what has some."""
    made = TokenRollout.from_trial(trial(), algorithm="rejection_sampling@1")
    without = TokenRollout.from_trial(spoilt(logprobs=None), algorithm="rejection_sampling@1")

    assert not hasattr(made, "old_logprobs")
    assert not isinstance(made, PolicyRollout)
    assert any("rejection_sampling@1 needs none" in remark for remark in made.remarks)
    assert without.remarks == ()


# --- topologies -----------------------------------------------------------------------


def test_steps_stay_aligned_with_their_rewards() -> None:
    """Each step's tokens, and what it was worth by itself."""
    made = PolicyRollout.from_trial(stepped(), topology=MULTI_STEP_MEAN)

    spans = [(one.name, one.first_turn, one.end_turn, one.reward) for one in made.spans]
    assert spans == [("one", 0, 1, 1.0), ("two", 1, 2, 0.5)]
    assert _plain(made.completion_token_ids) == [[11], [21]]


@pytest.mark.parametrize(
    ("topology", "rewards", "total"),
    [
        (MULTI_STEP_MEAN, [{"reward": 1.0}, {"reward": 0.5}], 0.75),
        (MULTI_STEP_FINAL, [{"reward": 1.0}, {"reward": 0.5}], 0.5),
        (MULTI_STEP_MEAN, [{"reward": 1.0}, {"style": 1.0}], 0.5),
        (MULTI_STEP_FINAL, [{"style": 1.0}, {"reward": 0.25}], 0.25),
        (
            MULTI_STEP_MEAN,
            [{"reward": 0.1}, {"reward": 0.2}, {"reward": 0.3}],
            0.6 / 3,
        ),
    ],
)
def test_steps_come_to_what_harbor_makes_of_them(
    topology: Any, rewards: list[dict[str, float]], total: float
) -> None:
    """`mean` averages over the verdicts, a missing part counts 0 there; `final` takes the last."""
    steps = [step(f"s{at}", 10 * at, one) for at, one in enumerate(rewards, 1)]

    for whole in (None, {"reward": total}):
        made = PolicyRollout.from_trial(stepped(*steps, rewards=whole), topology=topology)
        assert made.reward == total


def test_steps_whose_rewards_no_number_holds_together_are_refused_or_a_mean() -> None:
    """A verifier may write any integer: ints of 309 digits could not be added to a float."""
    huge = int(1.7e308)
    steps = [
        step(f"s{at}", 10 * at, {"reward": one}) for at, one in enumerate((huge, huge, 0.5), 1)
    ]

    with pytest.raises(ContractError, match="is not finite"):
        PolicyRollout.from_trial(stepped(*steps, rewards=None), topology=MULTI_STEP_MEAN)


def test_reward_of_more_digits_than_python_writes_is_refused_as_any_other() -> None:
    """Its refusal failed itself, and named neither trial nor field."""
    with pytest.raises(
        ContractError, match=r"reward: is not finite; found an integer of 16610 bits"
    ):
        PolicyRollout.from_trial(trial(rewards={"reward": 10**5000}))


def test_policy_identity_is_hashed_and_cannot_be_changed_all_the_way_down() -> None:
    """A list within it was the caller's own, and stayed open to change."""
    stops = ["x"]
    policy = replace(POLICY, sampling={"stop": stops, "logit_bias": {"7": 1}})
    stops.append("y")

    assert policy.sampling == {"stop": ["x"], "logit_bias": {"7": 1}}
    assert hash(policy) == hash(replace(policy))
    assert not hasattr(policy.sampling["stop"], "append")
    assert policy != replace(POLICY, sampling={"stop": ["y"], "logit_bias": {"7": 1}})


def test_step_that_counts_as_zero_is_told() -> None:
    """Harbor's mean counts a part that a step does not have as 0: never in silence."""
    lacking = stepped(step("one", 10, {"reward": 1.0}), step("two", 20, {"style": 1.0}))

    made = PolicyRollout.from_trial(lacking, topology=MULTI_STEP_MEAN)

    assert made.remarks == ("step two: has no 'reward', which multi_step.mean@1 counts as 0",)
    assert made.spans[1].reward is None


def test_segments_keep_their_kind_owner_and_order() -> None:
    """A trainer weighs a sub-agent's tokens otherwise than the main agent's."""
    made = PolicyRollout.from_trial(branched(), topology=SEGMENTS)

    spans = [(one.name, one.kind, one.owner, one.first_turn, one.end_turn) for one in made.spans]
    assert spans == [
        ("main", "main", None, 0, 2),
        ("helper", "sub_agent", "main", 2, 3),
        ("rest", "compaction", "main", 3, 4),
    ]
