"""Bring the files of a step, and run its setup.sh among them, as the agent's user."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from coldframe.harnesses.scripts import pack, run_argv
from coldframe.protocol.errors import ColdframeError, NotExecutedError, PathNotFoundError, Side
from coldframe.protocol.text import excerpt
from coldframe.rollouts.task import TaskStep
from coldframe.rollouts.users import user_ids
from coldframe.trajectories.redaction import Redactor

if TYPE_CHECKING:
    from coldframe.client import AsyncSandbox

SETUP_S = 600.0
"""For a step's setup.sh."""
SHOWN = 400
"""Bytes of what it wrote last, in the message of a failure."""


class StepSetupError(ColdframeError):
    """A step's setup.sh did not succeed; the message says how it ended."""

    code = "step_setup_failed"
    side = Side.STARTUP


async def bring_files(sandbox: AsyncSandbox, step: TaskStep, redactor: Redactor) -> None:
    """Unpack the step's workdir into the sandbox's, and run its setup.sh.

    Raises:
        StepSetupError: setup.sh did not succeed, or the agent's user does not exist.
    """
    user = step.agent.user
    if step.workdir is not None:
        owner = await _owner(sandbox, user)
        content = await asyncio.to_thread(pack, step.workdir)
        await sandbox.files.tar_up(sandbox.info.workdir, content, owner=owner)
    if step.setup is not None:
        await _run_setup(sandbox, step.setup, user, redactor)


async def _run_setup(
    sandbox: AsyncSandbox, script: Path, user: str | int | None, redactor: Redactor
) -> None:
    target = f"{sandbox.info.workdir.rstrip('/')}/setup.sh"
    try:
        result = await sandbox.exec(
            await run_argv(sandbox, script, target), user=user, deadline_s=SETUP_S
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


async def _owner(sandbox: AsyncSandbox, user: str | int | None) -> tuple[int, int]:
    """Return the ids that a step's files belong to: the agent's, else the working directory's."""
    if user is None:
        stat = await sandbox.files.stat(sandbox.info.workdir)
        return stat.uid, stat.gid
    ids = await user_ids(sandbox, user)
    if ids is None:
        raise StepSetupError(f"user {user!r} is not in the sandbox's /etc/passwd")
    return ids
