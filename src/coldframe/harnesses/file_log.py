"""Look at a sandbox's files after each command, so that each step says what became of them.

A look costs what was written over the image. It tells how two instants differ: what runs beside
the command, or was left by an earlier one, is not told apart.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from coldframe.protocol.errors import CapabilityError, FileError
from coldframe.trajectories.files import ChangedFile, ChangedFiles
from coldframe.trajectories.recorder import Recorder, plain_text

if TYPE_CHECKING:
    from coldframe.client import AsyncSandbox
    from coldframe.protocol.models import FileChange

LISTED = 200
"""Paths that are kept of one look; all are counted."""
_MOST_FAILURES = 3
"""In a row; each may have taken as long as the node allows a look."""


@dataclass
class FileLog:
    """The looks of one episode."""

    sandbox: AsyncSandbox
    recorder: Recorder
    _mark: str | None = None
    _at: float | None = None
    """When the look before was answered; None: there was none."""
    _failures: int = 0
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def begin(self) -> None:
        """Look at what is there before the agent acts."""
        await self.told()

    async def told(self) -> ChangedFiles | str:
        """Return what changed since the look before, or why that is not known.

        Raises:
            SandboxGoneError: the sandbox ended; other ColdframeErrors: the platform failed.
        """
        async with self._turn:
            if self._failures >= _MOST_FAILURES:
                return f"not looked: {_MOST_FAILURES} looks in a row had told nothing"
            try:
                found = await self.sandbox.changes(self._mark, limit=LISTED)
            except (CapabilityError, FileError) as error:
                self._failures += 1
                return plain_text(str(error))
            before, now = self._at, time.time()
            if found.mark is None:
                self._at = None
            elif found.mark != self._mark or not found.total:
                self._at = now  # else it could not be kept: the next look tells this again
            self._mark, self._failures = found.mark, 0
            self.recorder.files_excluded = found.excluded
            if before is None:
                return "there was no look before it to compare with"
            return ChangedFiles(
                from_at=before,
                to_at=now,
                created=found.created,
                changed=found.changed,
                removed=found.removed,
                entries=tuple(map(self._changed, found.entries)),
                left_out=found.left_out,
            )

    def _changed(self, one: FileChange) -> ChangedFile:
        return ChangedFile(
            path=self.recorder.words(one.path),
            change=one.change,
            kind=one.kind,
            size=one.size,
            sha256=one.sha256,
        )
