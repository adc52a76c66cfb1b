"""Shared fixtures live in tests/fixtures, one file per room."""

from __future__ import annotations

import importlib.util

import pytest

pytest_plugins = [
    name
    for name in (
        "tests.fixtures.images",
        "tests.fixtures.runtime",
        "tests.fixtures.client",
        "tests.fixtures.service",
        "tests.fixtures.redis",
        "tests.fixtures.egress",
    )
    if importlib.util.find_spec(name) is not None
]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the long forms be asked for."""
    parser.addoption("--long", action="store_true", help="run tests marked `long` too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what takes minutes unless it is asked for."""
    if not config.getoption("--long"):
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="long: run with --long"))
