"""Means that are rounded once, at their end: what is 1 in every part is 1 as a whole."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction


def mean(weighed: Iterable[tuple[float | Fraction, float]]) -> float:
    """Return the mean of values by weight, exact but for its last rounding.

    It lies between the least and the greatest value, so that it never overflows.

    Args:
        weighed: pairs of a value and its weight, both finite; no weight below 0, one above it.
    """
    total = weights = Fraction()
    for value, weight in weighed:
        total += Fraction(value) * Fraction(weight)
        weights += Fraction(weight)
    return float(total / weights)
