"""Each rule refuses what it is there for, and nothing else stands in for it."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest

from coldframe.learning.contracts import (
    MULTI_STEP_MEAN,
    SEGMENTS,
    Batch,
    ContractError,
    PolicyRollout,
    batch,
    content,
    policies,
    sequences,
    spans,
    topologies,
    trials,
)
from coldframe.learning.contracts.rules import Rules
from tests.unit.learning.cases import CASES, Case
from tests.unit.learning.evidence import branched, rollout, sequence, stepped, tokens, trial

TABLES: list[Rules] = [
    trials.rule,
    topologies.linear_rule,
    topologies.multi_step_rule,
    topologies.segments_rule,
    content.rule,
    content.logprob_rule,
    content.algorithm_rule,
    spans.rule,
    policies.rule,
    sequences.rule,
    batch.rule,
]
RULES = [(table, name) for table in TABLES for name in table.table]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule}-{case.name}")
def test_contract_refuses_by_the_rule_that_is_there_for_it(case: Case) -> None:
    """The error names trial, field and value, and says which rule it was."""
    with pytest.raises(ContractError) as caught:
        case.make()

    error = caught.value
    assert error.rule == case.rule
    assert error.field
    assert str(error).startswith(f"{error.trial}: {error.field}: ")
    assert case.says in str(error)


@pytest.mark.parametrize(("table", "name"), RULES, ids=[name for _, name in RULES])
def test_rule_that_is_removed_lets_something_through(
    table: Rules, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rule whose absence nobody notices is one that may be gone already."""
    monkeypatch.delitem(table.table, name)

    assert any(_passes(case) for case in CASES if case.rule == name)


def _passes(case: Case) -> bool:
    try:
        case.make()
    except Exception:  # noqa: BLE001 - without its rule a case may end in any way
        return False
    return True


def test_documentation_states_every_rule() -> None:
    """A docstring is the rule's statement in docs/contracts.md."""
    page = (Path(__file__).resolve().parents[3] / "docs" / "contracts.md").read_text("utf-8")

    said = re.findall(r"^\| `(\w+)` \| (.+) \|$", page, re.MULTILINE)
    due = [(name, " ".join(str(table.table[name].__doc__).split())) for table, name in RULES]
    assert [one for one in said if one[0] in dict(due)] == due
    assert len(dict(due)) == len(due)


def test_what_keeps_every_rule_is_taken() -> None:
    """The control: without it every refusal would be worth nothing."""
    assert rollout().reward == 1.0
    assert tokens().algorithm == "sft@1"
    assert sequence().trainable_tokens == 2
    assert PolicyRollout.from_trial(stepped(), topology=MULTI_STEP_MEAN).reward == 0.75
    assert len(PolicyRollout.from_trial(branched(), topology=SEGMENTS).spans) == 3
    assert Batch((rollout(), rollout(trial_name="sum__xyz"))).manifest.run_id == "run-1"


def test_refusal_is_a_value_error_and_travels_between_processes() -> None:
    """Trainers build rollouts in workers, and catch ValueError."""
    with pytest.raises(ValueError, match="wrong split") as caught:
        PolicyRollout.from_trial(trial(split="eval"))

    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), vars(again)) == (str(caught.value), vars(caught.value))


def test_refusal_of_something_huge_is_short() -> None:
    """A message is for people; the value itself stays at the error."""
    with pytest.raises(ContractError) as caught:
        rollout(prompt_token_ids="x" * 1_000_000)

    assert len(str(caught.value)) < 400
    assert len(caught.value.value) == 1_000_000
