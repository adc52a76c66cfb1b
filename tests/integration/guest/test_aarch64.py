"""Sandboxes on a machine of the other architecture, emulated: minutes, so only with `--long`."""

from __future__ import annotations

import re

import pytest

from tests.guest.foreign import aarch64_parts
from tests.guest.machine import GuestSettings, run_guest

TESTS = (
    *("env", "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1", "python3", "-m", "pytest"),
    *("-p", "pytest_asyncio.plugin", "-p", "pytest_timeout", "--color=no", "--timeout=600"),
    "tests/guest/test_guest.py",
    "tests/security/native",
)
"""The runtime's whole self-check, every controller, and the walls: seccomp's numbers are others."""


@pytest.mark.long
@pytest.mark.root
@pytest.mark.timeout(2000)
def test_aarch64_guest_passes_the_tests_of_the_runtime_and_its_walls() -> None:
    """System call numbers, structures and stacks differ there; that it compiles says nothing."""
    settings = GuestSettings.from_environment(deadline_s=1800.0)

    result = run_guest(("sh", "-c", 'uname -m; exec "$@"', "sh", *TESTS), settings, aarch64_parts)

    said = result.output.decode("utf-8", "replace")
    assert result.exit_code == 0, said
    assert said.startswith("aarch64\n")
    summary = re.search(r"^=+ (\d+) passed(.*) in [\d.:() s]+=+$", said, re.MULTILINE)
    assert summary is not None, said
    assert summary[2] == "", f"only passed tests count here:\n{said}"
