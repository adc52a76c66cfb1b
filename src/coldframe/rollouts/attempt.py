"""One attempt at one sample of a task: image, sandbox, agent, verifier, trajectory.

Ends in a verdict or in a failure with a side, never in both and never in an exception, except
when the attempt itself is cancelled; then its sandbox is deleted first.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from coldframe.harnesses import load_harness
from coldframe.harnesses.base import Episode, Harness, Limits, ModelSettings, Outcome, Solution
from coldframe.protocol.errors import (
    CapabilityError,
    ColdframeError,
    FileError,
    RunError,
    SandboxStateError,
    VerifierDeadlineError,
)
from coldframe.protocol.models import MIB, Fingerprint
from coldframe.rollouts import record
from coldframe.rollouts.attribution import Phase, failure_of
from coldframe.rollouts.environment import ImageBuilder
from coldframe.rollouts.task import Task
from coldframe.rollouts.verifier import Verifier
from coldframe.trajectories.recorder import Recorder
from coldframe.trajectories.redaction import Redactor, secret_values
from coldframe.trajectories.schema import (
    Failure,
    ImageIdentity,
    Termination,
    Trajectory,
)
from coldframe.trajectories.store import BlobStore

if TYPE_CHECKING:
    from coldframe.client import AsyncSandbox, AsyncSandboxClient

LEASE_SLACK_S = 900.0
"""Beyond the agent's and the verifier's time: a lease must never end a running attempt."""
DELETE_S = 120.0
FINGERPRINT_S = 60.0
GRADING_SLACK_S = 300.0
"""For all of grading beside test.sh: an agent may leave a million files where the tests belong."""
LEFT_PLACES = ("/logs/agent", "/logs/artifacts")


@dataclass(frozen=True)
class AttemptSettings:
    """What all attempts of a run have in common."""

    run_id: str
    harness: str
    limits: Limits = field(default_factory=Limits)
    model: ModelSettings | None = None
    seed: int | None = None
    """Sample k is sampled with seed + k, when the endpoint takes a seed."""
    wrong: str | None = None
    """Run this wrong solution in place of the reference."""


@dataclass
class _Clock:
    """Where the time goes; phases may not overlap."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def measure(self, name: str) -> Any:
        begun = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - begun


