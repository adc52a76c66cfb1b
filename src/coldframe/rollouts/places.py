"""The places in a sandbox that the verifier alone has: its tests and its log directory.

Taken over whatever lies there and whoever goes on writing into it; closed to everybody else.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from coldframe.protocol.errors import FileError, PathNotFoundError
from coldframe.protocol.models import FileKind

if TYPE_CHECKING:
    from coldframe.client import AsyncSandbox

TESTS = "/tests"
LOGS = "/logs"
VERIFIER_LOGS = "/logs/verifier"
PLACES = (TESTS, VERIFIER_LOGS)
ROOT = (0, 0)
REMOVE_S = 10.0
HEADROOM_BYTES = 64 << 20
"""That the verifier may write beside a disk which the agent has filled."""


async def kind_of(sandbox: AsyncSandbox, path: str) -> FileKind | None:
    """Return what a path is, itself; None: nothing."""
    try:
        return (await sandbox.files.stat(path, follow=False)).kind
    except PathNotFoundError:
        return None


async def clear(sandbox: AsyncSandbox, *, tests: bool) -> tuple[str, ...]:
    """Empty the places, whatever lies there, and return what was in the way.

    Args:
        tests: whether /tests too; else the image's own stand there.
    Raises:
        FileError: somebody with root's rights undoes it.
    """
    files = sandbox.files
    removed = []
    await sandbox.unguard()
    await sandbox.extend_disk(HEADROOM_BYTES)
    if await kind_of(sandbox, LOGS) not in {None, FileKind.DIRECTORY}:
        await files.remove(LOGS)
        removed.append(LOGS)
    await files.mkdir(LOGS, mode=0o755, owner=ROOT)
    # Who owns a directory may rename and make what lies in it, so an agent's /logs is taken
    # over, before anything in it is made anew.
    await files.chown(LOGS, *ROOT)
    await files.chmod(LOGS, 0o755)
    for path in PLACES if tests else (VERIFIER_LOGS,):
        if await _take_away(sandbox, path):
            removed.append(path)
    # Closed to everybody but the verifier: what the agent left running as another user must
    # neither write the reward nor read the tests.
    await files.mkdir(VERIFIER_LOGS, mode=0o700, owner=ROOT, exist_ok=False)
    if tests:
        await files.mkdir(TESTS, mode=0o700, owner=ROOT, exist_ok=False)
    return tuple(removed)


async def _take_away(sandbox: AsyncSandbox, path: str) -> bool:
    """Remove what lies there, whatever somebody goes on putting into it; say if it did."""
    if await kind_of(sandbox, path) is None:
        return False
    parent, _, name = path.rpartition("/")
    aside = f"{parent}/.{name}-{secrets.token_hex(8)}"
    await sandbox.files.move(path, aside)
    # What is still being written into is out of the way, and nobody's place any more. A million
    # files take minutes: the node goes on with them, and nobody waits.
    with suppress(FileError, TimeoutError):
        async with asyncio.timeout(REMOVE_S):
            await sandbox.files.remove(aside, recursive=True)
    return True


async def withdraw(sandbox: AsyncSandbox) -> None:
    """Take back what the verifier alone has: the next agent must not find it."""
    await sandbox.unguard()
    for path in PLACES:
        if await kind_of(sandbox, path) is not None:
            await sandbox.files.remove(path, recursive=True)


async def hand_over(sandbox: AsyncSandbox, owner: tuple[int, int], places: Sequence[str]) -> None:
    """Give the verifier's places to its user."""
    for path in places:
        if await kind_of(sandbox, path) is FileKind.DIRECTORY:
            await sandbox.files.chown(path, *owner)
