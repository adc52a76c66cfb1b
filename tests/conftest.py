"""Shared fixtures live in tests/fixtures, one file per room."""

from __future__ import annotations

import os
import signal
from collections import Counter

import pytest

pytest_plugins = (
    "tests.fixtures.repository",
    "tests.fixtures.images",
    "tests.fixtures.runtime",
    "tests.fixtures.client",
    "tests.fixtures.service",
    "tests.fixtures.restart",
    "tests.fixtures.redis",
    "tests.fixtures.egress",
    "tests.fixtures.native",
)

FIRST = ("tests/integration/guest/", "tests/integration/examples/", "tests/security/rollouts/")
"""What takes longest begins first, so that nothing runs alone at the end."""


FOR_ROOT = frozenset(("image_store", "internet", "native_home", "tree"))
"""Fixtures that only root can make; a test that needs root without them is marked `root`."""


def pytest_configure() -> None:
    """Have Ctrl-C work, and no test start the machine's own node unless it says so.

    What a script starts in the background is born deaf to Ctrl-C.
    """
    os.environ["COLDFRAME_URL"] = "in-process"
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the long forms be asked for."""
    parser.addoption("--long", action="store_true", help="run tests marked `long` too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Function]) -> None:
    """Put the longest first; leave out what takes minutes unless it is asked for."""
    if hasattr(config, "workerinput"):
        shared = [one for one, times in Counter(i.nodeid for i in items).items() if times > 1]
        if shared:
            raise pytest.UsageError(f"pytest-xdist runs the first only of the tests named {shared}")
    if os.geteuid() != 0:
        for item in items:
            if item.get_closest_marker("root") or not FOR_ROOT.isdisjoint(item.fixturenames):
                item.add_marker(pytest.mark.skip(reason="needs root"))
    items.sort(key=lambda item: not item.nodeid.startswith(FIRST))
    if not config.getoption("--long"):
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="long: run with --long"))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Name what passes only when it is tried again, so that nobody takes it for sound."""
    if config.getoption("lf", False):
        for report in terminalreporter.stats.get("passed", ()):
            terminalreporter.write_line(f"PASSED ONLY WHEN TRIED AGAIN {report.nodeid}")
