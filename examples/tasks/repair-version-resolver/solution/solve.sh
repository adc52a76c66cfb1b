#!/bin/sh
set -eu
cd /srv/pinfold
cat > pinfold/version.py <<'PY'
"""Versions and their precedence (Semantic Versioning 2.0.0)."""

import re
from dataclasses import dataclass

_NUMBER = r"(0|[1-9][0-9]*)"
_IDENTIFIERS = r"[0-9A-Za-z-]+(?:\.[0-9A-Za-z-]+)*"
_PATTERN = re.compile(
    rf"{_NUMBER}\.{_NUMBER}\.{_NUMBER}(?:-({_IDENTIFIERS}))?(?:\+({_IDENTIFIERS}))?"
)


def _is_number(identifier):
    return identifier.isascii() and identifier.isdigit()


@dataclass(frozen=True)
class Version:
    major: int
    minor: int
    patch: int
    prerelease: tuple = ()
    build: str = ""

    @classmethod
    def parse(cls, text):
        """Return the version that the text names; ValueError if it names none."""
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise ValueError(f"not a version: {text!r}")
        major, minor, patch, prerelease, build = match.groups()
        identifiers = tuple(prerelease.split(".")) if prerelease else ()
        if any(_is_number(one) and one != "0" and one[0] == "0" for one in identifiers):
            raise ValueError(f"leading zero in a prerelease: {text!r}")
        return cls(int(major), int(minor), int(patch), identifiers, build or "")

    @property
    def release(self):
        return (self.major, self.minor, self.patch)

    def key(self):
        """A value that sorts as the version does; the build plays no part."""
        identifiers = tuple(
            (0, int(one), "") if _is_number(one) else (1, 0, one) for one in self.prerelease
        )
        return (*self.release, not self.prerelease, identifiers)


def compare(a, b):
    """Return -1, 0 or 1 as version text a is lower than, equal to or higher than b."""
    left, right = Version.parse(a).key(), Version.parse(b).key()
    return (left > right) - (left < right)
PY
cat > pinfold/requirement.py <<'PY'
"""Requirements: alternatives of comparators."""

import re

from pinfold.version import Version

_COMPARATOR = re.compile(r"(\^|~|<=|>=|<|>|=)?\s*(.+)")


def parse(text):
    """Return a list of alternatives, each a list of (operator, version)."""
    return [[_comparator(part.strip()) for part in one.split(",")] for one in text.split("||")]


def _comparator(text):
    match = _COMPARATOR.fullmatch(text)
    if match is None:
        raise ValueError(f"not a comparator: {text!r}")
    return match.group(1) or "=", Version.parse(match.group(2))


def satisfies(version, alternative):
    """Whether the version satisfies every comparator of one alternative."""
    if version.prerelease and not any(
        bound.prerelease and bound.release == version.release for _, bound in alternative
    ):
        return False
    return all(_holds(version, operator, bound) for operator, bound in alternative)


def _caret_end(bound):
    if bound.major:
        return Version(bound.major + 1, 0, 0)
    if bound.minor:
        return Version(0, bound.minor + 1, 0)
    return Version(0, 0, bound.patch + 1)


def _holds(version, operator, bound):
    if operator == "^":
        return bound.key() <= version.key() < _caret_end(bound).key()
    if operator == "~":
        return bound.key() <= version.key() < Version(bound.major, bound.minor + 1, 0).key()
    return {
        "=": version.key() == bound.key(),
        "<": version.key() < bound.key(),
        "<=": version.key() <= bound.key(),
        ">": version.key() > bound.key(),
        ">=": version.key() >= bound.key(),
    }[operator]
PY
cat > pinfold/resolver.py <<'PY'
"""The pick."""

from pinfold import requirement
from pinfold.version import Version


def resolve(available, wanted):
    """Return the best of the available version texts for a requirement, or None."""
    alternatives = requirement.parse(wanted)
    best, best_key = None, None
    for text in available:
        try:
            version = Version.parse(text)
        except ValueError:
            continue
        if not any(requirement.satisfies(version, one) for one in alternatives):
            continue
        if best_key is None or version.key() > best_key:
            best, best_key = text, version.key()
    return best
PY
python3 -m unittest discover -s tests
git commit -q -a -m 'Follow Semantic Versioning in precedence, carets and prereleases'