class Attempt:
    """Runs once; see `run`."""

    def __init__(
        self,
        client: AsyncSandboxClient,
        images: ImageBuilder,
        blobs: BlobStore,
        task: Task,
        settings: AttemptSettings,
        *,
        sample: int,
        attempt: int,
        queue_s: float = 0.0,
        expected_image: str | None = None,
    ) -> None:
        self.client, self.images, self.task, self.settings = client, images, task, settings
        self.step = task.steps[0]
        self.sample, self.number, self.queue_s = sample, attempt, queue_s
        self.expected_image = expected_image
        self.redactor = Redactor(_secrets(task, settings))
        self.recorder = Recorder(blobs, self.redactor)
        self.harness: Harness = load_harness(settings.harness)
        self.phase = Phase.IMAGE
        self.clock = _Clock()
        self.trace_id = secrets.token_hex(16)
        self.sandbox: AsyncSandbox | None = None
        self.image: ImageIdentity | None = None
        self.runtime: str | None = None
        self.details: dict[str, Any] = {}
        self.node: str | None = None
        self.initial: Fingerprint | None = None
        self.final: Fingerprint | None = None
        self.verifier: Verifier | None = None
        self.outcome = Outcome(Termination.FAILED)
        self.rewards: dict[str, float] | None = None
        self.failure: Failure | None = None
        self.running: set[str] = set()
        self.warnings: list[str] = []
        self.unknown: dict[str, str] = {}

    async def run(self) -> Trajectory:
        """Return the trajectory; raises only CancelledError, after the sandbox is deleted."""
        started_at = time.time()
        try:
            await self._phases()
        except Exception as error:  # noqa: BLE001 - one attempt's crash is that attempt's failure
            self.failure = failure_of(error, self.phase, self.redactor, self._evidence())
        self.recorder.close()
        return record.trajectory(self, started_at)

    async def _phases(self) -> None:
        with self.clock.measure("image"):
            built = await self.images.image(self.task)
        with self.clock.measure("total"):
            async with self._sandbox(built.name) as sandbox:
                self.phase = Phase.SETUP
                await self._set_up(sandbox)
                self.phase = Phase.AGENT
                self.outcome = await self._act(sandbox)
                self.recorder.close()
                with self.clock.measure("verify"):
                    await self._grade(sandbox)

    @contextlib.asynccontextmanager
    async def _sandbox(self, image: str) -> AsyncIterator[AsyncSandbox]:
        self.phase = Phase.CREATE
        with self.clock.measure("create"):
            sandbox = await self._create(image)
        try:
            yield sandbox
        except ColdframeError:
            await self._note_end(sandbox)
            raise
        finally:
            with self.clock.measure("delete"):
                await self._delete(sandbox)

    async def _create(self, image: str) -> AsyncSandbox:
        task, spec = self.task, self.task.environment
        labels = {
            "coldframe.run": self.settings.run_id,
            "coldframe.task": task.key,
            "coldframe.sample": str(self.sample),
            "coldframe.attempt": str(self.number),
        }
        limits: dict[str, Any] = {}
        if spec.cpus is not None:
            limits["cpu"] = spec.cpus
        if spec.memory_mb is not None:
            limits["memory_bytes"] = spec.memory_mb * MIB
        if spec.storage_mb is not None:
            limits["disk_bytes"] = spec.storage_mb * MIB
        sandbox = await self.client.create_sandbox(
            image,
            env=dict(spec.env) or None,
            workdir=spec.workdir,
            labels=labels,
            ttl_s=self.agent_s() + self.step.verifier.timeout_s + LEASE_SLACK_S,
            **limits,
        )
        self.sandbox = sandbox
        return sandbox

    def agent_s(self) -> float:
        """Return the agent's time: the smaller of the task's and the caller's."""
        return min(self.settings.limits.wall_s, self.step.agent.timeout_s or float("inf"))

    async def _set_up(self, sandbox: AsyncSandbox) -> None:
        """Note what the sandbox is, and make the places that a task may expect."""
        info = sandbox.info
        self.image = ImageIdentity(
            name=info.spec.image, digest=info.image_digest, layers=info.layer_digests
        )
        self.runtime, self.node = info.runtime, info.node_id
        self.details = (await self.client.capabilities()).details
        if self.expected_image not in {None, info.image_digest}:
            raise RunError(
                f"image {info.spec.image!r} is {info.image_digest}, but the run began with "
                f"{self.expected_image}"
            )
        for place in LEFT_PLACES:
            await sandbox.files.mkdir(place, mode=0o777, owner=(0, 0))
        self.initial = await self._fingerprint(sandbox, "identity.initial_state")

    async def _act(self, sandbox: AsyncSandbox) -> Outcome:
        """Run the harness until it is done or its time is over."""
        limit = self.agent_s()
        episode = Episode(
            sandbox=sandbox,
            instruction=self.step.instruction,
            limits=self.settings.limits,
            recorder=self.recorder,
            deadline=time.monotonic() + limit,
            model=self.settings.model if self.harness.needs_model else None,
            solution=self._solution() if self.harness.needs_solution else None,
            user=self.step.agent.user,
            offers=self.task.offers,
            seed=None if self.settings.seed is None else self.settings.seed + self.sample,
            running=self.running,
        )
        timer = asyncio.timeout(limit)
        try:
            async with timer:
                return await self.harness.run(episode)
        except TimeoutError:
            if not timer.expired():
                raise
        return Outcome(Termination.AGENT_DEADLINE, f"the agent's {limit:g} s were over")

    async def _grade(self, sandbox: AsyncSandbox) -> None:
        """End the agent, note the final state, and get the verdict."""
        self.phase = Phase.HANDOVER
        self.verifier = Verifier(sandbox, self.task, self.recorder)
        limit = self.step.verifier.timeout_s + GRADING_SLACK_S
        timer = asyncio.timeout(limit)
        try:
            async with timer:
                await self.verifier.end_agent(self.running)
                self.final = await self._fingerprint(sandbox, "final_state")
                self.phase = Phase.VERIFY
                self.rewards = await self.verifier.grade()
        except TimeoutError:
            if not timer.expired():
                raise
            raise VerifierDeadlineError(
                f"killing, uploading and grading took over {limit:g} s"
            ) from None

    def _solution(self) -> Solution | None:
        directory = self.task.solution(self.step, self.settings.wrong)
        return None if directory is None else Solution(directory, dict(self.task.solution_env))

    async def _fingerprint(self, sandbox: AsyncSandbox, field_name: str) -> Fingerprint | None:
        """Return the state, or note why it is not known.

        An agent must not escape its grade by leaving files that take for ever to read.
        """
        try:
            async with asyncio.timeout(FINGERPRINT_S):
                return await sandbox.fingerprint()
        except (CapabilityError, SandboxStateError, FileError) as error:
            self.unknown[field_name] = str(error)
        except TimeoutError:
            self.unknown[field_name] = f"not taken within {FINGERPRINT_S:g} s"
        return None

    async def _note_end(self, sandbox: AsyncSandbox) -> None:
        """Learn why a sandbox is gone while its node still remembers."""
        try:
            await sandbox.refresh()
        except ColdframeError as error:
            self.unknown["failure.evidence.sandbox_reason"] = str(error)

    async def _delete(self, sandbox: AsyncSandbox) -> None:
        """Delete within a bound; a verdict stands even if this fails, and says so."""
        deletion = asyncio.ensure_future(sandbox.delete())
        try:
            async with asyncio.timeout(DELETE_S):
                await asyncio.shield(deletion)
        except TimeoutError:
            self.warnings.append(f"sandbox {sandbox.id} was not deleted within {DELETE_S:g} s")
        except ColdframeError as error:
            self.warnings.append(f"sandbox {sandbox.id} was not deleted: {error}")

    def _evidence(self) -> dict[str, Any]:
        evidence: dict[str, Any] = {}
        if self.sandbox is not None:
            evidence["sandbox_id"] = self.sandbox.id
            evidence["sandbox_state"] = self.sandbox.info.state.value
            evidence["sandbox_reason"] = self.sandbox.info.reason
        return evidence


def _secrets(task: Task, settings: AttemptSettings) -> set[str]:
    known = set(task.secrets)
    verifiers = (step.verifier.env for step in task.steps)
    for env in (task.environment.env, task.solution_env, *verifiers):
        known |= secret_values(env)
    if settings.model is not None and settings.model.api_key:
        known.add(settings.model.api_key)
    return known
