"""The OpenAPI document against the service, by a pytest of its own; what it runs is `document.py`.

Schemathesis makes a test of each operation, all under one name: pytest-xdist would run the first
and drop the rest. To make them takes seconds too, which each of its workers would pay.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.repository import REPOSITORY

pytestmark = pytest.mark.root


def _check(name: str, *options: str) -> None:
    file = Path(__file__).with_name("document.py").relative_to(REPOSITORY)
    done = subprocess.run(
        (sys.executable, "-m", "pytest", "-p", "no:xdist", f"{file}::{name}", *options),
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    document = json.loads((REPOSITORY / "docs/openapi.json").read_text())
    operations = sum(len(path.keys() - {"parameters"}) for path in document["paths"].values())
    assert re.search(rf"^=+ {operations} passed in ", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.timeout(600)
def test_every_answer_is_declared_and_no_fault() -> None:
    """An odd request to any operation must be refused in words, never break the service."""
    _check("test_every_answer_is_declared_and_no_fault")


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_answer_is_declared_and_no_fault_for_long() -> None:
    """The same with luck of the day."""
    _check("test_every_answer_is_declared_and_no_fault_for_long", "--long")
