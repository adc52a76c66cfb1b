"""Grade as `coldframe rollout run` does, when Harbor's verifier runs test.sh.

Harbor says when grading begins only by what it does: it uploads the tests, and runs one known
command. That command is run by the rollouts' own verifier: in places that are emptied first, with
a guarded log directory, and nobody left when the reward is read.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harbor.utils.scripts import build_execution_command

from coldframe.harnesses.scripts import shell_of
from coldframe.integrations.harbor import transfers
from coldframe.integrations.harbor.declared import Terms
from coldframe.integrations.harbor.transfers import LeftOut
from coldframe.protocol.errors import ColdframeError, FileError, NotExecutedError
from coldframe.protocol.network import NetworkPolicy
from coldframe.rollouts import places
from coldframe.rollouts.phases import kill_what_must_not_live_on
from coldframe.rollouts.places import ROOT, TESTS, VERIFIER_LOGS
from coldframe.rollouts.task import EnvironmentSpec, VerifierSpec
from coldframe.rollouts.verdicts import NAMES
from coldframe.rollouts.verifier import Verifier
from coldframe.trajectories.recorder import Recorder
from coldframe.trajectories.redaction import Redactor
from coldframe.trajectories.store import BlobStore, write_atomic

if TYPE_CHECKING:
    from coldframe.client import AsyncSandbox

RUN_TESTS = str(
    build_execution_command(f"{TESTS}/test.sh", stdout_path=f"{VERIFIER_LOGS}/test-stdout.txt")
)
"""What Harbor's verifier runs."""
COPY_S = 60.0


@dataclass
class HarborVerifier(Verifier):
    """Runs Harbor's own command line in the place of test.sh alone."""

    async def _argv(self) -> tuple[str, ...]:
        return (await shell_of(self.sandbox), "-c", RUN_TESTS)


class Grading:
    """The verdicts of one environment: one, or one per step."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._tests: Path | None = None
        self._deferred: ColdframeError | None = None
        self._verdicts = 0
        self._verdict: tuple[str, bytes] | None = None
        """Name and content of the reward that counts, once there is one."""
        self._guarded = False

    @property
    def begun(self) -> bool:
        """Whether there was a verdict, or the attempt at one."""
        return self._verdicts > 0

    @property
    def _last(self) -> bool:
        """Whether no step follows in this sandbox."""
        return self._verdicts >= self._terms.steps

    async def bring(self, sandbox: AsyncSandbox, source: Path, running: Iterable[str]) -> None:
        """Take the tests that Harbor uploads; the agent's time is over when the first come.

        They are put where they belong too, for a verifier of another kind than Harbor's own. What
        fails is raised by `run`: Harbor hides what an upload raises.

        Args:
            running: operations that somebody of the agent's still waits for.
        """
        try:
            await self._bring(sandbox, source, running)
        except ColdframeError as error:
            self._deferred = error

    async def _bring(self, sandbox: AsyncSandbox, source: Path, running: Iterable[str]) -> None:
        if self._tests is None:
            self._tests = Path(tempfile.mkdtemp(prefix="coldframe-tests-"))
            full = self._terms.full_kill
            await kill_what_must_not_live_on(sandbox, tuple(running), everything=full)
            await places.clear(sandbox, tests=True)
        await asyncio.to_thread(
            shutil.copytree, source, self._tests, symlinks=True, dirs_exist_ok=True
        )
        await sandbox.files.upload_tree(source, TESTS, owner=ROOT)
        for path in places.PLACES:
            await sandbox.files.chmod(path, 0o777)

    async def run(
        self,
        sandbox: AsyncSandbox,
        environment: EnvironmentSpec,
        user: str | int | None,
        env: Mapping[str, str],
    ) -> int:
        """Run the tests, read their verdict, and return test.sh's exit code.

        Harbor ends it by cancelling.

        Args:
            environment: what the sandbox was made from.
        Raises:
            RewardMissingError, RewardInvalidError, TamperedError, RewardUnvouchedError,
            GradingPreventedError, VerifierNotExecutedError: there is no verdict.
            SandboxGoneError and other ColdframeErrors: the platform failed.
        """
        deferred, self._deferred = self._deferred, None
        if deferred is not None and not isinstance(deferred, FileError):
            raise deferred
        self._verdict, self._verdicts = None, self._verdicts + 1
        # A separate verifier's image has the tests: nobody uploads them.
        tests = () if self._tests is None else (self._tests,)
        spec = VerifierSpec(
            timeout_s=math.inf,
            user=user,
            env=env,
            network=NetworkPolicy(),
            network_mode="no-network",
            environment=None if tests else environment,
            tests=tests,
        )
        try:
            return await self._graded(sandbox, spec)
        finally:
            self.forget()

    async def _graded(self, sandbox: AsyncSandbox, spec: VerifierSpec) -> int:
        with tempfile.TemporaryDirectory(prefix="coldframe-verifier-") as spool:
            blobs = BlobStore(Path(spool))
            verifier = HarborVerifier(
                sandbox,
                spec,
                Recorder(blobs, Redactor()),
                key_inputs=self._terms.key_inputs,
                alone=self._last or spec.separate,
                agent_paths=self._terms.agent_paths,
            )
            try:
                await verifier.grade()
            finally:
                record = verifier.record()
                self._guarded = bool(record.guarded)
            assert record.reward_file is not None
            assert record.reward_bytes is not None
            name = record.reward_file.rpartition("/")[2]
            self._verdict = name, blobs.path(record.reward_bytes.sha256).read_bytes()
        return -1 if record.exit_code is None else record.exit_code

    async def download(
        self,
        sandbox: AsyncSandbox,
        target: Path,
        logger: logging.Logger,
        left_out: LeftOut,
    ) -> None:
        """Copy the verifier's logs to this machine, and withdraw them: no next agent finds them.

        Of rewards only the one that counts is there. The rest is what a program of the image
        copies out of the guarded directory: worth a look, and nothing rests on it.
        """

        def unwanted(path: str, directory: bool) -> bool:
            return path in NAMES or left_out(path, directory)

        source = await self._readable(sandbox)
        await transfers.download(sandbox, source, target, logger, unwanted)
        if source != VERIFIER_LOGS:
            await sandbox.files.remove(source, recursive=True)
        if self._verdict is not None:
            name, content = self._verdict
            await asyncio.to_thread(write_atomic, target / name, content, sync=False)
        if not self._last:
            await places.withdraw(sandbox)

    async def _readable(self, sandbox: AsyncSandbox) -> str:
        """Return where the logs can be read by the file API, which no guarded directory can."""
        if not self._guarded:
            return VERIFIER_LOGS
        copied = f"{places.LOGS}/.verifier-{secrets.token_hex(8)}"
        await sandbox.files.mkdir(copied, mode=0o700, owner=ROOT)
        command = ["cp", "-a", f"{VERIFIER_LOGS}/.", copied]
        with suppress(NotExecutedError):
            await sandbox.exec(command, user=0, cwd="/", deadline_s=COPY_S)
        return copied

    def forget(self) -> None:
        """Drop the copy of the tests."""
        tests, self._tests = self._tests, None
        if tests is not None:
            shutil.rmtree(tests, ignore_errors=True)
