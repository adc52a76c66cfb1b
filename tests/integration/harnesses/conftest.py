"""Episodes in a sandbox of the fake runtime: real commands, no isolation, no root needed."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from coldframe.client import AsyncSandbox, AsyncSandboxClient
from coldframe.harnesses.base import Episode, Limits, ModelSettings, Offers
from coldframe.trajectories.recorder import Recorder
from coldframe.trajectories.redaction import Redactor
from coldframe.trajectories.store import BlobStore

MakeEpisode = Callable[..., Episode]


@pytest.fixture
async def plain_sandbox(tmp_path: Path) -> AsyncIterator[AsyncSandbox]:
    """A sandbox of the fake runtime."""
    async with AsyncSandboxClient(
        in_process=True, home=tmp_path / "home", runtime="fake"
    ) as client:
        yield await client.create_sandbox("any")


@pytest.fixture
def make_episode(plain_sandbox: AsyncSandbox, tmp_path: Path) -> MakeEpisode:
    """Make an episode: `make_episode(base_url, steps=3, retries=0)`."""

    def make(
        base_url: str | None = None,
        *,
        instruction: str = "the task",
        wall_s: float = 60.0,
        retries: int = 0,
        request_s: float = 30.0,
        api_key: str | None = "sk-test-key",
        offers: Offers | None = None,
        **limits: float,
    ) -> Episode:
        model = base_url and ModelSettings(
            name="policy",
            base_url=base_url,
            api_key=api_key,
            retries=retries,
            retry_wait_s=0.001,
            request_s=request_s,
        )
        return Episode(
            sandbox=plain_sandbox,
            instruction=instruction,
            limits=Limits(**limits),  # type: ignore[arg-type]
            recorder=Recorder(BlobStore(tmp_path / "blobs"), Redactor(["sk-test-key"])),
            deadline=time.monotonic() + wall_s,
            model=model or None,
            offers=offers or Offers(),
        )

    return make
