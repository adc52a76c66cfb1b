"""One step of a task: set up, the agent acts, what it left is graded. Most tasks have one.

What fails is raised; what is known up to then stays in the stage.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from coldframe.harnesses import load_harness
from coldframe.harnesses.base import Episode, Outcome, Solution
from coldframe.harnesses.file_log import FileLog
from coldframe.protocol.errors import (
    Execution,
    FileError,
    RewardInvalidError,
    RewardMissingError,
    VerifierDeadlineError,
)
from coldframe.protocol.models import ProcessInfo
from coldframe.protocol.network import NetworkPolicy
from coldframe.rollouts import integrity, untouched
from coldframe.rollouts.attribution import Phase
from coldframe.rollouts.boot import BOOT_S, boot, boot_s, boot_time
from coldframe.rollouts.carry import Cargo
from coldframe.rollouts.collect import collect
from coldframe.rollouts.environment import verifier_image
from coldframe.rollouts.healthcheck import wait_healthy
from coldframe.rollouts.integrity import Tampering
from coldframe.rollouts.phases import kill_what_must_not_live_on
from coldframe.rollouts.places import PLACES
from coldframe.rollouts.runner import Runner
from coldframe.rollouts.step_files import StepSetupError, bring_files
from coldframe.rollouts.task import TaskStep, VerifierSpec
from coldframe.rollouts.users import Account, accounts_of, user_ids
from coldframe.rollouts.verifier import Verifier, VerifierNotExecutedError
from coldframe.trajectories.base import BlobRef
from coldframe.trajectories.schema import Failure, Termination
from coldframe.trajectories.verification import Collected, Verification

if TYPE_CHECKING:
    from coldframe.client import AsyncSandbox
    from coldframe.rollouts.attempt import Attempt

GRADING_SLACK_S = 300.0
"""For all of grading beside test.sh: an agent may leave a million files where the tests belong."""
EMPTY = NetworkPolicy()
_PERHAPS_BROKEN = (
    *(RewardMissingError, RewardInvalidError),
    *(VerifierDeadlineError, VerifierNotExecutedError),
)
"""What comes of it if something is missing that the tests rest on."""


def grading_s(spec: VerifierSpec) -> float:
    """Return the longest that all of grading may take."""
    seconds = 2 * spec.timeout_s + sum(hook.timeout_s for hook in spec.collect) + GRADING_SLACK_S
    if spec.environment is None:
        return seconds + untouched.control_s(spec)
    return seconds + BOOT_S + boot_s(spec.environment.healthcheck)


@dataclass(frozen=True)
class _Place:
    """A sandbox that grades."""

    sandbox: AsyncSandbox
    entry_point: str | None
    """The operation that runs there and is not the agent's."""
    account: Account | None
    """Who the verifier's user is, before anything of the agent's was there."""


