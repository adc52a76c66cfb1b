"""What a number means is declared, and how several become one is a function with a version."""

from __future__ import annotations

import math
import resource
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldframe.learning.contracts import ContractError
from coldframe.learning.schemas import (
    CASES,
    DerivedReward,
    DerivedStore,
    RewardSchema,
    RewardSchemaError,
    derive,
    drift,
    load_schema,
    run_fixtures,
    scalarise,
)
from coldframe.protocol.errors import InvalidRequestError
from coldframe.rollouts.load import find_tasks, load_task
from coldframe.rollouts.rewards import parse_reward

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "tasks"
VERIFIER = "5" * 64


def part(key: str, **changes: Any) -> dict[str, Any]:
    """Return the declaration of a part."""
    base = {
        "key": key,
        "meaning": "what it says",
        "direction": "higher",
        "range": [0, 1],
        "unit": "share",
    }
    return base | changes


def schema(**changes: Any) -> RewardSchema:
    """Return a schema with every kind of part."""
    base: dict[str, Any] = {
        "schema": "coldframe.rewards/1",
        "name": "demo",
        "version": 1,
        "scalarise": "gated_mean@1",
        "code": {},
        "part": [
            part("tests", weight=3),
            part("seconds", direction="lower", range=[0, 10], unit="s", weight=1),
            part("style", weight=4, missing="leave_out"),
            part("tamper"),
        ],
        "gate": [{"key": "tests", "at_least": 0.5, "otherwise": 0.125}],
        "veto": [{"key": "tamper", "at_least": 1, "gives": -1}],
    }
    return RewardSchema.model_validate(base | changes)


VERDICT = {"tests": 1.0, "seconds": 4.0, "style": 0.5, "tamper": 0.0}


@pytest.mark.parametrize(
    ("changes", "value", "decided_by"),
    [
        ({}, 3 / 8 * 1.0 + 1 / 8 * 6.0 + 4 / 8 * 0.5, "mean"),
        ({"seconds": 0.0}, 3 / 8 + 1 / 8 * 10 + 0.25, "mean"),
        ({"tests": 0.5}, 3 / 8 * 0.5 + 1 / 8 * 6.0 + 0.25, "mean"),
        ({"tests": 0.49}, 0.125, "gate tests"),
        ({"tamper": 1.0}, -1.0, "veto tamper"),
        ({"tamper": 1.0, "tests": 0.0}, -1.0, "veto tamper"),
    ],
)
def test_scalar_is_decided_by_vetoes_then_gates_then_weights(
    changes: dict[str, float], value: float, decided_by: str
) -> None:
    """Each is said to have decided, and the parts stay beside the number."""
    made = scalarise(schema(), VERDICT | changes)

    assert (made.value, made.decided_by) == (value, decided_by)
    assert dict(made.parts) == VERDICT | changes
    assert (made.schema, made.rule, made.left_out) == ("demo@1", "gated_mean@1", ())


@pytest.mark.parametrize("weights", [[3.0, 0.1], [1.0] * 49, [0.1, 0.2, 0.3], [5e-324, 1e308]])
@pytest.mark.parametrize("value", [1.0, 0.1])
def test_mean_of_parts_that_are_alike_is_what_each_of_them_is(
    weights: list[float], value: float
) -> None:
    """Weights were divided by their sum first: what was perfect in all was 0.9999999999999999."""
    parts = [part(f"p{at}", weight=weight) for at, weight in enumerate(weights)]
    made = scalarise(schema(part=parts, gate=[], veto=[]), {one["key"]: value for one in parts})

    assert made.value == value


def test_part_of_which_less_is_better_has_a_finite_worth_at_the_ends_of_numbers() -> None:
    """Least and greatest together are more than a float holds."""
    declared = part("bytes", direction="lower", range=[1e308, 1.5e308], weight=1)
    made = scalarise(schema(part=[declared], gate=[], veto=[]), {"bytes": 1.5e308})

    assert made.value == 1e308


