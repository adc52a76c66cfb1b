"""From the parts of a verdict to one number: pure, by name and version."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from coldframe.learning.contracts.errors import ContractError
from coldframe.learning.contracts.evidence import Parameters
from coldframe.learning.contracts.values import is_number
from coldframe.learning.schemas.schema import Part, RewardSchema
from coldframe.trajectories.means import mean


@dataclass(frozen=True)
class Scalar:
    """One number, and everything that it was made of."""

    value: float
    parts: Parameters
    """As the verifier gave them."""
    schema: str
    rule: str
    decided_by: str
    """`mean`, `gate KEY` or `veto KEY`."""
    left_out: tuple[str, ...]
    """Parts that were missing, as the schema lets them be."""


def scalarise(schema: RewardSchema, parts: Any, trial: str = "verdict") -> Scalar:
    """Return the scalar of a verdict by `gated_mean@1`.

    The first veto that is reached decides, else the first gate that is not, else the mean of the
    parts by weight, in which a part of direction `lower` counts as least + greatest - itself.

    Args:
        parts: of the verdict, by key; None: the verifier failed.
        trial: names it in refusals.
    Raises:
        ContractError: a part is missing, unknown, no finite number or out of its range, or all
            that have weight were left out.
    """
    if not isinstance(parts, Mapping):
        raise ContractError(trial, "rewards", parts, "there is no verdict", rule="verdict")
    declared = {part.key: part for part in schema.part}
    for key, value in parts.items():
        _check(schema, declared.get(key), trial, key, value)
    left_out = tuple(key for key in declared if key not in parts)
    for key in left_out:
        if declared[key].missing == "refuse":
            problem = f"the verdict has no {key!r}, which {schema.label} needs"
            raise ContractError(trial, f"rewards[{key!r}]", None, problem, rule="missing")
    value, decided_by = _decide(schema, parts, trial)
    return Scalar(value, Parameters(parts), schema.label, schema.scalarise, decided_by, left_out)


def _check(schema: RewardSchema, part: Part | None, trial: str, key: str, value: object) -> None:
    field = f"rewards[{key!r}]"
    if part is None:
        raise ContractError(
            trial, field, value, f"is no part that {schema.label} declares", rule="undeclared"
        )
    if not is_number(value):
        raise ContractError(trial, field, value, "is no finite number", rule="number")
    low, high = part.range
    if not low <= value <= high:
        problem = f"is out of its range, {low:g} to {high:g} {part.unit}"
        raise ContractError(trial, field, value, problem, rule="range")


def _decide(schema: RewardSchema, parts: Mapping[str, float], trial: str) -> tuple[float, str]:
    for veto in schema.veto:
        if parts[veto.key] >= veto.at_least:
            return veto.gives, f"veto {veto.key}"
    for gate in schema.gate:
        if parts[gate.key] < gate.at_least:
            return gate.otherwise, f"gate {gate.key}"
    weighed = [part for part in schema.part if part.weight and part.key in parts]
    if not weighed:
        problem = "every part that has weight was left out"
        raise ContractError(trial, "rewards", dict(parts), problem, rule="nothing_left")
    return mean((_worth(part, parts[part.key]), part.weight) for part in weighed), "mean"


def _worth(part: Part, value: float) -> Fraction:
    """Return a value as the mean takes it: the higher the better."""
    exact = Fraction(value)
    return exact if part.direction == "higher" else sum(map(Fraction, part.range)) - exact