@dataclass
class Stage:
    """Runs one step of an attempt; `record` knows how far it came."""

    attempt: Attempt
    sandbox: AsyncSandbox
    step: TaskStep
    last: bool
    outcome: Outcome = field(default_factory=lambda: Outcome(Termination.FAILED))
    rewards: dict[str, float] | None = None
    failure: Failure | None = None
    stopped: bool = False
    prompt: tuple[BlobRef, ...] = ()
    first_step: int = 0
    end_step: int = 0
    verify_s: float = 0.0
    tampering: Tampering = field(default_factory=lambda: Tampering(None))
    _verifier: Verifier | None = None
    _running: set[str] = field(default_factory=set)
    _files: FileLog | None = None
    _collected: list[Collected] = field(default_factory=list)
    _survivors: tuple[ProcessInfo, ...] = ()

    def __post_init__(self) -> None:
        self.tampering.step = self.step.name
        self.first_step = self.end_step = len(self.attempt.recorder.steps)

    @property
    def verification(self) -> Verification | None:
        """What the verifier did so far; None: there was none yet."""
        return None if self._verifier is None else self._verifier.record()

    @property
    def runner(self) -> Runner:
        """Who sets the step up: the agent's user, as it was at the start."""
        user = self.step.agent.user
        return Runner(self.sandbox, user, self.attempt.accounts.get(user), self.tampering)

    async def run(self) -> None:
        """Go through the step's phases.

        Raises:
            ColdframeError: it has no verdict; `attempt.phase` says where it stood.
        """
        await self._set_up()
        self.attempt.phase = Phase.AGENT
        agent = self.step.agent
        await self.attempt.phases.begin(
            "agent", self.sandbox, user=agent.user, network=agent.network, step=self.step.name
        )
        try:
            self.outcome = await self._act()
        finally:
            self.attempt.recorder.close()
            self.prompt = tuple(self.attempt.recorder.prompt)
            self.end_step = len(self.attempt.recorder.steps)
        begun = time.monotonic()
        try:
            with self.attempt.clock.measure("verify"):
                await self._grade()
        finally:
            self.verify_s = time.monotonic() - begun

    async def _set_up(self) -> None:
        """Bring the step's files and run its setup.sh, as the agent's user."""
        step, sandbox = self.step, self.sandbox
        if step.workdir is None and step.healthcheck is None:
            return
        first = len(self.attempt.stages) == 1
        self.attempt.phase = Phase.SETUP if first else Phase.STEP_SETUP
        # Once an agent has acted, what runs here may be its doing, and reaches no more than it.
        network = self.attempt.task.environment.network if first else step.agent.network
        await self.attempt.phases.begin(
            "start",
            sandbox,
            user=step.agent.user,
            network=network,
            step=step.name,
        )
        try:
            await bring_files(self.runner, step, self.attempt.redactor)
        except (StepSetupError, FileError) as error:
            if not first:
                await untouched.require_set_up(error, self)
            raise
        if step.healthcheck is not None:
            await wait_healthy(sandbox, step.healthcheck, user=step.agent.user)
        await self.attempt.phases.end()

    async def _act(self) -> Outcome:
        """Run the harness until it is done or its time is over."""
        attempt, step = self.attempt, self.step
        limit, settings = attempt.agent_s(step), attempt.settings
        harness = load_harness(settings.harness)
        attempt.recorder.prompt = []
        if attempt.on_step is not None:
            attempt.on_step(step.name or "")
        episode = Episode(
            sandbox=self.sandbox,
            instruction=step.instruction,
            limits=settings.limits,
            recorder=attempt.recorder,
            deadline=time.monotonic() + limit,
            model=(settings.endpoint or settings.model) if harness.needs_model else None,
            solution=self._solution() if harness.needs_solution else None,
            user=(await self.runner.now())[0],
            offers=attempt.task.offers,
            seed=None if settings.seed is None else settings.seed + attempt.sample,
            running=self._running,
        )
        self._files = episode.files
        await episode.files.begin()
        timer = asyncio.timeout(limit)
        try:
            async with timer:
                return await harness.run(episode)
        except TimeoutError:
            if not timer.expired():
                raise
        return Outcome(Termination.AGENT_DEADLINE, f"the agent's {limit:g} s were over")

    def _solution(self) -> Solution | None:
        task = self.attempt.task
        directory = task.solution(self.step, self.attempt.settings.wrong)
        return None if directory is None else Solution(directory, dict(task.solution_env))

    async def _grade(self) -> None:
        """End the agent, note the final state, take what is declared, and get the verdict."""
        self.attempt.phase = Phase.HANDOVER
        spec = self.step.verifier
        limit = grading_s(spec)
        timer = asyncio.timeout(limit)
        try:
            async with timer:
                with self._spool() as spool:
                    cargo = Cargo(spool, self.attempt.recorder)
                    await self._hand_over(cargo)
                    await self._verify(cargo)
        except TimeoutError:
            if not timer.expired():
                raise
            raise VerifierDeadlineError(
                f"killing, uploading and grading took over {limit:g} s",
                execution=Execution.UNKNOWN,
            ) from None

    @contextmanager
    def _spool(self) -> Iterator[Path]:
        """Make a place beside what is kept: a run that goes on after a kill sweeps it away."""
        root = self.attempt.blobs.root
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root, prefix=".artifacts.", suffix=".tmp") as spool:
            yield Path(spool)

    async def _hand_over(self, cargo: Cargo) -> None:
        attempt, step, sandbox = self.attempt, self.step, self.sandbox
        full = attempt.task.full_kill
        killed, survivors = await kill_what_must_not_live_on(
            sandbox, self._running, everything=full
        )
        files = None if self._files is None else await self._files.told()
        await attempt.note_final_state(sandbox)
        self._collected += await collect(sandbox, step.verifier.collect, attempt.recorder)
        if step.verifier.separate and self.last and not full:
            # Nothing of the agent's has a part in what follows, and nobody writes while it is read.
            more, survivors = await kill_what_must_not_live_on(sandbox, (), everything=True)
            killed += more
        await cargo.take(sandbox, step.artifacts)
        if attempt.artifacts is not None and cargo.archives:
            place = attempt.artifacts if step.name is None else attempt.artifacts / step.name
            await asyncio.to_thread(cargo.save, place)
        self._survivors = survivors
        await attempt.phases.end(killed=killed, survivors=survivors, files=files)

    async def _verify(self, cargo: Cargo) -> None:
        self.attempt.phase = Phase.VERIFY
        separate = self.step.verifier.separate
        async with self._place(cargo) as place:
            sandbox = place.sandbox
            verifier = Verifier(
                sandbox,
                self.step.verifier,
                self.attempt.recorder,
                self.tampering,
                key_inputs=self.attempt.task.key_inputs,
                alone=self.last or separate,
                agent_paths=self.attempt.task.agent_paths,
                account=place.account,
                not_the_agents=place.entry_point,
                forgeable=not separate and await self._forgeable(),
            )
            self._verifier = verifier
            verifier.note(
                mode="separate" if separate else "shared",
                full_kill=self.attempt.task.full_kill,
                image=sandbox.info.image_digest,
                artifacts=cargo.record(),
                collected=tuple(self._collected),
            )
            if not separate:
                await self._look_at_programs(verifier)
            survivors: tuple[ProcessInfo, ...] = ()
            try:
                self.rewards = await self._verdict(verifier)
                if not separate and not self.last:
                    await verifier.withdraw()
                    survivors = await sandbox.processes()
            finally:
                await self.attempt.phases.end(killed=verifier.killed, survivors=survivors)

    async def _verdict(self, verifier: Verifier) -> dict[str, float]:
        try:
            return await verifier.grade()
        except _PERHAPS_BROKEN as error:
            if not self.step.verifier.separate:
                await untouched.require_not_prevented(error, self, verifier)
            raise

    async def _forgeable(self) -> bool:
        """Whether something of the agent's lives that may be root's, or is its verifier's user's.

        The entry point is not the agent's.
        """
        own = self.attempt.booted.operation_id
        if all(one.operation_id is not None and one.operation_id == own for one in self._survivors):
            return False
        agent, verifier = self.step.agent.user, self.step.verifier.user
        if agent is None or str(agent).partition(":")[0] in {"0", "root"}:
            return True
        ids = await user_ids(self.sandbox, agent)
        if ids is None or ids[0] == 0:
            return True
        return (
            verifier is not None and ids[:1] == (await user_ids(self.sandbox, verifier) or ())[:1]
        )

    async def _look_at_programs(self, verifier: Verifier) -> None:
        """Tell whether what the verifier runs by was touched since the start."""
        before = self.attempt.programs
        now = await integrity.programs(self.sandbox)
        self.tampering.compare(integrity.PROGRAM_CHANGED, before, now, voided=False)
        verifier.note(programs=before)

    @asynccontextmanager
    async def _place(self, cargo: Cargo) -> AsyncIterator[_Place]:
        """Give the sandbox that grades: the agent's own, or a fresh one with the artifacts."""
        attempt, spec = self.attempt, self.step.verifier
        if spec.environment is None:
            await self._begin(self.sandbox)
            account = attempt.accounts.get(spec.runs_as)
            yield _Place(self.sandbox, attempt.booted.operation_id, account)
            return
        if self.sandbox.info.spec.network != EMPTY:
            await self.sandbox.set_network(EMPTY)
        lease_s = grading_s(spec) + GRADING_SLACK_S
        async with attempt.fresh_sandbox(spec.environment, lease_s, spec.network) as sandbox:
            attempt.expect_image(verifier_image(self.step.name), sandbox)
            await self._begin(sandbox)
            async with boot_time(boot_s(spec.environment.healthcheck)):
                booted = await boot(
                    sandbox, spec.environment.healthcheck, start_cmd=attempt.task.start_cmd
                )
            account = (await accounts_of(sandbox)).get(spec.runs_as)
            await cargo.place(sandbox)
            yield _Place(sandbox, booted.operation_id, account)

    async def _begin(self, sandbox: AsyncSandbox) -> None:
        await self.attempt.phases.begin(
            "verify",
            sandbox,
            user=self.step.verifier.runs_as,
            network=self.step.verifier.network,
            step=self.step.name,
            visible=PLACES,
        )
