"""The contract of a harness as a suite that third parties run on their own.

    from coldframe.harnesses.self_check import check_harness
    findings = await check_harness(MyHarness, client, "debian:bookworm", base_url=None)
    assert findings == []

Each check makes its own sandbox and deletes it. A finding names the rule that was broken.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from coldframe.harnesses.base import (
    Episode,
    Harness,
    Limits,
    McpServer,
    ModelSettings,
    Offers,
    Outcome,
    Solution,
)
from coldframe.protocol.errors import ColdframeError, HarnessError, InferenceError
from coldframe.trajectories.recorder import Recorder
from coldframe.trajectories.redaction import Redactor
from coldframe.trajectories.schema import Termination
from coldframe.trajectories.store import BlobStore

if TYPE_CHECKING:
    from coldframe.client import AsyncSandboxClient

CHECK_S = 120.0
"""Seconds for one check."""
NOBODY_LISTENS = "http://127.0.0.1:9/v1"


@dataclass(frozen=True)
class _Bench:
    make: Callable[[], Harness]
    client: AsyncSandboxClient
    image: str
    base_url: str | None
    scratch: Path

    @asynccontextmanager
    async def episode(self, *, base_url: str | None = None) -> AsyncIterator[Episode]:
        """Yield an episode in a fresh sandbox, with a solution that leaves a mark."""
        solution = self.scratch / "solution"
        solution.mkdir(exist_ok=True)
        (solution / "solve.sh").write_text("#!/bin/sh\ntouch /solved\n")
        url = base_url or self.base_url
        harness = self.make()
        async with await self.client.create_sandbox(self.image) as sandbox:
            yield Episode(
                sandbox=sandbox,
                instruction="Say that you are done.",
                limits=Limits(steps=5, command_s=30.0),
                recorder=Recorder(BlobStore(self.scratch / "blobs"), Redactor()),
                deadline=time.monotonic() + CHECK_S,
                model=ModelSettings("check", url, retries=0, retry_wait_s=0.01) if url else None,
                solution=Solution(solution) if harness.needs_solution else None,
            )


async def _names_itself(bench: _Bench) -> str | None:
    first, second = bench.make(), bench.make()
    if not (first.name and first.version):
        return "name and version are not empty"
    if (first.name, first.version) != (second.name, second.version):
        return "name and version are the same each time"
    try:
        json.dumps(first.settings(), allow_nan=False)
    except (TypeError, ValueError) as error:
        return f"settings() is JSON: {error}"
    return None


async def _ends_with_an_outcome(bench: _Bench) -> str | None:
    harness = bench.make()
    if harness.needs_model and bench.base_url is None:
        return None
    async with bench.episode() as episode:
        outcome = await harness.run(episode)
        if not isinstance(outcome, Outcome):
            return f"run() returns an Outcome, not {type(outcome).__name__}"
        if outcome.termination in {Termination.AGENT_DEADLINE, Termination.FAILED}:
            return f"run() does not return {outcome.termination}: that is the runner's to say"
        episode.recorder.close()
        if episode.running:
            return "no operation runs on after run() has returned"
    return None


async def _leaves_no_process(bench: _Bench) -> str | None:
    harness = bench.make()
    if harness.needs_model and bench.base_url is None:
        return None
    async with bench.episode() as episode:
        await harness.run(episode)
        for operation_id in episode.running:
            await episode.sandbox.kill_processes(operation_id)
        left = await episode.sandbox.processes()
        if left:
            return f"no process of the harness is left: {[one.name for one in left]}"
    return None


async def _passes_cancellation_on(bench: _Bench) -> str | None:
    harness = bench.make()
    async with bench.episode() as episode:
        running = asyncio.ensure_future(harness.run(episode))
        await asyncio.sleep(0)
        running.cancel()
        (outcome,) = await asyncio.gather(running, return_exceptions=True)
        expected = isinstance(outcome, asyncio.CancelledError | ColdframeError | Outcome)
        if not expected:
            return f"a cancelled run() ends as cancelled, not with {outcome!r}"
    return None


async def _says_whose_failure_it_is(bench: _Bench) -> str | None:
    harness = bench.make()
    if not harness.needs_model:
        return None
    async with bench.episode(base_url=NOBODY_LISTENS) as episode:
        try:
            await harness.run(episode)
        except InferenceError:
            return None
        return "an endpoint that is not there raises InferenceError"


async def _refuses_to_run_without_its_needs(bench: _Bench) -> str | None:
    harness = bench.make()
    if not (harness.needs_model or harness.needs_solution):
        return None
    async with bench.episode() as episode:
        episode.model = episode.solution = None
        try:
            await harness.run(episode)
        except HarnessError:
            return None
        return "run() without the model or solution that it needs raises HarnessError"


async def _says_what_it_refuses(bench: _Bench) -> str | None:
    harness = bench.make()
    server = McpServer("check", "sse", url=NOBODY_LISTENS)
    if harness.refuses(Offers()) is not None:
        return "refuses() returns None for a task that offers nothing"
    refused = harness.refuses(Offers(mcp_servers=(server,)))
    if not (refused is None or (isinstance(refused, str) and refused)):
        return f"refuses() returns None or words, not {refused!r}"
    if refused is None or (harness.needs_model and bench.base_url is None):
        return None
    async with bench.episode() as episode:
        episode.offers = Offers(mcp_servers=(server,))
        try:
            await harness.run(episode)
        except HarnessError:
            return None
        return "run() raises HarnessError for a task whose offers it refuses"


_CHECKS: tuple[Callable[[_Bench], Awaitable[str | None]], ...] = (
    _names_itself,
    _ends_with_an_outcome,
    _leaves_no_process,
    _passes_cancellation_on,
    _says_whose_failure_it_is,
    _refuses_to_run_without_its_needs,
    _says_what_it_refuses,
)


async def check_harness(
    make: Callable[[], Harness],
    client: AsyncSandboxClient,
    image: str,
    *,
    base_url: str | None = None,
) -> list[str]:
    """Return every rule of the seam that a harness breaks; none is what it should be.

    Args:
        make: makes one harness, as for every attempt.
        base_url: of an endpoint that answers in text; without it, what needs a model's answer
            is not checked.
    """
    findings = []
    with tempfile.TemporaryDirectory(prefix="coldframe-check-") as scratch:
        bench = _Bench(make, client, image, base_url, Path(scratch))
        for check in _CHECKS:
            try:
                async with asyncio.timeout(CHECK_S):
                    broken = await check(bench)
            except TimeoutError:
                broken = f"{check.__name__.strip('_')}: not done within {CHECK_S:g} s"
            if broken is not None:
                findings.append(broken)
    return findings
