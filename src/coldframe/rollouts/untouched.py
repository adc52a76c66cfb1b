"""Tell whether what an agent broke is why the tests give no verdict, or a step has no begin.

Two things have to come together: something of the image is not what it was outside the agent's
work, and the same succeeds in a sandbox of that image that no agent was in. Either
alone is no evidence: honest agents change their system, and tests fail by themselves.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from coldframe.protocol.errors import (
    CapabilityError,
    ColdframeError,
    FileError,
    GradingPreventedError,
    NotExecutedError,
    VerifierError,
)
from coldframe.protocol.models import MOST_CHANGES, Change
from coldframe.protocol.text import excerpt
from coldframe.rollouts.boot import boot
from coldframe.rollouts.environment import AGENT_IMAGE
from coldframe.rollouts.integrity import PROGRAM_CHANGED, USER_CHANGED
from coldframe.rollouts.places import LOGS, TESTS
from coldframe.rollouts.sift import is_in
from coldframe.rollouts.step_files import SETUP_S, bring_files
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
    """Return the longest that the second sandbox of a verdict may take."""
    return spec.timeout_s + SLACK_S


async def require_not_prevented(error: VerifierError, stage: Stage, verifier: Verifier) -> None:
    """Look into why the tests gave no verdict in the agent's sandbox.

    Raises:
        GradingPreventedError: for what the agent broke.
        SandboxGoneError and other ColdframeErrors: the platform failed.
    """
    broken = await _broken(verifier)
    if broken is None:
        return
    task, spec = stage.attempt.task, stage.step.verifier
    try:
        async with _control(stage, control_s(spec)) as (sandbox, entry_point):
            await Verifier(
                *(sandbox, spec, stage.attempt.recorder),
                agent_paths=task.agent_paths,
                not_the_agents=entry_point,
            ).grade()
    except (ColdframeError, TimeoutError):
        return
    raise GradingPreventedError(
        f"{error}; {broken} is not as it was before the agent acted, and in a sandbox that no "
        "agent was in the same tests give a verdict"
    ) from error


async def require_set_up(error: ColdframeError, stage: Stage) -> None:
    """Look into why a step could not be set up once an agent had acted.

    Raises:
        GradingPreventedError: for what it broke.
        SandboxGoneError and other ColdframeErrors: the platform failed.
    """
    broken = await _broken_system(stage.sandbox)
    if broken is None:
        return
    try:
        async with _control(stage, SETUP_S + SLACK_S):
            pass
    except (ColdframeError, TimeoutError):
        return
    raise GradingPreventedError(
        f"{error}; {broken} is not as it was before an agent acted, and a sandbox that no agent "
        "was in can be set up so"
    ) from error


async def _broken(verifier: Verifier) -> str | None:
    """Name something that the tests may rest on and that is not as it was; None: nothing."""
    if verifier.record().cwd is not None:
        return "the working directory"
    if verifier.conditions.lacked_memory:
        return "how much memory is free"
    for event in verifier.tampering.events:
        if event.what in {PROGRAM_CHANGED, USER_CHANGED}:
            return event.path
    return await _broken_system(verifier.sandbox)


async def _broken_system(sandbox: AsyncSandbox) -> str | None:
    return await _changed(sandbox) or await _without_devices(sandbox)


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


@asynccontextmanager
async def _control(stage: Stage, limit_s: float) -> AsyncIterator[tuple[AsyncSandbox, str | None]]:
    """Give a sandbox like the agent's that it never was in, set up as this step's is, and the
    operation of its entry point.

    Raises:
        TimeoutError: all of it took longer than `limit_s`.
        ColdframeErrors: it cannot be made so.
    """
    attempt = stage.attempt
    task, network = attempt.task, stage.step.verifier.network
    try:
        async with (
            asyncio.timeout(limit_s),
            attempt.fresh_sandbox(task.environment, limit_s + SLACK_S, network) as sandbox,
        ):
            attempt.expect_image(AGENT_IMAGE, sandbox)
            booted = await boot(sandbox, task.environment.healthcheck, start_cmd=task.start_cmd)
            for done in attempt.stages:
                runner = replace(done.runner, sandbox=sandbox)
                await bring_files(runner, done.step, attempt.redactor)
            yield sandbox, booted.operation_id
    finally:
        attempt.grader = None
