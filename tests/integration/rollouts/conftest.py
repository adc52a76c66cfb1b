"""Tasks and attempts in real sandboxes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest_asyncio

from coldframe.client import AsyncSandboxClient
from coldframe.protocol.models import SandboxState
from coldframe.rollouts.attempt import Attempt
from coldframe.rollouts.attempt_settings import AttemptSettings
from coldframe.rollouts.environment import ImageBuilder
from coldframe.rollouts.load import load_task
from coldframe.trajectories.schema import Trajectory
from coldframe.trajectories.store import BlobStore, write_trajectory

RunAttempt = Callable[..., Awaitable[Trajectory]]


async def all_begun(client: AsyncSandboxClient, count: int) -> bool:
    """Whether so many sandboxes live and their agents have made /begun."""
    found = await client.list_sandboxes()
    ready = [one for one in found if one.info.state is SandboxState.READY]
    return len(ready) == count and all([await one.files.exists("/begun") for one in ready])


@pytest_asyncio.fixture
async def run_attempt(
    native_async_client: AsyncSandboxClient, tmp_path: Path
) -> AsyncIterator[RunAttempt]:
    """Run one attempt at a task directory: `run_attempt(directory, "oracle", wrong="a")`.

    Every trajectory that comes out is written and read back, as a run would.
    """
    images = ImageBuilder(native_async_client)
    blobs = BlobStore(tmp_path / "blobs")
    count = 0

    async def run(directory: Path, harness: str = "oracle", **settings: object) -> Trajectory:
        nonlocal count
        count += 1
        chosen = AttemptSettings("run-test", harness, **settings)  # type: ignore[arg-type]
        task = load_task(directory)
        attempt = Attempt(native_async_client, images, blobs, task, chosen, sample=count, attempt=0)
        trajectory = await attempt.run()
        write_trajectory(tmp_path / "attempts" / str(count), trajectory, blobs)
        return trajectory

    yield run
    await images.close()
