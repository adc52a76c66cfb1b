"""Verdicts at the edge, tried on a schema before anybody learns by it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import get_args

from coldframe.learning.schemas.scalar import scalarise
from coldframe.learning.schemas.schema import Fixture, FixtureCase, RewardSchema
from coldframe.protocol.errors import ColdframeError

CASES: tuple[FixtureCase, ...] = get_args(FixtureCase)

Read = Callable[[bytes, str], Mapping[str, float]]
"""Reads a reward file as after an attempt: content and path to parts, or a ColdframeError."""
Verdicts = Mapping[tuple[str, str], Mapping[str, float] | None]
"""By task and solution: the parts, or None where the verifier failed."""


def run_fixtures(schema: RewardSchema, read: Read, verdicts: Verdicts) -> list[str]:
    """Return what is wrong: fixtures that come out otherwise, and cases that have none.

    Args:
        verdicts: those that were seen; fixtures of solutions that were not run are passed over.
    """
    had = {fixture.case for fixture in schema.fixture}
    problems = [f"no fixture for the case {case!r}" for case in CASES if case not in had]
    for number, fixture in enumerate(schema.fixture):
        if fixture.solution is not None and _place(fixture) not in verdicts:
            continue
        found = _outcome(schema, fixture, read, verdicts)
        if not _as_expected(fixture, found):
            due = f"scalar {fixture.scalar}" if fixture.refused is None else "a refusal"
            because = "" if fixture.refused is None else f" that says {fixture.refused!r}"
            problems.append(f"fixture {number} ({fixture.case}): {found}, not {due}{because}")
    return problems


def _place(fixture: Fixture) -> tuple[str, str]:
    return str(fixture.task), str(fixture.solution)


def _outcome(schema: RewardSchema, fixture: Fixture, read: Read, verdicts: Verdicts) -> float | str:
    """Return the scalar, or why there is none."""
    try:
        if fixture.content is not None:
            path = f"/logs/verifier/{fixture.file}"
            parts: Mapping[str, float] | None = read(fixture.content.encode(), path)
        elif fixture.solution is not None:
            parts = verdicts[_place(fixture)]
        else:
            parts = None
        return scalarise(schema, parts, fixture.case).value
    except ColdframeError as error:
        return f"refused: {error}"


def _as_expected(fixture: Fixture, found: float | str) -> bool:
    if isinstance(found, str):
        return fixture.refused is not None and fixture.refused in found
    return found == fixture.scalar
