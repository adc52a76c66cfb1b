"""Shared fixtures live in tests/fixtures, one file per room."""

from __future__ import annotations

import importlib.util

pytest_plugins = [
    name
    for name in (
        "tests.fixtures.images",
        "tests.fixtures.runtime",
        "tests.fixtures.client",
        "tests.fixtures.egress",
    )
    if importlib.util.find_spec(name) is not None
]
