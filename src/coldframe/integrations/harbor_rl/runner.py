"""Run a Harbor job within caps on cost, time, failures and disk."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from coldframe.integrations.harbor_rl.specs import field_of
from coldframe.integrations.harbor_rl.trials import exception_of
from coldframe.learning.contracts.values import is_number
from coldframe.protocol.errors import CapabilityError

RunJob = Callable[[Any], Any | Awaitable[Any]]
"""Takes Harbor's JobConfig, returns its JobResult, now or when awaited."""
WATCH_S = 1.0


@dataclass(frozen=True)
class Caps:
    """Limits of a whole job. What has ended when one is reached is kept. None: no limit."""

    cost_usd: float | None = None
    wall_s: float | None = None
    failure_rate: float | None = None
    """Share of ended trials with an exception; looked at from `failures_from` trials on."""
    failures_from: int = 10
    disk_bytes: int | None = None
    """Of the job's directory."""


@dataclass
class JobOutcome:
    """What a job came to, whole or stopped; read like Harbor's JobResult."""

    n_total_trials: int
    trial_results: list[Any]
    n_retries: int
    stopped: str | None = None


@dataclass
class Watch:
    """Ended trials by name: a trial that is tried again takes the place of its first try."""

    caps: Caps
    directory: Path
    started: float = field(default_factory=time.monotonic)
    ended: dict[str, Any] = field(default_factory=dict)
    tries: Counter[str] = field(default_factory=Counter)
    cost_usd: float = 0.0

    def add(self, result: Any) -> None:
        """Count a trial that ended."""
        name = str(field_of(result, "trial_name"))
        self.ended[name] = result
        self.tries[name] += 1
        parts = [field_of(result, "agent_result")]
        parts += [field_of(one, "agent_result") for one in field_of(result, "step_results") or ()]
        costs = [field_of(one, "cost_usd") for one in parts if one is not None]
        # What is no number is not known; as NaN it would hide all that is.
        self.cost_usd += sum(cost for cost in costs if is_number(cost) and cost > 0)

    @property
    def retries(self) -> int:
        """How many tries were made again."""
        return sum(self.tries.values()) - len(self.tries)

    def exceeded(self) -> str | None:
        """Return which cap is reached, in words."""
        caps, ended = self.caps, len(self.ended)
        if caps.cost_usd is not None and self.cost_usd > caps.cost_usd:
            return f"cost: {self.cost_usd:.2f} of {caps.cost_usd:.2f} USD"
        spent = time.monotonic() - self.started
        if caps.wall_s is not None and spent > caps.wall_s:
            return f"time: {spent:.0f} of {caps.wall_s:.0f} s"
        failed = sum(exception_of(one) is not None for one in self.ended.values())
        if (
            caps.failure_rate is not None
            and ended >= max(caps.failures_from, 1)
            and failed / ended > caps.failure_rate
        ):
            return f"failures: {failed} of {ended} trials, more than {caps.failure_rate:.0%}"
        if caps.disk_bytes is not None:
            used = _size(self.directory)
            if used > caps.disk_bytes:
                return f"disk: {used} of {caps.disk_bytes} bytes"
        return None


def _size(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.lstat().st_size
    return total


async def run_harbor_job(config: Any, caps: Caps | None = None) -> JobOutcome:
    """Run a job with the Harbor that is installed here.

    Args:
        config: Harbor's JobConfig.
    Raises:
        CapabilityError: Harbor is not installed.
    """
    try:
        jobs = import_module("harbor.job")
    except ImportError as error:
        raise CapabilityError(
            "Harbor is not installed here (pip install harbor, Python 3.12 or later); "
            "or give the adapter a run_job"
        ) from error
    watch = Watch(caps or Caps(), Path(config.jobs_dir) / config.job_name)

    async def ended(event: Any) -> None:
        if event.result is not None:
            watch.add(event.result)

    job = await jobs.Job.create(config)
    job.on_trial_ended(ended)
    running = asyncio.create_task(job.run())
    stopped = None
    try:
        while not running.done() and stopped is None:
            await asyncio.wait({running}, timeout=WATCH_S)
            stopped = None if running.done() else await asyncio.to_thread(watch.exceeded)
    finally:
        if not running.done():
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
    if stopped is not None:
        return JobOutcome(len(job), list(watch.ended.values()), watch.retries, stopped)
    result = running.result()
    return JobOutcome(result.n_total_trials, list(result.trial_results), result.stats.n_retries)
