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
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from harbor.utils.scripts import build_execution_command

from coldframe.harnesses.scripts import shell_of
from coldframe.integrations.harbor import transfers
from coldframe.integrations.harbor.declared import Terms
from coldframe.integrations.harbor.transfers import LeftOut
from coldframe.protocol.errors import ColdframeError, FileError
from coldframe.protocol.network import NetworkPolicy
from coldframe.rollouts import places
from coldframe.rollouts.phases import kill_what_must_not_live_on
from coldframe.rollouts.places import ROOT, TESTS, VERIFIER_LOGS
from coldframe.rollouts.scratch import scratch
from coldframe.rollouts.task import EnvironmentSpec, VerifierSpec
from coldframe.rollouts.users import Accounts
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
MAKE_RUNNABLE = f"chmod +x {TESTS}/test.sh"
"""What it runs before that. Our own way of bringing tests makes them so."""
_RUN_AND_COPY = f"""\
{RUN_TESTS}
code=$?
for each in {VERIFIER_LOGS}/* {VERIFIER_LOGS}/.[!.]*; do
  case $each in */reward.json | */reward.txt) ;; *) cp -a "$each" "$0/" 2>/dev/null ;; esac
done
exit $code
"""


@dataclass
class HarborVerifier(Verifier):
    """Runs Harbor's own command line in the place of test.sh alone, and keeps what it logs.

    Only the command itself can read the guarded directory, so it copies its logs when it is done.
    Nothing rests on them. A reward is not opened: its last opener is taken for its author.
    """

    logs: str = field(default_factory=lambda: f"{places.LOGS}/.verifier-{secrets.token_hex(8)}")

    async def _argv(self) -> tuple[str, ...]:
        owner = await self._runner.owner()
        await self.sandbox.files.mkdir(self.logs, mode=0o700, owner=owner)
        return (await shell_of(self.sandbox), "-c", _RUN_AND_COPY, self.logs)


class Grading:
    """The verdicts of one environment: one, or one per step."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self.entry_point: str | None = None
        """The operation that runs in the sandbox and is not the agent's."""
        self.accounts = Accounts()
        """Who is who in it before the agent acts."""
        self._tests: Path | None = None
        self._copy = ExitStack()
        """Holds the copy of the tests that `_tests` is."""
        self._waiting = False
        """Whether they are nowhere in the sandbox yet."""
        self._deferred: ColdframeError | None = None
        self._verdicts = 0
        self._verdict: tuple[str, bytes] | None = None
        """Name and content of the reward that counts, once there is one."""
        self._logs = VERIFIER_LOGS

    @property
    def begun(self) -> bool:
        """Whether there was a verdict, or the attempt at one."""
        return self._verdicts > 0

    @property
    def waiting(self) -> bool:
        """Whether there are tests that were not put into the sandbox yet."""
        return self._waiting

    @property
    def _last(self) -> bool:
        """Whether no step follows in this sandbox."""
        return self._verdicts >= self._terms.steps

    async def bring(
        self, sandbox: AsyncSandbox, source: Path, running: Iterable[str], logger: logging.Logger
    ) -> None:
        """Take the tests that Harbor uploads; the agent's time is over when the first come.

        They are kept here until `run` brings them, so that nobody else in the sandbox ever reads
        them. What fails is raised by `run`: Harbor hides what an upload raises.

        Args:
            running: operations that somebody of the agent's still waits for.
        """
        try:
            await self._bring(sandbox, source, running)
        except ColdframeError as error:
            logger.warning("the sandbox was not made ready for its tests: %s", error)
            self._deferred = error

    async def _bring(self, sandbox: AsyncSandbox, source: Path, running: Iterable[str]) -> None:
        if self._tests is None:
            self._tests = self._copy.enter_context(scratch())
            full = self._terms.full_kill
            await kill_what_must_not_live_on(sandbox, tuple(running), everything=full)
            await places.clear(sandbox, tests=True)
        await asyncio.to_thread(
            shutil.copytree, source, self._tests, symlinks=True, dirs_exist_ok=True
        )
        self._waiting = True

    async def put(self, sandbox: AsyncSandbox) -> None:
        """Put tests that still wait where a verifier of another kind than Harbor's own looks."""
        if self._tests is None or not self._waiting:
            return
        self._waiting = False
        await sandbox.files.upload_tree(self._tests, TESTS, owner=ROOT)
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
        with scratch() as spool:
            blobs = BlobStore(spool)
            verifier = HarborVerifier(
                sandbox,
                spec,
                Recorder(blobs, Redactor()),
                key_inputs=self._terms.key_inputs,
                alone=self._last or spec.separate,
                agent_paths=self._terms.agent_paths,
                not_the_agents=self.entry_point,
                account=self.accounts.get(spec.runs_as),
            )
            try:
                await verifier.grade()
            finally:
                record = verifier.record()
                self._logs = verifier.logs
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

        Of rewards only the one that counts is there.
        """

        def unwanted(path: str, directory: bool) -> bool:
            return path in NAMES or left_out(path, directory)

        await transfers.download(sandbox, self._logs, target, logger, unwanted)
        await sandbox.files.remove(self._logs, recursive=True)
        if self._verdict is not None:
            name, content = self._verdict
            await asyncio.to_thread(write_atomic, target / name, content, sync=False)
        if not self._last:
            await places.withdraw(sandbox)
            # Tests may have closed it, and the next agent's own logs lie there.
            await sandbox.files.chmod(places.LOGS, 0o755)

    def forget(self) -> None:
        """Drop the copy of the tests."""
        self._tests, self._waiting = None, False
        self._copy.close()
