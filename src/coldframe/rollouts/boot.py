"""Start what an image starts, and wait until the sandbox is healthy.

The image's ENTRYPOINT runs as a process of the sandbox: as the image's user, in its working
directory, without stdin. It is not pid 1, so it may stay in the foreground or leave daemons
behind and end; a container would end with it, a sandbox does not. It belongs to no phase: it lives
until the sandbox is deleted or a task demands that everything be killed. CMD is for tasks that ask
for it (docs/adr/0044-cmd-is-not-started.md).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from coldframe.harnesses.base import check_platform
from coldframe.protocol.errors import CreateError, NotExecutedError
from coldframe.protocol.models import ImageHealthcheck
from coldframe.protocol.text import excerpt
from coldframe.rollouts.healthcheck import said, wait_healthy
from coldframe.rollouts.task import Healthcheck

if TYPE_CHECKING:
    from coldframe.client import AsyncProcess, AsyncSandbox

BOOT_S = 600.0
"""For making a sandbox, its wait on the node included, and again for starting what it starts,
beside what a healthcheck may take. No other phase's time covers either."""
SETTLE_S = 0.5
"""Without a healthcheck: how long an entry point may take to fail, or to leave its daemons."""
IDLE = ("sh", "-c", "sleep infinity")
"""What task images are started with in the place of their CMD."""
_INTERACTIVE = re.compile(
    r"(ba|da|a|k|z|fi)?sh|(python|pypy|node|ruby|perl|php|lua|R|julia)[0-9.]*"
    r"|irb|iex|ghci|jshell|psql|sqlite3"
)


class EntryPointError(CreateError):
    """The image's entry point could not be started, or failed; the message shows its output."""

    code = "entry_point_failed"


class BootDeadlineError(CreateError):
    """The sandbox was not ready in time; what had been made of it is gone."""

    code = "boot_deadline"


def boot_s(check: Healthcheck | None) -> float:
    """Return the longest that a boot may take."""
    return BOOT_S + (0.0 if check is None else check.longest_s)


@asynccontextmanager
async def boot_time(seconds: float) -> AsyncIterator[None]:
    """Bound what makes a sandbox ready.

    Raises:
        BootDeadlineError: it took longer.
    """
    timer = asyncio.timeout(seconds)
    try:
        async with timer:
            yield
    except TimeoutError:
        if not timer.expired():
            raise
        raise BootDeadlineError(f"the sandbox was not ready within {seconds:g} s") from None


@dataclass(frozen=True)
class Booted:
    """What runs in a sandbox before any agent does."""

    command: tuple[str, ...] = ()
    """The image's entry point; empty: it has none."""
    operation_id: str | None = None
    """Of the entry point."""
    checks: int | None = None
    """How often its health was asked for; None: nobody says how to ask."""


def entry_point(
    entrypoint: Sequence[str], cmd: Sequence[str], *, start_cmd: bool = False
) -> tuple[str, ...]:
    """Return what is started.

    Args:
        start_cmd: ENTRYPOINT with CMD, as a container would; but a CMD alone that is only a
            shell or an interpreter waits for somebody to type, and is left out. Otherwise
            ENTRYPOINT alone, with a command that idles in the place of CMD.
    """
    if not start_cmd:
        return (*entrypoint, *IDLE) if entrypoint else ()
    if not entrypoint and _is_interactive(cmd):
        return ()
    return (*entrypoint, *cmd)


def _is_interactive(cmd: Sequence[str]) -> bool:
    words = cmd[2].split() if len(cmd) == 3 and tuple(cmd[:2]) == ("/bin/sh", "-c") else cmd
    if not words:
        return True
    plain = all(word.startswith("-") and word != "-c" for word in words[1:])
    return plain and _INTERACTIVE.fullmatch(PurePosixPath(words[0]).name) is not None


def of_image(check: ImageHealthcheck) -> Healthcheck:
    """Return the healthcheck of an image, which a container first runs after one interval.

    We look sooner. So that looking sooner never costs one of the retries, the first interval
    belongs to the start period.
    """
    return Healthcheck(
        check.argv,
        interval_s=check.interval_s,
        timeout_s=check.timeout_s,
        start_period_s=max(check.start_period_s, check.interval_s),
        start_interval_s=min(check.start_interval_s, check.interval_s),
        retries=check.retries,
    )


async def boot(
    sandbox: AsyncSandbox, check: Healthcheck | None, *, start_cmd: bool = False
) -> Booted:
    """Start the image's entry point and wait until the sandbox is healthy.

    Args:
        check: the task's; None: the image's, if it has one.
        start_cmd: see `entry_point`.
    Raises:
        EntryPointError: it was not started, or ended with anything but exit code 0.
        UnhealthyError: the healthcheck failed as often as it may.
        SandboxGoneError and other ColdframeErrors: the platform failed.
    """
    image = sandbox.info.image_start
    command = entry_point(image.entrypoint, image.cmd, start_cmd=start_cmd)
    if check is None and image.healthcheck is not None:
        check = of_image(image.healthcheck)
    if not command:
        return Booted(checks=None if check is None else await wait_healthy(sandbox, check))
    try:
        process = await sandbox.start(command)
        checks = await _beside(process, command, sandbox, check)
    except NotExecutedError as error:
        raise EntryPointError(
            f"the image's entry point {excerpt(' '.join(command))} was not started: {error}"
        ) from error
    return Booted(command, process.operation_id, checks)


async def _beside(
    process: AsyncProcess,
    command: tuple[str, ...],
    sandbox: AsyncSandbox,
    check: Healthcheck | None,
) -> int | None:
    """Wait until healthy while the entry point has not failed."""
    ended = asyncio.ensure_future(process.wait())
    healthy = asyncio.ensure_future(
        asyncio.sleep(SETTLE_S) if check is None else wait_healthy(sandbox, check)
    )
    try:
        await asyncio.wait({ended, healthy}, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            result = ended.result()
            check_platform(result)
            if not result.ok:
                raise EntryPointError(
                    f"the image's entry point {excerpt(' '.join(command))} failed: {said(result)}"
                )
            if check is None:
                return None
        return await healthy
    finally:
        for waiting in (ended, healthy):
            waiting.cancel()
        await asyncio.gather(ended, healthy, return_exceptions=True)
