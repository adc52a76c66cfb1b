"""A client that is killed in the middle of its work leaves nothing in the kernel or on disk."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from coldframe import SandboxClient
from coldframe.images.base import Image

SCRIPT = """
import asyncio, os, signal
from coldframe import AsyncSandboxClient

async def main():
    async with AsyncSandboxClient(in_process=True) as client:
        creates = (client.create_sandbox("debian:bookworm") for _ in range(4))
        sandboxes = await asyncio.gather(*creates)
        print(sandboxes[0].id, flush=True)
        left = 100
        async def one(number):
            nonlocal left
            await sandboxes[number % 4].exec("setsid sleep 300 & sleep 0.02; echo x > f$$")
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.gather(*(one(number) for number in range(200)))

asyncio.run(main())
"""


def traces(node_id: str) -> Iterator[str]:
    """Whatever of a node can be found by its id: cgroups, processes in them, mounts, files."""
    for path, _, _ in os.walk("/sys/fs/cgroup"):  # others make and remove some meanwhile
        if path.endswith(f"/coldframe/{node_id}"):
            yield path
    for process in Path("/proc").glob("[0-9]*/cgroup"):
        try:
            if f"/{node_id}/" in process.read_text():
                yield str(process)
        except (FileNotFoundError, ProcessLookupError):
            continue
    if node_id in Path("/proc/self/mountinfo").read_text():
        yield "mount"
    home = Path(os.environ.get("COLDFRAME_HOME", "/var/lib/coldframe"))
    yield from (str(path) for path in home.glob(f"*/{node_id}"))


@pytest.mark.root
@pytest.mark.usefixtures("native_client")
def test_client_killed_among_execs_leaves_nothing(debian_image: Image) -> None:
    """Trainers are killed all the time; the next node on the machine must find a clean one."""
    killed = subprocess.run(
        [sys.executable, "-c", SCRIPT], check=False, capture_output=True, text=True, timeout=60
    )
    assert killed.returncode == -9, killed.stderr
    node_id = killed.stdout.split("-")[1]

    deadline = time.monotonic() + 30
    while (left := list(traces(node_id))) and time.monotonic() < deadline:
        with SandboxClient(in_process=True) as client:  # its start reaps what dead nodes left
            assert client.ledger().balanced
    assert left == []


FORGETFUL = """
import asyncio
from coldframe import AsyncSandboxClient

async def main():
    client = AsyncSandboxClient(in_process=True)
    sandbox = await client.create_sandbox("debian:bookworm")
    await sandbox.exec("setsid sleep 300 & echo x > /file")
    print(sandbox.id, flush=True)

asyncio.run(main())
"""


@pytest.mark.root
@pytest.mark.usefixtures("native_client")
def test_async_client_that_nobody_closed_leaves_nothing(debian_image: Image) -> None:
    """A forgotten `async with` must not need somebody to run gc."""
    ended = subprocess.run(
        [sys.executable, "-W", "default", "-c", FORGETFUL],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert "a client was not closed" in ended.stderr
    assert list(traces(ended.stdout.split("-")[1])) == []
