"""Everything that the contract refuses: the rule that must refuse it, and how it comes about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from coldframe.learning.contracts import (
    MULTI_STEP_FINAL,
    MULTI_STEP_MEAN,
    SEGMENTS,
    Batch,
    Call,
    PolicyRollout,
    TokenRollout,
    Totals,
    Trial,
)
from tests.unit.learning.evidence import (
    COMPLETIONS,
    LOGPROBS,
    OLDER,
    ORIGIN,
    POLICY,
    PROMPTS,
    branched,
    calls,
    other,
    rollout,
    segment,
    sequence,
    spoilt,
    step,
    stepped,
    tokens,
    trial,
)

NAN, INF = float("nan"), float("inf")


@dataclass(frozen=True)
class Case:
    """Something that must be refused."""

    rule: str
    name: str
    make: Callable[[], object]
    says: str = ""


def _trial(rule: str, name: str, spoiled: Trial, says: str = "", **options: Any) -> Case:
    return Case(rule, name, lambda: PolicyRollout.from_trial(spoiled, **options), says)


def _by_hand(rule: str, name: str, says: str = "", **changes: Any) -> Case:
    return Case(rule, name, lambda: rollout(**changes), says)


def _policy(rule: str, name: str, **changes: Any) -> Case:
    return _trial(rule, name, trial(policy=replace(POLICY, **changes)))


def _mean(rule: str, name: str, *steps: Any, says: str = "", **changes: Any) -> Case:
    return _trial(rule, name, stepped(*steps, **changes), says, topology=MULTI_STEP_MEAN)


def _final(rule: str, name: str, *steps: Any, **changes: Any) -> Case:
    return _trial(rule, name, stepped(*steps, **changes), topology=MULTI_STEP_FINAL)


def _branches(rule: str, name: str, *segments: Any, **changes: Any) -> Case:
    made = branched(**changes) if not segments else branched(segments=segments, **changes)
    return _trial(rule, name, made, topology=SEGMENTS)


def _batch(rule: str, name: str, *rollouts: PolicyRollout, says: str = "") -> Case:
    return Case(rule, name, lambda: Batch(rollouts), says)


def _with_calls(*given: Call) -> Trial:
    return spoilt(calls=given)


def _origin(trial_name: str = "sum__xyz", **changes: Any) -> PolicyRollout:
    return rollout(trial_name=trial_name, provenance=replace(ORIGIN, **changes))


MAIN = segment(order=0)
GOOD = calls()

CASES: list[Case] = [
    # what the trial says of itself
    _trial("trial_has_no_exception", "an exception", trial(exception="AgentTimeoutError")),
    _trial(
        "steps_have_no_exception",
        "an exception of a step alone",
        stepped(
            step("one", 10, {"reward": 1.0}, exception="VerifierTimeoutError"),
            step("two", 20, {"reward": 1.0}),
        ),
        "one",
        topology=MULTI_STEP_MEAN,
    ),
    _trial("capture_has_tokens", "text alone", trial(capture="text")),
    _trial("capture_has_tokens", "log-probabilities without ids", trial(capture="logprobs")),
    _trial("sampler_is_named", "no policy", trial(policy=None), "has no", policy=POLICY),
    _trial("policy_is_named", "no policy at all", trial(policy=None), "has no"),
    _trial("off_policy_is_marked", "older weights", trial(policy=OLDER), policy=POLICY),
    _trial(
        "off_policy_is_marked",
        "another temperature",
        trial(policy=replace(POLICY, sampling={"temperature": 0.7})),
        policy=POLICY,
    ),
    _trial(
        "mark_is_the_sampler",
        "a mark of some third policy",
        trial(policy=OLDER),
        policy=POLICY,
        behaviour=replace(OLDER, iteration=1),
    ),
    _trial(
        "turns_have_one_policy",
        "new weights in the middle",
        _with_calls(
            replace(GOOD[0], policy=POLICY.checkpoint),
            replace(GOOD[1], policy="sha256:" + "f" * 64),
        ),
    ),
    _trial(
        "evidence_is_well_formed",
        "a segment that only looks like one",
        trial(segments=(SimpleNamespace(**vars(segment())),)),
    ),
    _trial("evidence_is_well_formed", "no list of segments", trial(segments=segment())),
    _trial("evidence_is_well_formed", "totals as a pair", spoilt(calls=(), totals=(7, 3))),
    _trial("evidence_is_well_formed", "null for calls", spoilt(calls=None)),
    # linear
    _trial("linear_has_no_steps", "steps", trial(steps=stepped().steps), "step-aware"),
    _trial("linear_has_no_steps", "steps alone", stepped(), "step-aware"),
    _trial("linear_has_one_segment", "a sub-agent", trial(segments=(segment(), other("sub", 30)))),
    # multi_step
    _mean(
        "steps_have_one_segment_each",
        "a step with a sub-agent",
        step("one", 10, {"reward": 1.0}, segments=(other("a", 10), other("b", 15))),
    ),
    _mean("steps_have_one_segment_each", "no steps", steps=()),
    _mean(
        "steps_have_one_segment_each",
        "a step without tokens",
        step("one", 10, {"reward": 1.0}, segments=()),
    ),
    _mean(
        "steps_are_named",
        "one name for two steps",
        step("one", 10, {"reward": 1.0}),
        step("one", 20, {"reward": 1.0}, segments=(other("x", 20),)),
    ),
    _mean("steps_are_named", "a step without a name", step("", 10, {"reward": 1.0})),
    _final(
        "steps_have_verdicts",
        "no verdict of an earlier step",
        step("one", 10, None),
        step("two", 20, {"reward": 1.0}),
    ),
    *(
        _final(
            "step_rewards_are_numbers",
            f"{value!r} as an earlier step's reward",
            step("one", 10, {"reward": value}),
            step("two", 20, {"reward": 1.0}),
        )
        for value in (True, None, NAN, INF, "1", 10**400)
    ),
    _mean("steps_agree_with_the_trial", "the last for the mean", rewards={"reward": 0.5}),
    _final("steps_agree_with_the_trial", "the mean for the last", rewards={"reward": 0.75}),
    _mean("steps_agree_with_the_trial", "a whole without the part", rewards={"style": 0.75}),
    # segments
    _branches("segments_have_no_steps", "steps too", steps=stepped().steps),
    _branches(
        "segment_kinds_are_known",
        "a kind nobody knows",
        MAIN,
        other("x", 30, kind="judge", owner="main", order=1),
    ),
    _branches(
        "segment_names_differ",
        "one name for two",
        MAIN,
        other("x", 30, kind="sub_agent", owner="main", order=1),
        other("x", 40, kind="sub_agent", owner="main", order=2, calls=(Call("y", 2, 1),)),
    ),
    *(
        _branches(
            "segment_order_is_stated",
            f"{order!r} as order",
            MAIN,
            other("x", 30, kind="sub_agent", owner="main", order=order),
        )
        for order in (None, 0, 2, True, 1.0)
    ),
    _branches(
        "segments_begin_with_the_only_main",
        "a second main",
        MAIN,
        other("x", 30, kind="main", order=1),
    ),
    _branches(
        "segments_have_owners",
        "a sub-agent of nobody",
        MAIN,
        other("x", 30, kind="sub_agent", order=1),
    ),
    _branches(
        "segments_have_owners",
        "a sub-agent of a later one",
        MAIN,
        other("x", 30, kind="sub_agent", owner="y", order=1),
        other("y", 40, kind="sub_agent", owner="main", order=2),
    ),
    _branches("segments_have_owners", "a main with an owner", segment(order=0, owner="main")),
    # names, split, reward
    _trial("names_are_there", "no trial name", trial(trial_name="")),
    _by_hand("names_are_there", "no reward key", reward_key=None),
    _trial("names_are_there", "no task name", trial(task_name="")),
    _by_hand("remarks_are_texts", "a number", remarks=[1]),
    _by_hand("remarks_are_texts", "null", remarks=None),
    *(
        _trial("split_is_train", f"split {split!r}", trial(split=split), "wrong split")
        for split in ("eval", "Train", "", None, "train ")
    ),
    _trial("reward_is_there", "no verdict", trial(rewards=None), "has no"),
    _trial("reward_is_there", "no such part", trial(rewards={"style": 1.0}), "has no"),
    _trial("reward_is_there", "an empty verdict", trial(rewards={}), "has no"),
    _trial("reward_is_there", "null", trial(rewards={"reward": None}), "has no"),
    _mean("reward_is_there", "no step has it", step("one", 10, {"style": 1.0}), says="has no"),
    _final(
        "reward_is_there",
        "the last step lacks it",
        step("one", 10, {"reward": 1.0}),
        step("two", 20, {"style": 1.0}),
    ),
    _trial("reward_is_a_number", "text", trial(rewards={"reward": "1.0"})),
    _trial("reward_is_a_number", "a list", trial(rewards={"reward": [1.0]})),
    _trial("reward_is_no_bool", "true", trial(rewards={"reward": True})),
    _trial("reward_is_no_bool", "false", trial(rewards={"reward": False})),
    *(
        _trial("reward_is_finite", f"{str(value)[:5]}", trial(rewards={"reward": value}))
        for value in (NAN, INF, -INF, 10**400)
    ),
    # rows
    _trial(
        "rows_are_lists",
        "bytes for ids",
        spoilt(completion_token_ids=[b"\x03\x04", [6]]),
    ),
    _trial("rows_are_lists", "text for a row", spoilt(prompt_token_ids=["12", PROMPTS[1]])),
    _trial("rows_are_lists", "a map for a column", spoilt(prompt_token_ids={0: [1, 2]})),
    _trial("rows_are_lists", "a lone row", spoilt(prompt_token_ids=[1, 2])),
    _trial("rows_are_lists", "null for a row", spoilt(completion_token_ids=[None, [6]])),
    _by_hand("rows_are_lists", "text for a column", prompt_token_ids="12"),
    _trial("turns_are_there", "no segments", trial(segments=()), "has no"),
    _trial(
        "turns_are_there",
        "no rows",
        spoilt(prompt_token_ids=[], completion_token_ids=[], logprobs=[], calls=()),
        "has no",
    ),
    Case(
        "turns_are_there",
        "no rows and no spans",
        lambda: rollout(prompt_token_ids=[], completion_token_ids=[], old_logprobs=[], spans=()),
    ),
    _by_hand(
        "turn_counts_are_equal",
        "a completion too many",
        "lengths differ",
        completion_token_ids=[*COMPLETIONS, [7]],
        old_logprobs=[*LOGPROBS, [-1.0]],
    ),
    _branches(
        "segments_have_equal_turns",
        "what one segment lacks another has",
        segment(order=0, completion_token_ids=[[3, 4]], logprobs=[LOGPROBS[0]]),
        other(
            "x",
            30,
            kind="sub_agent",
            owner="main",
            order=1,
            completion_token_ids=[[6], [31]],
            logprobs=[[-1.5], [-0.125]],
        ),
    ),
    _trial(
        "segments_have_equal_turns",
        "a dropped completion",
        spoilt(completion_token_ids=[[3, 4]], logprobs=[LOGPROBS[0]]),
        "lengths differ",
    ),
    _trial(
        "segments_have_equal_turns",
        "a dropped prompt",
        spoilt(prompt_token_ids=[PROMPTS[0]]),
        "lengths differ",
    ),
    _trial(
        "segments_have_equal_turns",
        "a completion too many, of which only totals tell",
        spoilt(
            prompt_token_ids=[PROMPTS[0]],
            calls=(),
            totals=Totals(2, 2),
        ),
        "lengths differ",
    ),
    _trial(
        "prompts_are_not_empty",
        "an empty prompt",
        spoilt(
            prompt_token_ids=[[], [3, 4, 5]],
            calls=calls([[], [3, 4, 5]]),
        ),
        "has no",
    ),
    _trial(
        "completions_are_not_empty",
        "an empty completion",
        spoilt(
            completion_token_ids=[[3, 4], []],
            logprobs=[LOGPROBS[0], []],
            calls=calls(PROMPTS, [[3, 4], []]),
        ),
        "has no",
    ),
    *(
        _trial(
            "ids_are_integers",
            f"{value!r} for an id",
            spoilt(completion_token_ids=[[3, 4], [value]]),
        )
        for value in (6.0, True, None, "6", NAN)
    ),
    _trial(
        "ids_are_integers",
        "a bool among the prompt's",
        spoilt(prompt_token_ids=[[True, 2], [True, 2, 3, 4, 5]]),
    ),
    _trial("ids_are_not_negative", "-1", spoilt(completion_token_ids=[[3, 4], [-1]])),
    # spans and proof
    Case(
        "spans_are_well_formed",
        "a span that only looks like one",
        lambda: rollout(spans=[SimpleNamespace(**vars(rollout().spans[0]))]),
    ),
    _by_hand("spans_are_well_formed", "null for spans", spans=None),
    _trial("spans_are_well_formed", "a segment without a name", spoilt(name="")),
    _trial(
        "calls_are_named", "null for an id", _with_calls(replace(GOOD[0], call_id=None), GOOD[1])
    ),
    _by_hand("topology_is_declared", "a name nobody knows", topology="tree@9"),
    _by_hand("topology_is_declared", "no version", topology="linear"),
    Case(
        "linear_is_one_span",
        "two spans",
        lambda: replace(
            PolicyRollout.from_trial(branched(), topology=SEGMENTS), topology="linear@1"
        ),
    ),
    Case(
        "spans_cover_every_turn_once",
        "a turn left out",
        lambda: rollout(
            spans=[replace(rollout().spans[0], end_turn=1, calls=GOOD[:1])],
        ),
    ),
    Case(
        "spans_cover_every_turn_once",
        "a turn in two",
        lambda: replace(
            PolicyRollout.from_trial(branched(), topology=SEGMENTS),
            spans=[rollout().spans[0], replace(rollout().spans[0], first_turn=1)],
        ),
    ),
    _trial("turns_are_proven", "neither calls nor totals", spoilt(calls=())),
    _trial("calls_are_as_many_as_turns", "a call too few", spoilt(calls=GOOD[:1]), "differ"),
    _trial(
        "calls_count_the_tokens_of_their_rows",
        "a token that was counted and is not there",
        _with_calls(GOOD[0], replace(GOOD[1], completion_tokens=2)),
        "lengths differ",
    ),
    _trial(
        "calls_count_the_tokens_of_their_rows",
        "a prompt that is cut",
        _with_calls(replace(GOOD[0], prompt_tokens=3), GOOD[1]),
        "lengths differ",
    ),
    _trial(
        "calls_are_recorded_once",
        "one call for two rows",
        _with_calls(GOOD[0], replace(GOOD[1], call_id=GOOD[0].call_id)),
    ),
    _branches(
        "calls_are_recorded_once",
        "one call in two segments",
        MAIN,
        other("x", 30, kind="sub_agent", owner="main", order=1, calls=(Call("c0", 2, 1),)),
    ),
    _trial(
        "totals_are_the_sums_of_the_rows",
        "a prompt missing here and a completion there",
        spoilt(calls=(), totals=Totals(7 + 9, 3 + 2)),
        "lengths differ",
    ),
    _trial(
        "turns_extend_what_came_before",
        "reordered turns",
        spoilt(
            prompt_token_ids=PROMPTS[::-1],
            completion_token_ids=COMPLETIONS[::-1],
            logprobs=LOGPROBS[::-1],
            calls=GOOD[::-1],
        ),
    ),
    _trial(
        "turns_extend_what_came_before",
        "a completion that was rendered anew",
        spoilt(prompt_token_ids=[[1, 2], [1, 2, 34, 4, 5]]),
    ),
    _trial(
        "turns_extend_what_came_before",
        "a summarised context",
        spoilt(prompt_token_ids=[[1, 2], [7]], calls=calls([[1, 2], [7]])),
    ),
    _branches(
        "turns_are_not_repeated",
        "context that was copied into another segment",
        MAIN,
        segment(name="copy", kind="compaction", owner="main", order=1, calls=calls(name="copied")),
    ),
    # policy
    _by_hand("policy_is_named", "no policy", "has no", policy=None),
    _by_hand("policy_is_named", "a name for a policy", policy="qwen3"),
    _by_hand("policy_is_named", "a name for a mark", behaviour="qwen3"),
    *(
        _policy("checkpoint_is_a_digest", f"checkpoint {value!r}", checkpoint=value)
        for value in ("latest", "", None, "/models/step-100", "abcdef")
    ),
    _policy("tokenizer_is_named", "no tokenizer", tokenizer=""),
    _policy("tokenizer_is_named", "null for a tokenizer", tokenizer=None),
    _policy("renderer_is_named", "no renderer", renderer=""),
    _policy("renderer_is_named", "null for a renderer", renderer=None),
    _policy("sampling_is_stated", "no sampling parameters", sampling={}),
    _policy("sampling_is_stated", "null for sampling", sampling=None),
    _policy("sampling_is_stated", "an object", sampling={"stop": object()}),
    _policy("sampling_is_stated", "a temperature of NaN", sampling={"temperature": NAN}),
    *(
        _policy("iteration_is_counted", f"iteration {value!r}", iteration=value)
        for value in (-1, None, True, 1.0, "1")
    ),
    _trial(
        "iteration_is_counted",
        "a mark without an iteration",
        trial(policy=replace(OLDER, iteration=None)),  # type: ignore[arg-type]
        policy=POLICY,
        behaviour=replace(OLDER, iteration=None),  # type: ignore[arg-type]
    ),
    _trial("mark_names_another_policy", "a mark on one's own", trial(), behaviour=POLICY),
    # log-probabilities
    _trial("logprob_rows_are_lists", "none", spoilt(logprobs=None), "has no"),
    _trial(
        "logprob_rows_are_lists", "a map for a row", spoilt(logprobs=[{-0.5: 1, -0.25: 1}, [-1.5]])
    ),
    _trial("logprob_rows_are_lists", "a number for a row", spoilt(logprobs=[-0.5, -0.25])),
    _trial("logprob_rows_are_lists", "null for a row", spoilt(logprobs=[LOGPROBS[0], None])),
    _trial(
        "segments_have_equal_turns",
        "a turn of log-probabilities short",
        spoilt(logprobs=[LOGPROBS[0]]),
        "lengths differ",
    ),
    _trial("segments_have_equal_turns", "no rows of them", spoilt(logprobs=[]), "lengths differ"),
    _by_hand(
        "logprob_turns_are_equal", "a turn short", "lengths differ", old_logprobs=[LOGPROBS[0]]
    ),
    _trial(
        "logprobs_are_one_per_token",
        "off by one",
        spoilt(logprobs=[[-0.5], LOGPROBS[1]]),
        "lengths differ",
    ),
    _trial(
        "logprobs_are_one_per_token",
        "rows that changed places",
        spoilt(logprobs=LOGPROBS[::-1]),
        "lengths differ",
    ),
    *(
        _trial("logprobs_are_numbers", f"{value!r}", spoilt(logprobs=[LOGPROBS[0], [value]]))
        for value in (None, False, "-1.5")
    ),
    *(
        _trial("logprobs_are_finite", f"{str(value)[:5]}", spoilt(logprobs=[LOGPROBS[0], [value]]))
        for value in (NAN, -INF, INF, -(10**400))
    ),
    *(
        _trial("logprobs_are_not_positive", f"{value!r}", spoilt(logprobs=[LOGPROBS[0], [value]]))
        for value in (1e-9, 1)
    ),
    # without log-probabilities
    *(
        Case(
            "algorithm_is_declared", f"algorithm {name!r}", lambda name=name: tokens(algorithm=name)
        )
        for name in ("", "sft", None, "sft@x")
    ),
    Case(
        "split_is_train",
        "an eval task without log-probabilities",
        lambda: TokenRollout.from_trial(trial(split="eval"), algorithm="sft@1"),
    ),
    # sequences
    Case(
        "columns_are_of_one_length", "a mask cut alone", lambda: sequence(loss_mask=[False, True])
    ),
    Case("columns_are_of_one_length", "tokens cut alone", lambda: sequence(token_ids=[1, 2])),
    Case(
        "columns_are_of_one_length",
        "log-probabilities cut alone",
        lambda: sequence(old_logprobs=[None, -0.5]),
    ),
    Case("mask_is_of_bools", "a 1", lambda: sequence(loss_mask=[False, True, False, 1, False])),
    Case(
        "trained_tokens_have_logprobs",
        "trained without",
        lambda: sequence(old_logprobs=[None, None, None, -0.25, None]),
    ),
    Case(
        "sequence_logprobs_are_log_probabilities",
        "over 0",
        lambda: sequence(old_logprobs=[None, 0.5, None, -0.25, None]),
    ),
    Case("something_is_trained", "nothing", lambda: sequence(loss_mask=[False] * 5)),
    # batches
    _batch("batch_is_not_empty", "nothing"),
    _batch("trials_are_in_it_once", "a trial twice", rollout(), rollout()),
    _batch("provenance_is_known", "no provenance", rollout(provenance=None), says="has no"),
    *(
        _batch("batch_has_one_origin", f"another {name}", rollout(), _origin(**{name: value}))
        for name, value in {
            "run_id": "run-2",
            "runner": "harbor 0.26.0",
            "agent": "react 1",
            "agent_config": {"max_turns": 20},
            "reward_schema": "examples@2",
        }.items()
    ),
    _batch(
        "batch_has_one_origin",
        "another policy",
        rollout(),
        PolicyRollout.from_trial(trial(policy=OLDER, trial_name="sum__xyz")),
    ),
    *(
        _batch("origins_are_whole", f"{name} = {value!r}", _origin(**{name: value}))
        for name, value in {
            "run_id": "",
            "runner": "",
            "agent": "",
            "reward_schema": "",
            "task_digest": "",
            "verifier_digest": "unknown",
            "agent_config": {"stop": {1, 2}},
        }.items()
    ),
    _batch("times_are_in_order", "an end before its begin", _origin(ended_at=1.0)),
    _batch("times_are_in_order", "text", _origin(started_at="10")),
    _batch("times_are_in_order", "no time", _origin(started_at=NAN)),
    _batch("task_keys_mean_one_task", "a changed task", rollout(), _origin(task_digest="3" * 64)),
]
