"""Bring the files of a step, and run its setup.sh among them, as the agent's user."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

from coldframe.harnesses.scripts import pack, run_argv
from coldframe.protocol.errors import (
    ColdframeError,
    NotExecutedError,
    PathNotFoundError,
    Side,
    UserNotFoundError,
)
from coldframe.protocol.text import excerpt
from coldframe.rollouts.runner import Runner
from coldframe.rollouts.task import TaskStep
from coldframe.trajectories.redaction import Redactor

SETUP_S = 600.0
"""For a step's setup.sh."""
SHOWN = 400
"""Bytes of what it wrote last, in the message of a failure."""


class StepSetupError(ColdframeError):
    """A step's setup.sh did not succeed; the message says how it ended."""

    code = "step_setup_failed"
    side = Side.STARTUP


async def bring_files(runner: Runner, step: TaskStep, redactor: Redactor) -> None:
    """Unpack the step's workdir into the sandbox's, and run its setup.sh.

    Raises:
        StepSetupError: setup.sh did not succeed, or the agent's user does not exist.
    """
    sandbox = runner.sandbox
    if step.workdir is not None:
        owner = await _owner(runner)
        content = await asyncio.to_thread(pack, step.workdir)
        await sandbox.files.tar_up(sandbox.info.workdir, content, owner=owner)
    if step.setup is not None:
        await _run_setup(runner, step.setup, redactor)


async def _run_setup(runner: Runner, script: Path, redactor: Redactor) -> None:
    sandbox = runner.sandbox
    user, home = await runner.now()
    target = f"{sandbox.info.workdir.rstrip('/')}/setup.sh"
    try:
        result = await sandbox.exec(
            await run_argv(sandbox, script, target), user=user, env=home, deadline_s=SETUP_S
        )
    except NotExecutedError as error:
        raise StepSetupError(f"{script} could not be started: {error}") from error
    if not result.ok:
        said = redactor.text(result.stderr[-SHOWN:].decode("utf-8", "replace"))
        how = f"{result.reason}, exit code {result.exit_code}"
        raise StepSetupError(f"{script}: {how}: {excerpt(said.strip(), SHOWN)}")
    # It is no part of what the agent is to see. Some scripts remove themselves.
    with suppress(PathNotFoundError):
        await sandbox.files.remove(target)


async def _owner(runner: Runner) -> tuple[int, int]:
    """Return the ids that a step's files belong to: the agent's, else the working directory's."""
    if runner.user is None:
        stat = await runner.sandbox.files.stat(runner.sandbox.info.workdir)
        return stat.uid, stat.gid
    try:
        return await runner.owner()
    except UserNotFoundError as error:
        raise StepSetupError(str(error)) from error