def test_part_that_may_be_missing_is_left_out_and_told() -> None:
    """Its weight does not count; it is not taken for 0."""
    made = scalarise(schema(), {"tests": 1.0, "seconds": 4.0, "tamper": 0.0})

    assert made.value == 3 / 4 * 1.0 + 1 / 4 * 6.0
    assert made.left_out == ("style",)


@pytest.mark.parametrize(
    ("verdict", "rule"),
    [
        (None, "verdict"),
        (1.0, "verdict"),
        ({}, "missing"),
        ({"tests": 1.0, "seconds": 4.0, "style": 0.5}, "missing"),
        (VERDICT | {"bonus": 1.0}, "undeclared"),
        (VERDICT | {"tests": True}, "number"),
        (VERDICT | {"tests": "1"}, "number"),
        (VERDICT | {"tests": None}, "number"),
        (VERDICT | {"tests": float("nan")}, "number"),
        (VERDICT | {"style": float("inf")}, "number"),
        (VERDICT | {"tests": 1.0000001}, "range"),
        (VERDICT | {"seconds": -1e-9}, "range"),
        (VERDICT | {"tests": 10**300}, "range"),
    ],
)
def test_verdict_that_is_not_what_was_declared_has_no_scalar(verdict: Any, rule: str) -> None:
    """Nothing is clipped, converted, filled up or left out unasked."""
    with pytest.raises(ContractError) as caught:
        scalarise(schema(), verdict, "sum.0.0")

    assert (caught.value.rule, caught.value.trial) == (rule, "sum.0.0")


def test_verdict_of_which_nothing_has_weight_has_no_scalar() -> None:
    """A mean over nothing is not 0."""
    only = schema(
        part=[part("style", weight=1, missing="leave_out"), part("tamper")], gate=[], veto=[]
    )

    with pytest.raises(ContractError, match="left out"):
        scalarise(only, {"tamper": 0.0})


@settings(max_examples=100, deadline=None)
@given(
    st.fixed_dictionaries(
        {"tests": st.floats(0, 1), "seconds": st.floats(0, 10), "tamper": st.floats(0, 1)},
        optional={"style": st.floats(0, 1)},
    )
)
def test_scalar_is_finite_pure_and_keeps_its_parts(verdict: dict[str, float]) -> None:
    """The same verdict is worth the same everywhere, and within the ranges that were declared."""
    before = dict(verdict)
    made = scalarise(schema(), verdict)

    assert verdict == before == dict(made.parts)
    assert made == scalarise(schema(), dict(reversed(verdict.items())))
    assert math.isfinite(made.value)
    assert -1 <= made.value <= 10


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 0}, "version"),
        ({"version": "1"}, "version"),
        ({"scalarise": "sum"}, "scalarise"),
        ({"colour": "red"}, "colour"),
        ({"part": []}, "part"),
        ({"part": [part("a"), part("a", weight=1)]}, "'a' stands there twice"),
        ({"part": [part("a", range=[1, 0], weight=1)]}, "least comes before"),
        ({"part": [part("a", range=[0, float("inf")], weight=1)]}, "range"),
        ({"part": [part("a", direction="up", weight=1)]}, "direction"),
        ({"part": [part("a", missing="zero", weight=1)]}, "missing"),
        ({"part": [part("a", weight=-1)]}, "weight"),
        ({"part": [part("a", weight=float("nan"))]}, "weight"),
        ({"part": [part("a")], "gate": [], "veto": []}, "no part has a weight"),
        ({"gate": [{"key": "style", "at_least": 1, "otherwise": 0}]}, "never missing"),
        ({"veto": [{"key": "absent", "at_least": 1, "gives": 0}]}, "never missing"),
        ({"code": {"sum": "latest"}}, "code"),
        ({"fixture": [{"case": "right", "content": "1"}]}, "one of scalar and refused"),
        ({"fixture": [{"case": "right", "scalar": 1}]}, "one of solution, content and error"),
        ({"fixture": [{"case": "odd", "content": "1", "scalar": 1}]}, "case"),
    ],
)
def test_schema_that_says_too_little_or_too_much_is_refused(
    changes: dict[str, Any], words: str
) -> None:
    """What it does not say, somebody would guess."""
    with pytest.raises(ValueError, match=words):
        schema(**changes)


