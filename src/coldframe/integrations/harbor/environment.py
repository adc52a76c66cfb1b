"""Harbor's environment interface over a Coldframe sandbox: its life, commands, grading, files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

from harbor.environments.base import ExecResult, HealthcheckError

from coldframe.client import AsyncSandbox
from coldframe.harnesses.scripts import shell_of
from coldframe.integrations.harbor import declared, results, transfers
from coldframe.integrations.harbor.abilities import AGENT_LOGS, LOGS, JudgedEnvironment
from coldframe.integrations.harbor.failures import as_harbors
from coldframe.integrations.harbor.grading import MAKE_RUNNABLE, RUN_TESTS, Grading
from coldframe.integrations.harbor.life import Life
from coldframe.integrations.harbor.nodes import NodeChoice, place
from coldframe.integrations.harbor.transfers import LeftOut, keep_all
from coldframe.protocol.errors import (
    ColdframeError,
    GradingPreventedError,
    InvalidRequestError,
    NotExecutedError,
    PathNotFoundError,
    SandboxStateError,
    ServiceUnreachableError,
    VerifierError,
)
from coldframe.protocol.ids import new_operation_id
from coldframe.protocol.models import MIB, FileKind
from coldframe.protocol.models import ExecResult as Ended
from coldframe.rollouts.boot import boot
from coldframe.rollouts.healthcheck import UnhealthyError, wait_healthy
from coldframe.rollouts.places import ROOT, TESTS, VERIFIER_LOGS
from coldframe.rollouts.users import accounts_of, user_ids

WINDOW_BYTES = 16 * MIB
"""Per stream, how much of a command's output Harbor is given: head and tail."""


