"""Run a verifier in a sandbox and read its reward: the agent's own sandbox, or a fresh one.

Order is the whole point. Only when the agent's phase has ended do the tests arrive, into a place
that is emptied first, whatever lay there, and its logs get a guarded directory: only test.sh's own
processes can write there, and no reward by one that has run the agent's code. When test.sh has
ended everything else is ended too, before anything is read: so nobody writes while we look. What
the verdict rests on must be what it was before.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING, Any, TypeVar

from coldframe.harnesses.base import OUTPUT_WINDOW_BYTES, check_platform
from coldframe.harnesses.scripts import pack, run_argv
from coldframe.protocol.errors import (
    CapabilityError,
    CapacityError,
    FileError,
    GradingPreventedError,
    NotExecutedError,
    RewardInvalidError,
    RewardMissingError,
    UserNotFoundError,
    VerifierDeadlineError,
    VerifierError,
    WorkdirNotFoundError,
)
from coldframe.protocol.ids import new_operation_id
from coldframe.protocol.models import (
    ExecResult,
    ProcessInfo,
    Reason,
)
from coldframe.rollouts import integrity, places, verdicts
from coldframe.rollouts.conditions import Conditions
from coldframe.rollouts.integrity import Tampering
from coldframe.rollouts.places import ROOT, TESTS, VERIFIER_LOGS
from coldframe.rollouts.rewards import parse_reward
from coldframe.rollouts.runner import Runner
from coldframe.rollouts.task import VerifierSpec
from coldframe.rollouts.users import Account
from coldframe.rollouts.verdicts import RewardUnvouchedError, TamperedError
from coldframe.trajectories.recorder import Recorder
from coldframe.trajectories.verification import Verification

if TYPE_CHECKING:
    from coldframe.client import AsyncSandbox

T = TypeVar("T")
VERSION = "4"
LINGER_S = 0.02
"""How long survivors live on after test.sh: whoever writes in a loop does it once more, and a
file's times are only as fine as the kernel's ticks."""
_NO_VERDICT = (
    *(RewardMissingError, RewardInvalidError, RewardUnvouchedError),
    *(VerifierDeadlineError, TamperedError),
)


class VerifierNotExecutedError(VerifierError):
    """test.sh could not be started; the message says why."""

    code = "verifier_not_executed"


@dataclass
class Verifier:
    """Grades once. `record` holds what is known, also when grading fails."""

    sandbox: AsyncSandbox
    spec: VerifierSpec
    recorder: Recorder
    tampering: Tampering = field(default_factory=lambda: Tampering(None))
    key_inputs: Sequence[str] = ()
    alone: bool = True
    """End everything in the sandbox once test.sh has ended; else what test.sh itself left."""
    agent_paths: Sequence[str] = ()
    """What the task says the verifier may run as code of the agent's."""
    account: Account | None = None
    """Who runs the tests, as it was before the agent acted; None: as the sandbox has it now."""
    not_the_agents: str | None = None
    """The operation that runs in the sandbox and was there before the agent."""
    forgeable: bool = False
    """Whether somebody lives on who could write the reward if it cannot be guarded."""
    killed: list[ProcessInfo] = field(default_factory=list)
    """What had to be killed to start test.sh, and what was killed when it had ended."""
    _operation: str = ""
    _guarding: bool = False
    _facts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.conditions = Conditions(self.not_the_agents)
        self._runner = Runner(self.sandbox, self.spec.runs_as, self.account, self.tampering)

    def record(self) -> Verification:
        """Return what happened so far."""
        return Verification(**self._facts)

    def note(self, **facts: Any) -> None:
        """Add to the record."""
        self._facts |= facts

    async def grade(self) -> dict[str, float]:
        """Bring the tests, run them, and return the rewards by part.

        Raises:
            RewardMissingError, RewardInvalidError, RewardUnvouchedError, VerifierDeadlineError,
            TamperedError, VerifierNotExecutedError: there is no verdict, and no reward.
            GradingPreventedError: so it is, and what the agent left is the cause.
            SandboxGoneError and other ColdframeErrors: the platform failed.
        """
        begun = time.monotonic()
        try:
            return await self._graded()
        except _NO_VERDICT as error:
            if not self.conditions.others_may_have_caused(error):
                raise self.conditions.attributed(error) from None
            return await self._graded_alone(error)
        finally:
            self.note(duration_s=time.monotonic() - begun)

    async def _graded_alone(self, error: VerifierError) -> dict[str, float]:
        """Kill what the agent left, which may be why there was no verdict, and grade once more.

        Where it used up what the tests need, the verdict counts: it must not spare its agent that.
        Else there is none, as a service may be a part of what is graded; but it is known whose
        doing that is.
        """
        first = self.conditions
        self.killed += await self.sandbox.kill_processes()
        self.note(again=True)
        try:
            rewards = await self._graded()
        except _NO_VERDICT as late:
            # By the first run: the second may be at work on what that one made.
            raise first.attributed(late) from None
        if first.starved:
            return rewards
        raise GradingPreventedError(
            f"{error}; test.sh gives a verdict once what the agent left running is killed"
        )

    async def _graded(self) -> dict[str, float]:
        self.conditions = Conditions(self.not_the_agents)
        tests = await self._undisturbed(self._clear_and_bring)
        before = await integrity.key_inputs(self.sandbox, self.key_inputs)
        self.conditions.note_beside(await self.sandbox.processes())
        self.note(key_inputs=before)
        late = [path for path, digest in before.items() if digest == integrity.LATE]
        if late:
            raise GradingPreventedError(
                f"{late[0]}: a key input, of which there is more than can be read within "
                f"{integrity.KEY_INPUTS_S:g} s"
            )
        self.conditions.ended = result = await self._run_or_alone()
        self.note(
            reason=result.reason,
            exit_code=result.exit_code,
            signal=result.signal,
            stdout=self.recorder.output(result.out),
            stderr=self.recorder.output(result.err),
        )
        check_platform(result)
        await self._end(result)
        if result.reason is Reason.DEADLINE:
            raise VerifierDeadlineError(
                f"{self._script()}: not done within "
                f"[verifier] timeout_sec = {self.spec.timeout_s:g}"
            )
        await self._compare(tests, before)
        if self.conditions.report is not None:
            found = verdicts.from_report(
                self.conditions.report,
                result,
                self.tampering,
                self._found,
                workdir=self.sandbox.info.workdir,
            )
        else:
            found = await verdicts.from_files(self.sandbox, result, self.tampering, self._found)
        path, content = found
        self.note(reward_bytes=self.recorder.blob(content))
        return parse_reward(content, path)

    def _found(self, path: str) -> None:
        self.note(reward_file=path)

    async def _undisturbed(self, step: Callable[[], Awaitable[T]]) -> T:
        """Do something in its places; if it fails, kill whoever may be in the way and try again.

        An agent must not escape its grade by leaving somebody who undoes what we do, or who holds
        so many connections that the node has no descriptor left to guard them.
        """
        try:
            return await step()
        except (FileError, CapacityError):
            killed = await self.sandbox.kill_processes()
            if not killed:
                raise
            self.killed += killed
        return await step()

    async def _clear_and_bring(self) -> dict[str, str]:
        await self._take_report()
        removed = await places.clear(self.sandbox, tests=bool(self.spec.tests))
        if "removed" not in self._facts:  # the second time it is ours
            self.note(removed=removed)
        await self._guard()
        return await self._bring()

    async def _guard(self) -> None:
        """Let nobody but the next test.sh write its logs, where that can be held."""
        self._operation = new_operation_id()
        try:
            await self.sandbox.guard(
                VERIFIER_LOGS,
                self._operation,
                verdicts.NAMES,
                owner=await self._owner(),
                trusted=self.agent_paths,
            )
        except CapabilityError:
            self.note(guarded=False, forgeable=self.forgeable)
        else:
            self._guarding = True
            self.note(guarded=True)

    async def _take_report(self) -> None:
        """Learn from a guard what it saw, and tell whom it refused, before it goes."""
        self.conditions.report = None
        if self._guarding:
            self._guarding = False
            self.conditions.report = await self.sandbox.guard_report()
            verdicts.tell_refused(self.conditions.report, self.tampering)

    async def _bring(self) -> dict[str, str]:
        """Upload the tests; return path → digest of what must be found again afterwards."""
        files = self.sandbox.files
        if self.spec.tests:
            for directory in self.spec.tests:
                await files.tar_up(TESTS, await asyncio.to_thread(pack, directory), owner=ROOT)
            tests = await asyncio.to_thread(integrity.expected, self.spec.tests)
        else:
            try:
                # COPY keeps modes, and not every checkout has the executable bit.
                await files.chmod(f"{TESTS}/test.sh", 0o755)
                tests = await integrity.present(self.sandbox, TESTS)
            except FileError as error:
                raise VerifierNotExecutedError(f"the verifier's image: {error}") from error
        self.note(tests=integrity.mapping_digest(tests))
        return tests

    async def withdraw(self) -> None:
        """Take back what the verifier alone has: the next agent must not find it."""
        await self._undisturbed(lambda: places.withdraw(self.sandbox))

    async def _run_or_alone(self) -> ExecResult:
        """Run test.sh; if what the agent left keeps it from starting, kill that and run again.

        A fork bomb would otherwise turn every 0 into a failure that is nobody's.
        """
        try:
            return await self._run()
        except VerifierNotExecutedError:
            killed = await self.sandbox.kill_processes()
            if not killed:
                raise
            self.killed += killed
        await self._clear_and_bring()
        return await self._run()

    async def _run(self) -> ExecResult:
        user = self.spec.runs_as
        self.note(user=None if user is None else str(user))
        if not self._runner.is_root:
            guarded = bool(self._facts.get("guarded"))
            await places.hand_over(
                self.sandbox, await self._owner(), (TESTS,) if guarded else places.PLACES
            )
        try:
            return await self._exec(None)
        except WorkdirNotFoundError:
            # The agent removed its working directory; that must not spare it the verdict.
            self.note(cwd="/")
        await self._clear_and_bring()
        return await self._exec("/")

    async def _owner(self) -> tuple[int, int]:
        try:
            return await self._runner.owner()
        except UserNotFoundError as error:
            raise VerifierError(f"[verifier] {error}") from error

    def _script(self) -> str:
        return str(self.spec.script or f"{TESTS}/test.sh in the verifier's image")

    async def _argv(self) -> tuple[str, ...]:
        script, target = self.spec.script, f"{TESTS}/test.sh"
        return (target,) if script is None else await run_argv(self.sandbox, script, target)

    async def _exec(self, cwd: str | None) -> ExecResult:
        user, home = await self._runner.now()
        try:
            return await self.sandbox.exec(
                await self._argv(),
                user=user,
                cwd=cwd,
                env=home | dict(self.spec.env),
                deadline_s=self.spec.timeout_s if isfinite(self.spec.timeout_s) else None,
                window_bytes=OUTPUT_WINDOW_BYTES,
                operation_id=self._operation,
            )
        except WorkdirNotFoundError:
            if cwd is None:
                raise
            raise VerifierNotExecutedError(f"{self._script()}: / cannot be entered") from None
        except NotExecutedError as error:
            raise VerifierNotExecutedError(
                f"{self._script()} could not be started: {error}"
            ) from error

    async def _end(self, result: ExecResult) -> None:
        """Leave nobody who could write while the reward and the digests are read."""
        left = await self.sandbox.processes()
        await self._take_report()
        if self.conditions.report is None and left:
            await asyncio.sleep(LINGER_S)
        self.conditions.note_end(result, left, self.sandbox.info.spec)
        if self.alone or self.conditions.starved:
            self.killed += await self.sandbox.kill_processes()
        else:
            self.killed += await self.sandbox.kill_processes(result.operation_id)

    async def _compare(self, tests: Mapping[str, str], inputs: Mapping[str, str]) -> None:
        """Void the verdict if the tests or a key input are not what they were.

        Raises:
            TamperedError: the first of them is named.
        """
        found = await integrity.found_again(self.sandbox, TESTS, tests)
        now = await integrity.key_inputs(self.sandbox, inputs)
        changed = [
            f"{TESTS}/{path}"
            for path in self.tampering.compare("tests_changed", tests, found, voided=True)
        ]
        changed += self.tampering.compare("key_input_changed", inputs, now, voided=True)
        if changed:
            raise TamperedError(
                f"{changed[0]}{f' and {len(changed) - 1} more' if len(changed) > 1 else ''}: "
                "changed while the verifier ran; its verdict is void"
            )