@pytest.mark.parametrize("text", ["", "schema = ", 'schema = "coldframe.rewards/2"'])
def test_schema_file_that_cannot_be_read_is_refused_by_name(tmp_path: Path, text: str) -> None:
    """Errors name the file."""
    file = tmp_path / "rewards.toml"
    file.write_text(text)

    for path in (file, tmp_path / "absent.toml"):
        with pytest.raises(RewardSchemaError, match=str(path)):
            load_schema(path)


# --- fixtures -------------------------------------------------------------------------


FIXTURES = [
    {"case": "right", "task": "sum", "solution": "oracle", "scalar": 1.0},
    {"case": "wrong", "task": "sum", "solution": "wrong/x", "scalar": 0.0},
    {"case": "empty", "content": "", "refused": "empty"},
    {"case": "huge", "content": '{"tests": 1e300}', "refused": "out of its range"},
    {"case": "nan", "content": '{"tests": NaN}', "refused": "not finite"},
    {"case": "missing_key", "content": '{"other": 1}', "refused": "declares"},
    {"case": "verifier_error", "error": "verifier_deadline", "refused": "no verdict"},
    {"case": "steering", "file": "reward.txt", "content": "give me 1", "refused": "not a number"},
]
SEEN = {("sum", "oracle"): {"tests": 1.0}, ("sum", "wrong/x"): {"tests": 0.0}}


def _simple(fixtures: list[dict[str, Any]]) -> RewardSchema:
    return schema(part=[part("tests", weight=1)], gate=[], veto=[], fixture=fixtures)


def test_fixtures_of_every_case_hold() -> None:
    """The control."""
    assert run_fixtures(_simple(FIXTURES), parse_reward, SEEN) == []


@pytest.mark.parametrize("case", CASES)
def test_schema_without_a_fixture_of_a_case_is_told(case: str) -> None:
    """An edge that nobody tried is where the next one falls over."""
    left = [one for one in FIXTURES if one["case"] != case]

    assert run_fixtures(_simple(left), parse_reward, SEEN) == [f"no fixture for the case {case!r}"]


def test_fixture_that_comes_out_otherwise_is_told() -> None:
    """By its number and case, with what was found and what was due."""
    seen = SEEN | {("sum", "wrong/x"): {"tests": 1.0}, ("sum", "oracle"): None}

    wrong = run_fixtures(_simple(FIXTURES), parse_reward, seen)

    assert [one.split(":")[0] for one in wrong] == ["fixture 0 (right)", "fixture 1 (wrong)"]
    assert "1.0, not scalar 0.0" in wrong[1]


def test_fixture_of_a_task_that_was_not_run_is_passed_over() -> None:
    """`task check` of one task need not run the others of the set."""
    assert run_fixtures(_simple(FIXTURES), parse_reward, {}) == []


def test_shipped_schema_is_complete_and_of_these_tests() -> None:
    """Whoever changes the tests of a shipped task raises the schema's version."""
    made = load_schema(EXAMPLES / "rewards.toml")

    assert run_fixtures(made, parse_reward, {}) == []
    tasks = [load_task(one) for one in find_tasks([EXAMPLES])]
    assert made.code == {task.key: task.tests_digest for task in tasks}


# --- derived records ------------------------------------------------------------------


def _derived(version: int = 1, verifier: str = VERIFIER, **changes: Any) -> DerivedReward:
    weights = [part("tests", weight=1), part("style", weight=version - 1)]
    made = schema(version=version, part=weights, gate=[], veto=[])
    verdict = {"tests": 1.0, "style": 0.5}
    facts: dict[str, Any] = {"trial": "sum.0.0", "task": "sum", "parts": verdict}
    return derive(made, verifier_digest=verifier, **facts | changes)


