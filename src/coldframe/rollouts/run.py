"""Run a batch: tasks × samples, so many at a time, into a run directory.

A refused task and a failed attempt stop nobody else. Retries are new attempts of the same
sample, only for the platform's passing faults. Interrupted, it deletes its sandboxes and keeps
every result; run again, it makes only what has none.
"""

from __future__ import annotations

import asyncio
import errno
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from coldframe.harnesses import load_harness
from coldframe.protocol import PROTOCOL_VERSION
from coldframe.protocol.errors import RunError
from coldframe.rollouts import verifier as grading
from coldframe.rollouts.attempt import Attempt
from coldframe.rollouts.attempt_settings import AttemptSettings
from coldframe.rollouts.attribution import Phase, may_retry
from coldframe.rollouts.capture import ModelCapture
from coldframe.rollouts.config import RunConfig
from coldframe.rollouts.directory import LOCK_SCHEMA, AttemptKey, RunDirectory
from coldframe.rollouts.environment import AGENT_IMAGE, ImageBuilder, verifier_image
from coldframe.rollouts.load import load_batch
from coldframe.rollouts.phases import first_policy
from coldframe.rollouts.progress import Progress, Silent, telling
from coldframe.rollouts.record import package_version
from coldframe.rollouts.summary import summarise
from coldframe.rollouts.task import Task
from coldframe.trajectories.schema import SCHEMA_VERSION, Trajectory

if TYPE_CHECKING:
    from coldframe.client import AsyncSandboxClient


@dataclass(frozen=True)
class RunResult:
    """How a batch went."""

    run_id: str
    summary: dict[str, Any]
    trajectories: dict[AttemptKey, Trajectory]
    """Without their steps: those of a large batch fit no memory, and lie in the directory."""

    @property
    def all_verdicts(self) -> bool:
        """Whether every attempt ended in a verdict, no task was refused and none is missing."""
        totals = self.summary["totals"]
        return bool(self.summary["complete"]) and totals["failed_attempts"] == 0


_FULL = frozenset((errno.ENOSPC, errno.EDQUOT))


