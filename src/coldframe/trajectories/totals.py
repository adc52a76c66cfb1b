"""Sums over steps. A sum over something unknown is unknown, never a smaller number."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from coldframe.trajectories.base import Model
from coldframe.trajectories.steps import Call, Step

N = TypeVar("N", int, float)


class Totals(Model):
    """Sums over the steps."""

    steps: int = 0
    calls: int | None = 0
    parse_failures: int | None = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cpu_s: float | None = None
    memory_peak_bytes: int | None = None


def totals(steps: Iterable[Step]) -> Totals:
    """Return the sums over these steps."""
    every = [*steps]
    calls = [call for step in every for call in step.calls]
    model_steps = [step for step in every if step.source != "solution"]
    return Totals(
        steps=len(every),
        calls=len(calls),
        parse_failures=sum(len(step.parse_failures) for step in every),
        prompt_tokens=known_sum(step.usage.prompt_tokens for step in model_steps),
        completion_tokens=known_sum(step.usage.completion_tokens for step in model_steps),
        cpu_s=known_sum(map(_cpu, calls)),
        memory_peak_bytes=_peak(calls),
    )


def known_sum(values: Iterable[N | None]) -> N | None:
    """Return a sum; over something unknown it is unknown."""
    known: list[N] = []
    for value in values:
        if value is None:
            return None
        known.append(value)
    return sum(known)


def _cpu(call: Call) -> float | None:
    used = call.resources
    return None if used is None else known_sum((used.cpu_user_s, used.cpu_system_s))


def _peak(calls: Sequence[Call]) -> int | None:
    peaks = [call.resources.memory_peak_bytes for call in calls if call.resources is not None]
    known = [peak for peak in peaks if peak is not None]
    return max(known) if known and len(known) == len(calls) else None
