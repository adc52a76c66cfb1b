"""Run a verifier in a sandbox and read its reward: the agent's own sandbox, or a fresh one.

Order is the whole point. Only when the agent's phase has ended do the tests arrive, into a place
that is emptied first, whatever lay there. When test.sh has ended everything else is ended too,
before anything is read: so nobody writes while we look. Rewards are read from regular files
only, by the file API, which follows no link out of them, and count only if they were last touched
while test.sh ran. What the verdict rests on must be what it was before.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

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
from coldframe.protocol.ids import new_operation_id
from coldframe.protocol.models import ExecResult, FileKind, ProcessInfo, Reason
from coldframe.rollouts import integrity, places
from coldframe.rollouts.integrity import Tampering
from coldframe.rollouts.places import LOGS, ROOT, TESTS, VERIFIER_LOGS, kind_of
from coldframe.rollouts.rewards import MAX_REWARD_BYTES, parse_reward
from coldframe.rollouts.task import VerifierSpec
from coldframe.trajectories.recorder import Recorder
from coldframe.trajectories.verification import Verification

if TYPE_CHECKING:
    from coldframe.client import AsyncSandbox

T = TypeVar("T")
VERSION = "2"
REWARD_FILES = ("/logs/verifier/reward.json", "/logs/verifier/reward.txt")
LATE_NS = 1_000_000
"""Later than this after test.sh's end, a change is somebody else's."""
LINGER_S = 0.02
"""How long survivors live on after test.sh: whoever writes in a loop does it once more, and a
file's times are only as fine as the kernel's ticks."""


class VerifierNotExecutedError(VerifierError):
    """test.sh could not be started; the message says why."""

    code = "verifier_not_executed"


class TamperedError(VerifierError):
    """What the verdict rests on was changed while the verifier ran; the verdict is void."""

    code = "tampered"


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
    killed: list[ProcessInfo] = field(default_factory=list)
    """What had to be killed to start test.sh, and what was killed when it had ended."""
    _starved: bool = False
    """Memory ran out while something else than the verifier lived, or that took most processes."""
    _facts: dict[str, Any] = field(default_factory=dict)

    def record(self) -> Verification:
        """Return what happened so far."""
        return Verification(**self._facts)

    def note(self, **facts: Any) -> None:
        """Add to the record."""
        self._facts |= facts

    async def grade(self) -> dict[str, float]:
        """Bring the tests, run them, and return the rewards by part.

        Raises:
            RewardMissingError, RewardInvalidError, VerifierDeadlineError, TamperedError,
            VerifierNotExecutedError: there is no verdict, and no reward.
            SandboxGoneError and other ColdframeErrors: the platform failed.
        """
        begun = time.monotonic()
        try:
            return await self._graded()
        except (RewardMissingError, RewardInvalidError):
            if not self._starved:
                raise
            # What the agent left used up the memory or the processes that the tests need. It is
            # dead now, and must not spare its agent the verdict.
            self.note(again=True)
            return await self._graded()
        finally:
            self.note(duration_s=time.monotonic() - begun)

    async def _graded(self) -> dict[str, float]:
        tests = await self._undisturbed(self._clear_and_bring)
        before = await integrity.key_inputs(self.sandbox, self.key_inputs)
        self.note(key_inputs=before)
        result = await self._run_or_alone()
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
        path, content = await self._read(result)
        return parse_reward(content, path)

    async def _undisturbed(self, step: Callable[[], Awaitable[T]]) -> T:
        """Do something with files; if it fails, kill whoever may be in the way and do it again.

        An agent must not escape its grade by leaving somebody who undoes what we do.
        """
        try:
            return await step()
        except FileError:
            killed = await self.sandbox.kill_processes()
            if not killed:
                raise
            self.killed += killed
        return await step()

    async def _clear_and_bring(self) -> dict[str, str]:
        removed = await places.clear(self.sandbox, tests=bool(self.spec.tests))
        if "removed" not in self._facts:  # the second time it is ours
            self.note(removed=removed)
        return await self._bring()

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
        user = self.spec.user
        if user is None and not self.spec.separate:
            user = 0
        self.note(user=None if user is None else str(user))
        if user not in {0, "0", "root"}:
            await places.hand_over(self.sandbox, user)
        try:
            return await self._exec(user, None)
        except WorkdirNotFoundError:
            # The agent removed its working directory; that must not spare it the verdict.
            self.note(cwd="/")
        return await self._exec(user, "/")

    def _script(self) -> str:
        return str(self.spec.script or f"{TESTS}/test.sh in the verifier's image")

    async def _exec(self, user: str | int | None, cwd: str | None) -> ExecResult:
        script, target = self.spec.script, f"{TESTS}/test.sh"
        try:
            return await self.sandbox.exec(
                (target,) if script is None else await run_argv(self.sandbox, script, target),
                user=user,
                cwd=cwd,
                env=dict(self.spec.env),
                deadline_s=self.spec.timeout_s,
                window_bytes=OUTPUT_WINDOW_BYTES,
                operation_id=new_operation_id(),
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
        others = await self.sandbox.processes()
        crowded = len(others) > self.sandbox.info.spec.pids // 2
        self._starved = bool(others) and (crowded or bool(result.resources.oom_kills))
        if others:
            await asyncio.sleep(LINGER_S)
        if self.alone or self._starved:
            self.killed += await self.sandbox.kill_processes()
        else:
            self.killed += await self.sandbox.kill_processes(result.operation_id)

    async def _read(self, result: ExecResult) -> tuple[str, bytes]:
        for path in (LOGS, VERIFIER_LOGS):
            kind = await kind_of(self.sandbox, path)
            if kind not in {None, FileKind.DIRECTORY}:
                raise RewardInvalidError(f"{path}: a {kind}, not a directory")
        for path in REWARD_FILES:
            try:
                stat = await self.sandbox.files.stat(path, follow=False)
            except PathNotFoundError:
                continue
            self.note(reward_file=path)
            if stat.kind is not FileKind.FILE:
                raise RewardInvalidError(f"{path}: a {stat.kind}, not a regular file")
            if stat.nlink != 1:
                raise RewardInvalidError(f"{path}: has {stat.nlink} names, so others may write it")
            self._in_time(path, stat.ctime_ns, result)
            content = await self._content(path)
            self.note(reward_bytes=self.recorder.blob(content))
            return path, content
        code = (
            f"exit code {result.exit_code}" if result.signal is None else f"signal {result.signal}"
        )
        raise RewardMissingError(
            f"test.sh ended ({result.reason}, {code}) and wrote neither reward.json nor reward.txt "
            f"in {VERIFIER_LOGS}"
        )

    def _in_time(self, path: str, changed_ns: int, result: ExecResult) -> None:
        """Refuse a reward that was touched after test.sh ended: it is somebody else's.

        Raises:
            TamperedError: it was.
        """
        ended_ns = int(result.ended_at * 1e9)
        if changed_ns > ended_ns + LATE_NS:
            late = f"{(changed_ns - ended_ns) / 1e6:.1f} ms after test.sh ended"
            self.tampering.found("reward_late", path, "written by test.sh", late, voided=True)
            raise TamperedError(f"{path}: written {late}, by another")

    async def _content(self, path: str) -> bytes:
        """Return the file's bytes, at most one more than are accepted."""
        try:
            return await self.sandbox.files.read(path, length=MAX_REWARD_BYTES + 1)
        except FileError as error:
            raise RewardInvalidError(f"{path}: cannot be read: {error}") from error

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
