"""The suite that third parties run must pass what is right and find what is not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from coldframe.client import AsyncSandboxClient
from coldframe.harnesses.base import Episode, Offers, Outcome
from coldframe.harnesses.nop import NopHarness
from coldframe.harnesses.react import ReactHarness
from coldframe.harnesses.self_check import check_harness
from coldframe.trajectories.schema import Termination
from tests.doubles.model_endpoint import ModelEndpoint, Say


@pytest.fixture
async def plain_client(tmp_path: Path) -> AsyncIterator[AsyncSandboxClient]:
    async with AsyncSandboxClient(
        in_process=True, home=tmp_path / "home", runtime="fake"
    ) as client:
        yield client


async def test_self_check_of_shipped_harnesses_finds_nothing(
    plain_client: AsyncSandboxClient,
) -> None:
    """The control: a suite that always finds something proves nothing."""
    with ModelEndpoint(lambda messages: Say("Done.")) as endpoint:
        react = await check_harness(ReactHarness, plain_client, "any", base_url=endpoint.base_url)
    nop = await check_harness(NopHarness, plain_client, "any")

    assert (react, nop) == ([], [])


class Deaf(NopHarness):
    """Swallows its cancellation and reports it as something else."""

    async def run(self, episode: Episode) -> Outcome:
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            raise ValueError("what?") from None
        return Outcome(Termination.FINISHED)


class Littering(NopHarness):
    """Leaves a process of its own running."""

    async def run(self, episode: Episode) -> Outcome:
        await episode.sandbox.start("sleep 2")
        return Outcome(Termination.FINISHED)


class Presumptuous(NopHarness):
    """Says what only the runner can know."""

    def settings(self) -> dict[str, Any]:
        return {"x": float("nan")}

    async def run(self, episode: Episode) -> Outcome:
        return Outcome(Termination.AGENT_DEADLINE)


class Blaming(NopHarness):
    """Needs a model, and takes a missing endpoint for a finished episode."""

    needs_model = True


class Choosy(NopHarness):
    """Refuses every task, and runs all the same."""

    def refuses(self, offers: Offers) -> str | None:
        return "anything"


class Careless(NopHarness):
    """Refuses MCP servers, and runs all the same."""

    def refuses(self, offers: Offers) -> str | None:
        return "MCP servers" if offers.mcp_servers else None


@pytest.mark.parametrize(
    ("harness", "rule"),
    [
        (Deaf, "a cancelled run()"),
        (Littering, "no process of the harness is left"),
        (Presumptuous, "run() does not return"),
        (Presumptuous, "settings() is JSON"),
        (Blaming, "raises InferenceError"),
        (Blaming, "raises HarnessError"),
        (Choosy, "refuses() returns None for a task that offers nothing"),
        (Careless, "for a task whose offers it refuses"),
    ],
)
async def test_self_check_of_a_broken_harness_names_the_rule(
    plain_client: AsyncSandboxClient, harness: type[NopHarness], rule: str
) -> None:
    """Each rule is there because its breach cost somebody a batch."""
    findings = await check_harness(harness, plain_client, "any")

    assert [one for one in findings if rule in one]