class ColdframeEnvironment(JudgedEnvironment):
    """One sandbox, as Harbor's trials and agents see it; docs/harbor.md."""

    def __init__(
        self,
        *args: Any,
        url: str | None = None,
        api_key: str | None = None,
        home: str | None = None,
        lease_s: float = 900.0,
        **kwargs: Any,
    ) -> None:
        """Take what Harbor gives, and by `--ek NAME=VALUE`:

        Args:
            url, api_key: a Coldframe service; default COLDFRAME_URL and COLDFRAME_API_KEY, else
                a node in this process.
            home: where images and state of a node in this process lie; default COLDFRAME_HOME.
            lease_s: for how long a sandbox outlives a Harbor that was killed.
        """
        self._choice = NodeChoice(url, api_key, None if home is None else str(home))
        self._lease_s = float(lease_s)
        self._life: Life | None = None
        self._made = False
        self._healthy = False
        self._running: set[str] = set()
        super().__init__(*args, **kwargs)
        self._grading = Grading(self._terms)

    # --- its life ---------------------------------------------------------------------

    async def start(self, force_build: bool) -> None:
        """Build the image unless that was done, make the sandbox, boot it.

        Started again, the sandbox that it had is deleted.

        Raises:
            CapabilityError: this environment or its node cannot do what the task asks for.
            ImageNotFoundError, DockerfileError, BuildDeadlineError: there is no such image.
            EntryPointError, HealthcheckError: it was not ready.
            CreateError and other ColdframeErrors: the platform failed.
        """
        self._refuse_what_was_noted()
        await self.stop(delete=True)
        node = await place(self._choice)
        await self._refuse_what_cannot_be_enforced(node.client)
        spec = self._spec(force_build)
        built = await node.images.of_spec(self.environment_name, spec, cached=not force_build)
        self._life = Life(self._lease_s, self.logger)
        sandbox = await self._life.begin(
            node.client.create_sandbox(built.name, **self._creation(), ttl_s=self._lease_s)
        )
        self._made = True
        for path in LOGS:
            await sandbox.files.mkdir(path, mode=0o777, owner=ROOT)
            await sandbox.files.chmod(path, 0o777)
        check = self.task_env_config.healthcheck
        try:
            booted = await boot(
                sandbox,
                None if check is None else declared.healthcheck_of(check),
                start_cmd=self._terms.start_cmd,
            )
        except UnhealthyError as error:
            raise as_harbors(error) from error
        self._healthy = True
        self._grading.entry_point = booted.operation_id
        self._grading.accounts = await accounts_of(sandbox)
        await self._upload_environment_dir_after_start()

    def _spec(self, force_build: bool = False) -> Any:
        return declared.spec_of(self.environment_dir, self.task_env_config, force_build=force_build)

    def _creation(self) -> dict[str, Any]:
        limits = {
            "cpu": (self._effective_cpus, 1),
            "memory_bytes": (self._effective_memory_mb, MIB),
            "disk_bytes": (self._effective_storage_mb, MIB),
        }
        return {
            "env": self._merge_env(None),
            "workdir": self.task_env_config.workdir or None,
            "network": declared.policy_of(self._network_policy),
            "labels": {"harbor.task": self.environment_name, "harbor.session": self.session_id},
            **{name: value * unit for name, (value, unit) in limits.items() if value is not None},
        }

    async def stop(self, delete: bool) -> None:
        """Delete the sandbox, within a bound; its lease ends what that leaves.

        Args:
            delete: false leaves it until its lease ends, which nobody renews any more.
        """
        self._grading.forget()
        life, self._life = self._life, None
        if life is not None:
            await life.end(delete=delete)

    @property
    def sandbox(self) -> AsyncSandbox:
        """The sandbox.

        Raises:
            SandboxStateError: it was not started, or was stopped.
        """
        if self._life is None or self._life.sandbox is None:
            raise SandboxStateError(f"{self.session_id}: the environment has no sandbox")
        return self._life.sandbox

    async def run_healthcheck(self, healthcheck: Any = None) -> None:
        """Wait until healthy, by the rules of rollouts; the environment's own is part of `start`.

        Raises:
            HealthcheckError: it failed as often as it may.
        """
        if healthcheck is None and (self._healthy or self.task_env_config.healthcheck is None):
            return
        check = declared.healthcheck_of(healthcheck or self.task_env_config.healthcheck)
        try:
            await wait_healthy(self.sandbox, check, user=self.default_user)
        except UnhealthyError as error:
            raise HealthcheckError(str(as_harbors(error))) from error

    async def _apply_network_policy(self, network_policy: Any) -> None:
        await self.sandbox.set_network(declared.policy_of(network_policy))

    # --- commands ---------------------------------------------------------------------

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: float | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run a command line by bash, or sh where there is none, to its end.

        Cancelled, it returns only when the command and all that it started are dead.

        Raises:
            SandboxGoneError and other ColdframeErrors: the platform failed. Never TimeoutError.
        """
        who, merged = self._resolve_user(user), self._merge_env(env)
        if command == RUN_TESTS and cwd is None:
            return await self._grade(who, merged or {})
        if self._grading.waiting:
            if command == MAKE_RUNNABLE:
                return ExecResult(stdout="", stderr="", return_code=0)
            await self._grading.put(self.sandbox)
        operation = new_operation_id()
        self._running.add(operation)
        try:
            result = await self._run(
                command,
                shell=await shell_of(self.sandbox),
                cwd=cwd,
                env=merged,
                user=who,
                deadline_s=timeout_sec or None,
                window_bytes=WINDOW_BYTES,
                operation_id=operation,
            )
        except (NotExecutedError, InvalidRequestError) as error:
            # A command that nothing can be started from is the agent's, as one that fails is.
            return results.of_not_executed(error)
        except TimeoutError as error:
            raise ServiceUnreachableError(f"the node did not answer in time: {error}") from error
        finally:
            self._running.discard(operation)
        return results.of_ended(result)

    async def _run(self, command: str, **options: Any) -> Ended:
        callback = self._output_callback()
        if callback is None:
            return await self.sandbox.exec(command, **options)
        return await results.passed_on(self.sandbox.stream(command, **options), callback)

    # --- grading ----------------------------------------------------------------------

    async def _grade(self, user: str | int | None, env: dict[str, str]) -> ExecResult:
        try:
            code = await self._grading.run(self.sandbox, self._spec(), user, env)
        except (VerifierError, GradingPreventedError) as error:
            await self._keep_logs()
            raise as_harbors(error) from error
        return ExecResult(stdout="", stderr="", return_code=code)

    async def _keep_logs(self) -> None:
        """Keep what test.sh wrote when there is no verdict; no reward is among it."""
        try:
            await self._download(VERIFIER_LOGS, self.trial_paths.verifier_dir)
        except ColdframeError as error:
            self.logger.warning("the verifier's logs are lost: %s", error)

    async def empty_dirs(self, dirs: Sequence[str | PurePath], *, chmod: bool = True) -> Any:
        """Empty directories, made if they are missing; a guarded one is given back first."""
        if any(str(one) == VERIFIER_LOGS for one in dirs):
            self._grading.forget()
            await self.sandbox.unguard()
        return await super().empty_dirs(dirs, chmod=chmod)

    # --- files ------------------------------------------------------------------------

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """Copy a local file; it keeps its mode and belongs to the default user."""
        await self.sandbox.files.upload(
            Path(source_path), self._absolute(target_path), owner=await self._owner()
        )

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """Copy a local directory's content: modes, links and holes are kept.

        It belongs to the default user; where Harbor names none, to whom the directory belongs.
        """
        target = self._absolute(target_dir)
        if target.rstrip("/") != TESTS:
            await self.sandbox.files.upload_tree(
                Path(source_dir), target, owner=await self._owner()
            )
            return
        await self._grading.bring(self.sandbox, Path(source_dir), self._running, self.logger)

    async def _owner(self) -> tuple[int, int] | None:
        if self.default_user is None:
            return None
        return await user_ids(self.sandbox, self.default_user)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """Copy a file of the sandbox to a local one: its mode and its holes are kept."""
        await transfers.download_file(
            self.sandbox, self._absolute(source_path), Path(target_path), self.logger
        )

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """Copy a directory's content over a local one; what could lead out of it is left out."""
        await self._download(source_dir, Path(target_dir))

    async def download_dir_with_exclusions(
        self, *, source_dir: str, target_dir: Path | str, exclude: list[str]
    ) -> None:
        """Copy a directory without what the patterns name."""
        await self._download(source_dir, Path(target_dir), transfers.excluded(exclude))

    async def download_dir_filtered(
        self,
        *,
        source_dir: str,
        target_dir: Path | str,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        protect: Sequence[str] | None = None,
    ) -> None:
        """Copy what the globs choose of a directory's files."""
        chosen = transfers.selected(include, exclude, protect)
        await self._download(source_dir, Path(target_dir), chosen)

    async def _download(self, source_dir: str, target: Path, left_out: LeftOut = keep_all) -> None:
        if not self._made and source_dir == AGENT_LOGS:
            # Harbor wants them of a start that failed, too: an error would bury the first.
            self.logger.info(
                "%s: no sandbox was made, so %s holds nothing", self.session_id, source_dir
            )
            return
        source = self._absolute(source_dir).rstrip("/") or "/"
        if source == VERIFIER_LOGS and self._grading.begun:
            await self._grading.download(self.sandbox, target, self.logger, left_out)
        else:
            await transfers.download(self.sandbox, source, target, self.logger, left_out)

    async def is_dir(self, path: str, user: str | int | None = None) -> bool:
        """Whether a path is a directory, or a link to one."""
        return await self._kind(path) is FileKind.DIRECTORY

    async def is_file(self, path: str, user: str | int | None = None) -> bool:
        """Whether a path is a regular file, or a link to one."""
        return await self._kind(path) is FileKind.FILE

    async def _kind(self, path: str) -> FileKind | None:
        try:
            return (await self.sandbox.files.stat(self._absolute(path))).kind
        except PathNotFoundError:
            return None

    def _absolute(self, path: str | PurePath) -> str:
        text = str(path)
        return text if text.startswith("/") else f"{self.sandbox.info.workdir.rstrip('/')}/{text}"
