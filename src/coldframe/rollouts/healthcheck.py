"""Wait until a sandbox is healthy, by Docker's rules for a HEALTHCHECK.

A check that began within the start period may fail at no cost. After it, `retries` failures in a
row mean that it is not healthy; one success, at any time, that it is. We look at once instead of
after one interval, and are done at the first success: this is a gate, not a watch.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from coldframe.harnesses.base import check_platform
from coldframe.harnesses.scripts import shell_of
from coldframe.protocol.errors import CreateError, NotExecutedError
from coldframe.protocol.models import ExecResult, Reason
from coldframe.protocol.text import excerpt
from coldframe.rollouts.task import Healthcheck

if TYPE_CHECKING:
    from coldframe.client import AsyncSandbox

SHOWN_BYTES = 2000
"""Of the last check's output, in the message of a failure."""
SHORTEST_PAUSE_S = 0.01


class UnhealthyError(CreateError):
    """The sandbox did not become healthy; the message shows what the last check said."""

    code = "unhealthy"


async def wait_healthy(
    sandbox: AsyncSandbox, check: Healthcheck, *, user: str | int | None = None
) -> int:
    """Run a healthcheck until it succeeds; return how often it was run.

    Args:
        user: who runs it; None: the sandbox's own.
    Raises:
        UnhealthyError: it failed as often as it may.
        SandboxGoneError and other ColdframeErrors: the platform failed.
    """
    begun = time.monotonic()
    shell = await shell_of(sandbox)
    checks = failures = 0
    while True:
        began_after_s = time.monotonic() - begun
        checks += 1
        wrong = await _run(sandbox, check, user, shell)
        now_s = time.monotonic() - begun
        if wrong is None:
            return checks
        if began_after_s >= check.start_period_s:
            failures += 1
        if failures >= check.retries:
            raise UnhealthyError(
                f"healthcheck {excerpt(_line(check))}: failed {failures} times in a row after a "
                f"start period of {check.start_period_s:g} s, {checks} times in {now_s:.1f} s in "
                f"all; the last: {wrong}"
            )
        starting = now_s < check.start_period_s
        pause_s = check.start_interval_s if starting else check.interval_s
        await asyncio.sleep(max(pause_s, SHORTEST_PAUSE_S))


async def _run(
    sandbox: AsyncSandbox, check: Healthcheck, user: str | int | None, shell: str
) -> str | None:
    """Run it once; return what was wrong, or None."""
    try:
        result = await sandbox.exec(
            check.command,
            shell=shell,
            user=user,
            deadline_s=check.timeout_s,
            window_bytes=SHOWN_BYTES,
        )
    except NotExecutedError as error:
        return f"it was not started: {error}"
    check_platform(result)
    return None if result.ok else said(result)


def said(result: ExecResult) -> str:
    """Return how a command ended, and the last that it wrote, as part of a message."""
    if result.reason is Reason.DEADLINE:
        end = f"not done after {result.request.deadline_s:g} s"
    elif result.signal is not None:
        end = f"{result.reason}, signal {result.signal}"
    else:
        end = f"exit code {result.exit_code}"
    output = (result.stdout + result.stderr).decode("utf-8", "replace").strip()
    return f"{end}, output {excerpt(output[-SHOWN_BYTES:], SHOWN_BYTES)}"


def _line(check: Healthcheck) -> str:
    return check.command if isinstance(check.command, str) else " ".join(check.command)
