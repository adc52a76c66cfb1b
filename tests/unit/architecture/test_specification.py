"""SPECIFICATION.md may only name what exists."""

from __future__ import annotations

import re
from pathlib import Path

from coldframe.runtimes.self_check import CHECKS

ROOT = Path(__file__).resolve().parents[3]


def _named(pattern: str) -> set[str]:
    return set(re.findall(pattern, (ROOT / "SPECIFICATION.md").read_text("utf-8")))


def test_specification_is_numbered_in_order() -> None:
    """Promises are cited by number."""
    numbers = re.findall(r"^(\d+)\. ", (ROOT / "SPECIFICATION.md").read_text("utf-8"), re.M)

    assert [int(number) for number in numbers] == list(range(1, len(numbers) + 1))


def test_specification_names_only_tests_that_exist() -> None:
    """A promise whose test was renamed or removed is a promise that nothing holds."""
    defined: set[str] = set()
    for file in (ROOT / "tests").rglob("test_*.py"):
        defined |= set(re.findall(r"def (test_\w+)", file.read_text("utf-8")))

    named = _named(r"`(test_[a-z0-9_]+)`")

    assert len(named) > 60
    assert named - defined == set()


def test_specification_names_only_checks_that_exist() -> None:
    """The same for what the self-check of the runtime seam holds."""
    named = _named(r"`check:([a-z0-9_]+)`")

    assert len(named) > 10
    assert named - {check.name.replace(" ", "_") for check in CHECKS} == set()
