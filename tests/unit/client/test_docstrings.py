"""The SDK's documentation says what each class raises, in names that there are."""

from __future__ import annotations

import builtins
import inspect
import re

import pytest

import coldframe.client as sdk
from coldframe.protocol import errors

CLASSES = ["Files", "Process", "Sandbox", "SandboxClient", "Session"]


def _errors_named(text: str | None) -> set[str]:
    return set(re.findall(r"\b[A-Z]\w+Error\b", text or ""))


@pytest.mark.parametrize("name", CLASSES)
def test_documentation_names_the_errors_that_everything_raises(name: str) -> None:
    """Whoever catches them must not have to read the source."""
    said = inspect.getdoc(getattr(sdk, name)) or ""
    assert "Everything raises" in said
    assert _errors_named(said)


@pytest.mark.parametrize("name", CLASSES)
def test_documented_errors_exist(name: str) -> None:
    """A name that was changed must not live on in a docstring."""
    found = getattr(sdk, name)
    documented = [found, *(getattr(found, one) for one in vars(found) if not one.startswith("_"))]
    named = set().union(*(_errors_named(inspect.getdoc(one)) for one in documented))
    assert {
        one for one in named if not hasattr(errors, one) and not hasattr(builtins, one)
    } == set()