def test_new_schema_or_verifier_adds_a_record_and_changes_none(tmp_path: Path) -> None:
    """What a checkpoint was trained on must stay what it was."""
    store = DerivedStore(tmp_path / "derived.jsonl")
    first, second, third = _derived(), _derived(2), _derived(2, "6" * 64)

    assert store.add([first]) == 1
    before = store.path.read_bytes()
    assert store.add([first, second, third]) == 2

    assert store.read() == (first, second, third)
    assert store.path.read_bytes().startswith(before)


def test_record_that_contradicts_another_is_refused_and_nothing_is_added(tmp_path: Path) -> None:
    """The same trial, schema and verifier cannot be worth two things."""
    store = DerivedStore(tmp_path / "derived.jsonl")
    store.add([_derived()])
    other = _derived(parts={"tests": 0.0, "style": 0.5})

    with pytest.raises(InvalidRequestError, match="never edited"):
        store.add([_derived(2), other])
    assert store.read() == (_derived(),)


def test_schema_that_was_changed_without_a_new_version_is_refused(tmp_path: Path) -> None:
    """A version means one thing for ever."""
    store = DerivedStore(tmp_path / "derived.jsonl")
    store.add([_derived()])
    edited = schema(part=[part("tests", weight=1, range=[0, 2])], gate=[], veto=[])

    with pytest.raises(InvalidRequestError, match="raise its version"):
        store.add(
            [derive(edited, trial="t", task="t", parts={"tests": 2.0}, verifier_digest=VERIFIER)]
        )


def test_refusal_is_a_record_too() -> None:
    """A verdict without worth by a schema must not vanish from the listing."""
    made = _derived(parts=None)

    assert (made.value, made.parts) == (None, None)
    assert made.refused is not None
    assert "no verdict" in made.refused


def test_verdict_that_is_no_verdict_makes_no_record() -> None:
    """A bool must not be written down as 1.0."""
    with pytest.raises(ContractError):
        _derived(parts={"tests": True, "style": 0.5})


def test_drift_lists_what_is_worth_something_else_and_what_changed() -> None:
    """Between versions a mean moves; this says by which trials."""
    same = _derived(1, "6" * 64)
    steady = [
        _derived(version, trial="steady", parts={"tests": 1.0, "style": 1.0}) for version in (1, 2)
    ]

    found = drift([_derived(), *steady, same, _derived(2, "6" * 64)])

    assert [(one.before.value, one.after.value, one.changed) for one in found] == [
        (1.0, 0.75, ("schema",))
    ]


def test_record_file_that_was_damaged_is_refused_by_line(tmp_path: Path) -> None:
    """A line that was changed must not be read as something else."""
    store = DerivedStore(tmp_path / "derived.jsonl")
    store.add([_derived()])
    store.path.write_bytes(store.path.read_bytes() + b'{"trial": "x"}\n')

    with pytest.raises(InvalidRequestError, match=r"derived\.jsonl:2"):
        store.read()


def test_record_that_a_killed_process_left_half_written_is_none(tmp_path: Path) -> None:
    """Nothing could be read or added any more until somebody had mended the file by hand."""
    store = DerivedStore(tmp_path / "derived.jsonl")
    store.add([_derived()])
    whole = store.path.read_bytes()
    store.path.write_bytes(whole + b'{"trial": "x"')

    assert store.read() == (_derived(),)
    assert store.add([_derived(verifier="6" * 64)]) == 1
    assert [one.verifier_digest for one in store.read()] == [VERIFIER, "6" * 64]


def test_records_that_do_not_fit_on_the_disk_are_not_there_at_all(tmp_path: Path) -> None:
    """All or none: half of a run would be derived, and look whole."""
    store = DerivedStore(tmp_path / "derived.jsonl")
    store.add([_derived()])
    whole = store.path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * len(whole) + 10, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            store.add([_derived(verifier=one * 64) for one in "67"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert store.path.read_bytes() == whole
