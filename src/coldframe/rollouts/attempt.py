"""One attempt at one sample of a task: image, sandbox, agent, verifier, trajectory.

Ends in a verdict or in a failure with a side, never in both and never in an exception, except
when the attempt itself is cancelled; then its sandboxes are deleted first.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from coldframe.harnesses import load_harness
from coldframe.harnesses.base import Harness, Outcome
from coldframe.protocol import tracing
from coldframe.protocol.errors import (
    CapabilityError,
    ColdframeError,
    FileError,
    RunError,
    SandboxStateError,
    TaskError,
)
from coldframe.protocol.models import MIB, Fingerprint
from coldframe.protocol.network import NetworkPolicy
from coldframe.rollouts import integrity, record
from coldframe.rollouts.attempt_settings import AttemptSettings
from coldframe.rollouts.attribution import Phase, failure_of
from coldframe.rollouts.boot import BOOT_S, Booted, boot, boot_s, boot_time
from coldframe.rollouts.environment import AGENT_IMAGE, ImageBuilder
from coldframe.rollouts.phases import PhaseLog
from coldframe.rollouts.stage import Stage, grading_s
from coldframe.rollouts.step_files import SETUP_S
from coldframe.rollouts.step_rewards import total_rewards, why_stop
from coldframe.rollouts.task import EnvironmentSpec, Task, TaskStep
from coldframe.rollouts.users import Accounts, accounts_of
from coldframe.trajectories.identity import ImageIdentity
from coldframe.trajectories.recorder import Recorder, plain_text
from coldframe.trajectories.redaction import Redactor
from coldframe.trajectories.schema import Failure, Termination, Trajectory
from coldframe.trajectories.store import BlobStore

if TYPE_CHECKING:
    from coldframe.client import AsyncSandbox, AsyncSandboxClient

LEASE_SLACK_S = 900.0
"""Beyond the time of every phase: a lease must never end a running attempt."""
DELETE_S = 120.0
FINGERPRINT_S = 60.0
LEFT_PLACES = ("/logs/agent", "/logs/artifacts")


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
        expected_images: Mapping[str, str] = MappingProxyType({}),
        artifacts: Path | None = None,
        on_step: Callable[[str], None] | None = None,
    ) -> None:
        self.client, self.images, self.task, self.settings = client, images, task, settings
        self.sample, self.number, self.queue_s = sample, attempt, queue_s
        self.expected_images = expected_images
        self.artifacts = artifacts
        self.on_step = on_step
        self.redactor = Redactor(settings.secrets(task))
        self.blobs = blobs
        self.recorder = Recorder(blobs, self.redactor)
        self.harness: Harness = load_harness(settings.harness)
        self.phase = Phase.IMAGE
        self.phases = PhaseLog(self.recorder)
        self.stages: list[Stage] = []
        self.clock = _Clock()
        self.trace_id = tracing.new_trace_id()
        self.sandbox: AsyncSandbox | None = None
        self.grader: AsyncSandbox | None = None
        """The separate sandbox that grades, while it does."""
        self.image: ImageIdentity | None = None
        self.runtime: str | None = None
        self.details: dict[str, Any] = {}
        self.node: str | None = None
        self.initial: Fingerprint | None = None
        self.final: Fingerprint | None = None
        self.booted = Booted()
        self.programs: dict[str, str] = {}
        self.accounts = Accounts()
        """Who is who before any agent acts."""
        self.rewards: dict[str, float] | None = None
        self.failure: Failure | None = None
        self.warnings: list[str] = []
        self.unknown: dict[str, str] = {}

    @property
    def outcome(self) -> Outcome:
        """How the agent's time ended, in the last step that was begun."""
        return self.stages[-1].outcome if self.stages else Outcome(Termination.FAILED)

    @property
    def standing(self) -> str:
        """Where it stands, in words."""
        name = self.stages[-1].step.name if self.stages else None
        phase = self.phase.value.replace("_", " ")
        return phase if name is None else f"{phase}, step {name}"

    async def run(self) -> Trajectory:
        """Return the trajectory; raises only CancelledError, after the sandboxes are deleted."""
        started_at = time.time()
        try:
            with tracing.traced(self.trace_id):
                await self._run()
        except Exception as error:  # noqa: BLE001 - one attempt's crash is that attempt's failure
            self.failure = failure_of(error, self.phase, self.redactor, self._evidence())
            if self.stages:
                self.stages[-1].failure = self.failure
        self.recorder.close()
        return record.trajectory(self, started_at)

    async def _run(self) -> None:
        task = self.task
        image = await self._images()
        with self.clock.measure("total"):
            async with self._sandbox(image) as sandbox:
                self.phase = Phase.SETUP
                await self.phases.begin(
                    "start", sandbox, user=None, network=task.environment.network
                )
                async with boot_time(boot_s(task.environment.healthcheck)):
                    await self._set_up(sandbox)
                await self.phases.end()
                for number, step in enumerate(task.steps, start=1):
                    stage = Stage(self, sandbox, step, last=number == len(task.steps))
                    self.stages.append(stage)
                    await stage.run()
                    if not stage.last and why_stop(step.min_reward, stage.rewards):
                        stage.stopped = True
                        break
        verdicts = [stage.rewards for stage in self.stages]
        self.rewards = (
            total_rewards(task.reward_strategy, verdicts) if task.multi_step else verdicts[0]
        )

    async def _images(self) -> str:
        """Find or build every image that the task needs: a broken one must not cost a rollout."""
        started_at = time.time()
        with self.clock.measure("image"):
            built = await self.images.image(self.task)
            for step in self.task.steps:
                if step.verifier.environment is not None:
                    await self.images.image(self.task, step.verifier.environment)
        if built.built:
            self.phases.built(network=built.network, started_at=started_at)
        return built.name

    @contextlib.asynccontextmanager
    async def _sandbox(self, image: str) -> AsyncIterator[AsyncSandbox]:
        self.phase = Phase.CREATE
        spec = self.task.environment
        with self.clock.measure("create"):
            sandbox = await self._create(image, spec, self._lease_s(), spec.network)
        self.sandbox = sandbox
        try:
            yield sandbox
        except ColdframeError:
            await self._note_end(sandbox)
            raise
        finally:
            await self.phases.end()
            with self.clock.measure("delete"):
                await self._delete(sandbox)

    @contextlib.asynccontextmanager
    async def fresh_sandbox(
        self, spec: EnvironmentSpec, ttl_s: float, network: NetworkPolicy
    ) -> AsyncIterator[AsyncSandbox]:
        """Make a sandbox that the agent has never seen, and delete it afterwards."""
        built = await self.images.image(self.task, spec)
        sandbox = self.grader = await self._create(built.name, spec, ttl_s, network)
        try:
            yield sandbox
        except ColdframeError:
            await self._note_end(sandbox)
            raise
        finally:
            await self._delete(sandbox)
        self.grader = None

    async def _create(
        self, image: str, spec: EnvironmentSpec, ttl_s: float, network: NetworkPolicy
    ) -> AsyncSandbox:
        labels = {
            "coldframe.run": self.settings.run_id,
            "coldframe.task": self.task.key,
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
        async with boot_time(BOOT_S):
            return await self.client.create_sandbox(
                image,
                env=dict(spec.env) or None,
                workdir=spec.workdir,
                labels=labels,
                ttl_s=ttl_s,
                network=network,
                **limits,
            )

    def _lease_s(self) -> float:
        """Return what all phases may take together."""
        seconds = LEASE_SLACK_S + boot_s(self.task.environment.healthcheck)
        for step in self.task.steps:
            seconds += self.agent_s(step) + grading_s(step.verifier)
            seconds += SETUP_S + boot_s(step.healthcheck)
        return seconds

    def agent_s(self, step: TaskStep) -> float:
        """Return the agent's time in a step: the smaller of the task's and the caller's."""
        return min(self.settings.limits.wall_s, step.agent.timeout_s or float("inf"))

    async def _set_up(self, sandbox: AsyncSandbox) -> None:
        """Note what the sandbox is, and make the places that a task may expect."""
        info = sandbox.info
        self.image = ImageIdentity(
            name=info.spec.image, digest=info.image_digest, layers=info.layer_digests
        )
        self.runtime, self.node = info.runtime, info.node_id
        self.details = (await self.client.capabilities()).details
        self.expect_image(AGENT_IMAGE, sandbox)
        for place in LEFT_PLACES:
            await sandbox.files.mkdir(place, mode=0o777, owner=(0, 0))
        self.booted = await boot(
            sandbox, self.task.environment.healthcheck, start_cmd=self.task.start_cmd
        )
        skills = self.task.offers.skills_dir
        if skills is not None and not await sandbox.files.exists(skills):
            raise TaskError(
                f"{self.task.directory / 'task.toml'}: [environment] skills_dir = {skills!r} "
                "is not in the image"
            )
        if not all(step.verifier.separate for step in self.task.steps):
            self.programs = await integrity.programs(sandbox)
        self.accounts = await accounts_of(sandbox)
        self.initial = await self._fingerprint(sandbox, "identity.initial_state")

    def expect_image(self, role: str, sandbox: AsyncSandbox) -> None:
        """Hold a sandbox's image to the one that the run began with.

        Raises:
            RunError: its name stands for another one now.
        """
        info = sandbox.info
        expected = self.expected_images.get(role, info.image_digest)
        if expected != info.image_digest:
            raise RunError(
                f"image {info.spec.image!r} of the {role} is {info.image_digest}, but the run "
                f"began with {expected}"
            )

    async def note_final_state(self, sandbox: AsyncSandbox) -> None:
        """Take the fingerprint of what the agent left."""
        self.final = await self._fingerprint(sandbox, "final_state")

    async def _fingerprint(self, sandbox: AsyncSandbox, field_name: str) -> Fingerprint | None:
        """Return the state, or note why it is not known.

        An agent must not escape its grade by leaving files that take for ever to read.
        """
        try:
            async with asyncio.timeout(FINGERPRINT_S):
                return await sandbox.fingerprint()
        except (CapabilityError, SandboxStateError, FileError) as error:
            self.unknown[field_name] = self.clean(str(error))
        except TimeoutError:
            self.unknown[field_name] = f"not taken within {FINGERPRINT_S:g} s"
        return None

    async def _note_end(self, sandbox: AsyncSandbox) -> None:
        """Learn why a sandbox is gone while its node still remembers."""
        try:
            await sandbox.refresh()
        except ColdframeError as error:
            self.unknown["failure.evidence.sandbox_reason"] = self.clean(str(error))

    async def _delete(self, sandbox: AsyncSandbox) -> None:
        """Delete within a bound; a verdict stands even if this fails, and says so."""
        deletion = asyncio.ensure_future(sandbox.delete())
        try:
            async with asyncio.timeout(DELETE_S):
                await asyncio.shield(deletion)
        except TimeoutError:
            self.warnings.append(f"sandbox {sandbox.id} was not deleted within {DELETE_S:g} s")
        except ColdframeError as error:
            self.warnings.append(self.clean(f"sandbox {sandbox.id} was not deleted: {error}"))

    def clean(self, said: str) -> str:
        """Return what somebody else has said as the record may hold it."""
        return self.redactor.text(plain_text(said))

    def _evidence(self) -> dict[str, Any]:
        evidence: dict[str, Any] = {}
        sandbox = self.grader or self.sandbox
        if sandbox is not None:
            evidence["sandbox_id"] = sandbox.id
            evidence["sandbox_state"] = sandbox.info.state.value
            evidence["sandbox_reason"] = sandbox.info.reason
        return evidence
