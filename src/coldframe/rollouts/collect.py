"""Run the commands that make files of what only a live process knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from coldframe.harnesses.base import check_platform
from coldframe.harnesses.scripts import shell_of
from coldframe.protocol.errors import NotExecutedError
from coldframe.rollouts.task import CollectHook
from coldframe.trajectories.recorder import Recorder, plain_text
from coldframe.trajectories.verification import Collected

if TYPE_CHECKING:
    from coldframe.client import AsyncSandbox


async def collect(
    sandbox: AsyncSandbox, hooks: Sequence[CollectHook], recorder: Recorder
) -> list[Collected]:
    """Run each hook with all that it starts killed after it, and return their records.

    Raises:
        SandboxGoneError, SpawnerLostError: the platform failed.
    """
    if not hooks:
        return []
    shell = await shell_of(sandbox)
    return [await _run(sandbox, hook, shell, recorder) for hook in hooks]


async def _run(
    sandbox: AsyncSandbox, hook: CollectHook, shell: str, recorder: Recorder
) -> Collected:
    command = recorder.redactor.text(plain_text(hook.command))
    try:
        result = await sandbox.exec(
            hook.command, shell=shell, user=hook.user, deadline_s=hook.timeout_s
        )
    except NotExecutedError as error:
        return Collected(command=command, error=plain_text(str(error)))
    check_platform(result)
    collected = Collected(
        command=command,
        reason=result.reason,
        exit_code=result.exit_code,
        stdout=recorder.output(result.out),
        stderr=recorder.output(result.err),
    )
    await sandbox.kill_processes(result.operation_id)
    return collected
