"""Requirements: alternatives of comparators."""

import re

from pinfold.version import Version

_COMPARATOR = re.compile(r"(\^|~|<=|>=|<|>|=)?\s*(.+)")


def parse(text):
    """Return a list of alternatives, each a list of (operator, version)."""
    return [[_comparator(part.strip()) for part in one.split(",")] for one in text.split("||")]


def _comparator(text):
    match = _COMPARATOR.match(text)
    if match is None:
        raise ValueError(f"not a comparator: {text!r}")
    return match.group(1) or "=", Version.parse(match.group(2))


def satisfies(version, alternative):
    """Whether the version satisfies every comparator of one alternative."""
    return all(_holds(version, operator, bound) for operator, bound in alternative)


def _holds(version, operator, bound):
    if operator == "^":
        return bound.key() <= version.key() < Version(bound.major + 1, 0, 0).key()
    if operator == "~":
        return bound.key() <= version.key() < Version(bound.major, bound.minor + 1, 0).key()
    return {
        "=": version.key() == bound.key(),
        "<": version.key() < bound.key(),
        "<=": version.key() <= bound.key(),
        ">": version.key() > bound.key(),
        ">=": version.key() >= bound.key(),
    }[operator]
