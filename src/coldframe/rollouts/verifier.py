"""Grade what an agent left, in the agent's own sandbox, after the agent is gone.

Order is the whole point. First everything that belongs to the harness is killed; what the
agent left running on purpose lives on and is listed, unless the task demands a full kill. Only
then do the tests arrive, into a place that is emptied first, whatever the agent put there.
Rewards are read from regular files only, by the file API, which follows no link out of them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coldframe.harnesses.base import OUTPUT_WINDOW_BYTES, check_platform
from coldframe.harnesses.scripts import pack, run_argv
from coldframe.protocol.errors import (
    FileError,
    NotExecutedError,
    PathNotFoundError,
    RewardInvalidError,
    RewardMissingError,
    VerifierDeadlineError,
    VerifierError,
    WorkdirNotFoundError,
)
from coldframe.protocol.models import ExecResult, FileKind, ProcessInfo, Reason
from coldframe.rollouts.rewards import MAX_REWARD_BYTES, parse_reward
from coldframe.rollouts.task import Task, VerifierSpec
from coldframe.trajectories.recorder import Recorder, plain_process
from coldframe.trajectories.schema import Verification

if TYPE_CHECKING:
    from coldframe.client import AsyncSandbox

NAME = "shared"
VERSION = "1"
TESTS = "/tests"
LOGS = "/logs"
VERIFIER_LOGS = "/logs/verifier"
REWARD_FILES = ("/logs/verifier/reward.json", "/logs/verifier/reward.txt")
ROOT = (0, 0)


class VerifierNotExecutedError(VerifierError):
    """test.sh could not be started; the message says why."""

    code = "verifier_not_executed"


@dataclass
class Verifier:
    """Grades one attempt. `record` holds what is known, also when grading fails."""

    sandbox: AsyncSandbox
    task: Task
    recorder: Recorder
    _facts: dict[str, Any] = field(default_factory=lambda: {"killed": ()})

    @property
    def _spec(self) -> VerifierSpec:
        return self.task.steps[0].verifier

    @property
    def _tests(self) -> Path:
        return self.task.directory / "tests"

    def record(self) -> Verification:
        """Return what happened so far."""
        return Verification(full_kill=self.task.full_kill, **self._facts)

    async def end_agent(self, running: set[str]) -> None:
        """Kill what belongs to the harness, or everything; list what lives on.

        Args:
            running: operations of the harness that have not ended.
        """
        killed: list[ProcessInfo] = []
        for operation_id in sorted(running):
            killed += await self.sandbox.kill_processes(operation_id)
        if self.task.full_kill:
            killed += await self.sandbox.kill_processes()
        self._facts["killed"] = tuple(map(plain_process, killed))
        survivors = await self.sandbox.processes()
        self._facts["survivors"] = tuple(map(plain_process, survivors))

    async def grade(self) -> dict[str, float]:
        """Bring the tests, run them, and return the rewards by part.

        Raises:
            RewardMissingError, RewardInvalidError, VerifierDeadlineError,
            VerifierNotExecutedError: there is no verdict, and no reward.
            SandboxGoneError and other ColdframeErrors: the platform failed.
        """
        begun = time.monotonic()
        try:
            return await self._graded()
        finally:
            self._facts["duration_s"] = time.monotonic() - begun

    async def _graded(self) -> dict[str, float]:
        await self._clear()
        await self.sandbox.files.tar_up(TESTS, pack(self._tests), owner=ROOT)
        result = await self._run_or_alone()
        self._facts |= {
            "reason": result.reason,
            "exit_code": result.exit_code,
            "signal": result.signal,
            "stdout": self.recorder.output(result.out),
            "stderr": self.recorder.output(result.err),
        }
        check_platform(result)
        if result.reason is Reason.DEADLINE:
            raise VerifierDeadlineError(
                f"{self._tests / 'test.sh'}: not done within "
                f"[verifier] timeout_sec = {self._spec.timeout_s:g}"
            )
        return await self._read(result)

    async def _clear(self) -> None:
        """Empty the places of the tests and their logs, whatever lies there."""
        removed = []
        for path in (TESTS, VERIFIER_LOGS):
            if path == VERIFIER_LOGS and await self._kind(LOGS) not in {None, FileKind.DIRECTORY}:
                await self.sandbox.files.remove(LOGS)
                removed.append(LOGS)
            if await self._kind(path) is not None:
                await self.sandbox.files.remove(path, recursive=True)
                removed.append(path)
        self._facts["removed"] = tuple(removed)
        await self.sandbox.files.mkdir(TESTS, mode=0o755, owner=ROOT)
        await self.sandbox.files.mkdir(LOGS, mode=0o755, owner=ROOT)
        # Who owns a directory may rename what lies in it, so an agent's /logs is taken over.
        await self.sandbox.files.chown(LOGS, *ROOT)
        await self.sandbox.files.chmod(LOGS, 0o755)
        # Closed to everybody but the verifier: a service that the agent left running as another
        # user must not be able to write the reward.
        await self.sandbox.files.mkdir(VERIFIER_LOGS, mode=0o700, owner=ROOT)

    async def _kind(self, path: str) -> FileKind | None:
        try:
            return (await self.sandbox.files.stat(path, follow=False)).kind
        except PathNotFoundError:
            return None

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
            self._facts["killed"] += tuple(map(plain_process, killed))
            self._facts["survivors"] = ()
        return await self._run()

    async def _run(self) -> ExecResult:
        user = 0 if self._spec.user is None else self._spec.user
        self._facts["user"] = str(user)
        if user not in {0, "0", "root"}:
            await self._hand_over(user)
        try:
            return await self._exec(user, None)
        except WorkdirNotFoundError:
            # The agent removed its working directory; that must not spare it the verdict.
            self._facts["cwd"] = "/"
        return await self._exec(user, "/")

    async def _hand_over(self, user: str | int) -> None:
        """Give the log directory to the verifier's user, by the sandbox's own names of it."""
        result = await self.sandbox.exec(
            ["chown", f"{user}", VERIFIER_LOGS], user=0, cwd="/", deadline_s=30.0
        )
        if not result.ok:
            raise VerifierError(f"{VERIFIER_LOGS} cannot be given to user {user!r}")

    async def _exec(self, user: str | int, cwd: str | None) -> ExecResult:
        script = self._tests / "test.sh"
        try:
            return await self.sandbox.exec(
                run_argv(script, f"{TESTS}/test.sh"),
                user=user,
                cwd=cwd,
                env=dict(self._spec.env),
                deadline_s=self._spec.timeout_s,
                window_bytes=OUTPUT_WINDOW_BYTES,
            )
        except WorkdirNotFoundError:
            if cwd is None:
                raise
            raise VerifierNotExecutedError(f"{script}: / cannot be entered") from None
        except NotExecutedError as error:
            raise VerifierNotExecutedError(f"{script} could not be started: {error}") from error

    async def _read(self, result: ExecResult) -> dict[str, float]:
        for path in (LOGS, VERIFIER_LOGS):
            kind = await self._kind(path)
            if kind not in {None, FileKind.DIRECTORY}:
                raise RewardInvalidError(f"{path}: a {kind}, not a directory")
        for path in REWARD_FILES:
            kind = await self._kind(path)
            if kind is None:
                continue
            self._facts["reward_file"] = path
            if kind is not FileKind.FILE:
                raise RewardInvalidError(f"{path}: a {kind}, not a regular file")
            content = await self._content(path)
            self._facts["reward_bytes"] = self.recorder.blob(content)
            return parse_reward(content, path)
        code = (
            f"exit code {result.exit_code}" if result.signal is None else f"signal {result.signal}"
        )
        raise RewardMissingError(
            f"test.sh ended ({result.reason}, {code}) and wrote neither reward.json nor reward.txt "
            f"in {VERIFIER_LOGS}"
        )

    async def _content(self, path: str) -> bytes:
        """Return the file's bytes, at most one more than are accepted."""
        try:
            return await self.sandbox.files.read(path, length=MAX_REWARD_BYTES + 1)
        except FileError as error:
            raise RewardInvalidError(f"{path}: cannot be read: {error}") from error
