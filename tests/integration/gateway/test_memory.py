"""A service that runs for months holds no more than its bounds say."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from coldframe import SandboxClient
from tests.fixtures.restart import IMAGE, Services

pytestmark = [pytest.mark.root, pytest.mark.timeout(600)]

_BOUNDS = {
    "COLDFRAME_ENDED_COUNT": "50",
    "COLDFRAME_RESULT_COUNT": "100",
    "COLDFRAME_EXPIRED_IDS": "100",
    "COLDFRAME_EVENT_COUNT": "200",
    "COLDFRAME_SPOOL_COUNT": "10",
    "COLDFRAME_QUARANTINE_S": "0",
}
_MOST_EACH = 1024
"""In bytes. What a sandbox that ended leaves for a while is ten times as much, and what stays of
it in a cycle, which a service seldom looks for, is somewhat more than this.
"""
numbers = itertools.count()


def _resident_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS:"))


def _rounds(client: SandboxClient, count: int) -> None:
    """Make sandboxes, run a command in each, change a file, and delete them."""

    def one(number: int) -> None:
        name = f"round-{number}"
        with client.create_sandbox(
            IMAGE, memory_bytes=64 << 20, labels={"owner": f"owner-{number % 7}"}, operation_id=name
        ) as sandbox:
            told = sandbox.exec("cat", stdin=b"x" * 100, operation_id=f"command-{number}")
            assert told.out.total_bytes == 100
            sandbox.files.write("/f", b"x" * 1000)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, itertools.islice(numbers, count)))


@pytest.mark.parametrize(
    ("before", "rounds"), [(300, 500), pytest.param(1000, 5000, marks=pytest.mark.long)]
)
def test_memory_of_a_service_levels_off(
    make_services: Callable[..., Services], before: int, rounds: int
) -> None:
    """However many sandboxes there have been."""
    services = make_services(**_BOUNDS)
    process = services.start()
    with services.client() as client:
        _rounds(client, before)
        resident = _resident_bytes(process.pid)
        _rounds(client, rounds)
        grown = _resident_bytes(process.pid) - resident

    assert grown < rounds * _MOST_EACH, f"{grown / rounds:.0f} bytes each"
