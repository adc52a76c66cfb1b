"""Tell whether what an agent broke is why the tests give no verdict in its sandbox.

Two things have to come together: something of the image is not what it was outside the agent's
work, and the same tests give a verdict in a sandbox of that image that no agent was in. Either
alone is no evidence: honest agents change their system, and tests fail by themselves.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from coldframe.protocol.errors import CapabilityError, ColdframeError, FileError, NotExecutedError
from coldframe.protocol.models import MOST_CHANGES, Change
from coldframe.protocol.text import excerpt
from coldframe.rollouts.boot import boot
from coldframe.rollouts.environment import AGENT_IMAGE
from coldframe.rollouts.integrity import PROGRAM_CHANGED, USER_CHANGED
from coldframe.rollouts.places import LOGS, TESTS
from coldframe.rollouts.sift import is_in
from coldframe.rollouts.step_files import bring_files
from coldframe.rollouts.task import VerifierSpec
from coldframe.rollouts.verifier import Verifier

if TYPE_CHECKING:
    from coldframe.client import AsyncSandbox
    from coldframe.rollouts.stage import Stage

SLACK_S = 300.0
DEVICES_S = 30.0
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty", "ptmx")
_OURS = (LOGS, TESTS, "/etc/resolv.conf")


def control_s(spec: VerifierSpec) -> float:
    """Return the longest that `gives_a_verdict` may take."""
    return spec.timeout_s + SLACK_S


async def broken(verifier: Verifier) -> str | None:
    """Name something that the tests may rest on and that is not as the image has it; None: nothing.

    Raises:
        SandboxGoneError and other ColdframeErrors: the platform failed.
    """
    if verifier.record().cwd is not None:
        return "the working directory"
    if verifier.conditions.lacked_memory:
        return "how much memory is free"
    for event in verifier.tampering.events:
        if event.what in {PROGRAM_CHANGED, USER_CHANGED}:
            return event.path
    return await _changed(verifier.sandbox) or await _without_devices(verifier.sandbox)


async def _changed(sandbox: AsyncSandbox) -> str | None:
    """Name a file of the image's outside the working directory that was changed or removed."""
    work = sandbox.info.workdir
    not_looked_at = _OURS if work == "/" else (*_OURS, work)
    try:
        found = await sandbox.changes(None, limit=MOST_CHANGES)
    except (CapabilityError, FileError):
        return "more than can be told"
    for one in found.entries:
        path = os.fsdecode(one.path)
        if one.change is not Change.CREATED and not is_in(path, not_looked_at):
            return excerpt(path)
    return "more than can be listed" if found.left_out else None


async def _without_devices(sandbox: AsyncSandbox) -> str | None:
    """Ask the sandbox itself, whose programs are the image's by now: /dev is nobody else's."""
    devices = " && ".join(f"[ -c /dev/{name} ]" for name in _DEVICES)
    try:
        result = await sandbox.exec(devices, user=0, cwd="/", deadline_s=DEVICES_S)
    except NotExecutedError:
        return None
    return None if result.ok else "what is in /dev"


async def gives_a_verdict(stage: Stage) -> bool:
    """Whether the stage's tests give one in a sandbox like the agent's that it never was in."""
    attempt, spec = stage.attempt, stage.step.verifier
    task = attempt.task
    limit = control_s(spec)
    try:
        async with (
            asyncio.timeout(limit),
            attempt.fresh_sandbox(task.environment, limit + SLACK_S, spec.network) as sandbox,
        ):
            attempt.expect_image(AGENT_IMAGE, sandbox)
            booted = await boot(sandbox, task.environment.healthcheck, start_cmd=task.start_cmd)
            for done in attempt.stages:
                await bring_files(sandbox, done.step, attempt.redactor)
            await Verifier(
                *(sandbox, spec, attempt.recorder),
                agent_paths=task.agent_paths,
                not_the_agents=booted.operation_id,
            ).grade()
    except (ColdframeError, TimeoutError):
        return False
    finally:
        attempt.grader = None
    return True