class Batch:
    """One run of one configuration; see the module."""

    def __init__(
        self,
        client: AsyncSandboxClient,
        config: RunConfig,
        directory: RunDirectory,
        *,
        host_env: Mapping[str, str] | None = None,
        progress: Progress | None = None,
        capture: ModelCapture | None = None,
    ) -> None:
        self.capture = capture
        self.client, self.config, self.directory = client, config, directory
        self.progress: Progress = progress or Silent()
        self.loaded = load_batch(config.tasks, host_env or {}, load_harness(config.harness))
        self.refused = dict(self.loaded.refused)
        """By directory, why a task is not run; grows when its image cannot be built."""
        self.images = ImageBuilder(client, heard=self.progress.note)
        self.results: dict[AttemptKey, Trajectory] = {}
        self.lock: dict[str, Any] = {}
        self.run_id = f"run-{secrets.token_hex(6)}"

    async def run(self) -> RunResult:
        """Make every result that is missing, and write the summary.

        Raises:
            RunError: the directory belongs to another configuration or process.
            asyncio.CancelledError: interrupted; sandboxes are deleted, results are kept.
        """
        try:
            return await self._run()
        except OSError as error:
            place = error.filename or self.directory.root
            remedy = "; make room there, and run it again to go on" if error.errno in _FULL else ""
            raise RunError(f"{place}: {error.strerror or error}{remedy}") from error

    async def _run(self) -> RunResult:
        with self.directory.held():
            self.run_id = self.directory.begin(self.run_id, self.config.asked())
            self.lock = self.directory.lock(self._lock())
            self.directory.sweep()
            found = await asyncio.to_thread(self.directory.results)
            self.results = {key: _without_steps(one) for key, one in found.items()}
            for why in self.refused.values():
                self.progress.note(f"refused: {why}")
            await self._refuse_unenforceable()
            interrupted = True
            try:
                await self._work()
                interrupted = False
            finally:
                await self.images.close()
                summary = self._summary(interrupted)
                self.directory.write_summary(summary)
        return RunResult(self.run_id, summary, self.results)

    def _lock(self) -> dict[str, Any]:
        harness = load_harness(self.config.harness)
        return {
            "schema_version": LOCK_SCHEMA,
            "tasks": {
                task.key: {"digest": task.digest, "tests_digest": task.tests_digest}
                for task in self.loaded.tasks
            },
            "images": {},
            "harness": {"name": harness.name, "version": harness.version},
            "verifier": {"version": grading.VERSION},
            "versions": {
                "coldframe": package_version(),
                "protocol": PROTOCOL_VERSION,
                "trajectory": SCHEMA_VERSION,
            },
        }

    def _refuse(self, task: Task, why: str) -> None:
        if str(task.directory) not in self.refused:
            self.refused[str(task.directory)] = why
            self.progress.note(f"refused: {why}")

    def _tasks(self) -> list[Task]:
        """Return the tasks that are not refused."""
        return [task for task in self.loaded.tasks if str(task.directory) not in self.refused]

    async def _refuse_unenforceable(self) -> None:
        """Refuse each task that has a network policy, where none can be enforced."""
        capabilities = await self.client.capabilities()
        if capabilities.egress:
            return
        why = capabilities.details.get("network") or f"runtime {capabilities.runtime!r} has none"
        for task in self.loaded.tasks:
            wanted = first_policy(task)
            if wanted is not None:
                self._refuse(
                    task,
                    f"{task.directory / 'task.toml'}: {wanted}, and network policies cannot be "
                    f"enforced here: {why}",
                )

    async def _work(self) -> None:
        wanted = [(task, sample) for task in self._tasks() for sample in range(self.config.samples)]
        open_samples = [one for one in wanted if self._next_attempt(*one) is not None]
        done = len(wanted) - len(open_samples)
        self.progress.begun(len({task.key for task, _ in wanted}), len(wanted), done)
        begun = time.monotonic()
        queue: Iterator[tuple[Task, int]] = iter(open_samples)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self.config.concurrency, len(open_samples))):
                    group.create_task(self._worker(queue, begun))
        except BaseExceptionGroup as group_error:
            # A worker fails only when results can no longer be kept; one reason is enough.
            raise group_error.exceptions[0] from None

    def _next_attempt(self, task: Task, sample: int) -> int | None:
        """Return the number of the attempt that the sample still needs, if it needs one."""
        if str(task.directory) in self.refused:
            return None
        number = 0
        while (known := self.results.get(AttemptKey(task.key, sample, number))) is not None:
            number += 1
            if known.failure is None or not may_retry(known.failure):
                return None
        return number if number < self.config.attempts else None

    async def _worker(self, queue: Iterator[tuple[Task, int]], begun: float) -> None:
        for task, sample in queue:
            queue_s = time.monotonic() - begun
            while (number := self._next_attempt(task, sample)) is not None:
                await self._attempt(AttemptKey(task.key, sample, number), task, queue_s)
                queue_s = 0.0

    async def _attempt(self, key: AttemptKey, task: Task, queue_s: float) -> None:
        self.directory.clear(key)
        self.progress.attempt_begun(key)
        settings = AttemptSettings(
            run_id=self.run_id,
            harness=self.config.harness,
            limits=self.config.limits,
            model=self.config.model,
            seed=self.config.seed,
        )
        capture, on_step = self.capture, None
        if capture is not None and settings.model is not None:
            name = str(key)
            endpoint = capture.begin(name, self.directory.calls(key), settings.model)
            settings = replace(settings, endpoint=endpoint)
            on_step = partial(capture.begin_step, name)
        attempt = Attempt(
            self.client,
            self.images,
            self.directory.blobs,
            task,
            settings,
            sample=key.sample,
            attempt=key.attempt,
            queue_s=queue_s,
            expected_images=self.lock["images"].get(task.key, {}),
            artifacts=self.directory.artifacts(key),
            on_step=on_step,
        )
        doubts: list[str] = []
        try:
            with telling(lambda: attempt.standing, partial(self.progress.attempt_goes_on, key)):
                trajectory = await attempt.run()
        finally:
            if capture is not None and on_step is not None:
                doubts = capture.end(str(key))
        if doubts:
            warnings = (*trajectory.warnings, *doubts)
            trajectory = trajectory.model_copy(update={"warnings": warnings})
        failure = trajectory.failure
        if failure is not None and failure.phase == Phase.IMAGE and not failure.retryable:
            # Nothing was begun, and every sample would end so: it is the task that is refused.
            self._refuse(task, failure.message)
            self.progress.attempt_refused(key)
            return
        self._lock_image(task, trajectory)
        await asyncio.to_thread(self.directory.save, key, trajectory)
        self.results[key] = _without_steps(trajectory)
        last = self._next_attempt(task, key.sample) is None
        self.progress.attempt_ended(key, trajectory, last=last)

    def _lock_image(self, task: Task, trajectory: Trajectory) -> None:
        known = self.lock["images"].setdefault(task.key, {})
        found = {**_images(trajectory), **known}
        if found != known:
            self.lock["images"][task.key] = found
            self.directory.write_lock(self.lock)

    def _summary(self, interrupted: bool) -> dict[str, Any]:
        thresholds = {task.key: task.pass_threshold for task in self._tasks()}
        mine = [one for key, one in self.results.items() if key.task in thresholds]
        return summarise(
            self.run_id,
            mine,
            samples=self.config.samples,
            thresholds=thresholds,
            refused=self.refused,
            interrupted=interrupted,
        )


def _images(trajectory: Trajectory) -> dict[str, str]:
    """Return the digests of the images that an attempt ran on: its own, and each verifier's."""
    found = {}
    if trajectory.identity.image is not None:
        found[AGENT_IMAGE] = trajectory.identity.image.digest
    steps = [
        ("", trajectory.verification),
        *((s.name, s.verification) for s in trajectory.task_steps),
    ]
    for name, graded in steps:
        if graded is not None and graded.mode == "separate" and graded.image is not None:
            found[verifier_image(name)] = graded.image
    return found


def _without_steps(trajectory: Trajectory) -> Trajectory:
    return trajectory.model_copy(update={"steps": ()})
