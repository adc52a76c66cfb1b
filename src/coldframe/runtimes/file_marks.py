"""Keep what the last looks at a sandbox's files have seen, each under a mark.

In a directory the indexes lie beside the upper: they go with the sandbox, outlive a daemon, and
cost neither memory nor a descriptor.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from coldframe.host.patience import Patience
from coldframe.host.roottree import closing
from coldframe.host.treewalk import DIRECTORY, names_of
from coldframe.protocol.errors import NotKnownError
from coldframe.protocol.models import Change, FileChanges
from coldframe.protocol.text import excerpt
from coldframe.runtimes.file_changes import EXCLUDED, look

KEPT = 4
"""Marks of one sandbox: the last one, that of an answer that was lost, and those of others."""
_PREFIX = "mark."


class Marks(Protocol):
    """Indexes of one sandbox by their marks."""

    def read(self, mark: str) -> bytes:
        """Raises KeyError."""

    def keep(self, index: bytes) -> str:
        """Return its mark; older ones than the last KEPT are dropped. Raises OSError."""


class MarksInMemory:
    """See `Marks`."""

    def __init__(self) -> None:
        self._kept: dict[str, bytes] = {}
        self._made = 0

    def read(self, mark: str) -> bytes:
        """See `Marks.read`."""
        return self._kept[mark]

    def keep(self, index: bytes) -> str:
        """See `Marks.keep`."""
        self._made += 1
        self._kept[str(self._made)] = index
        for mark in list(self._kept)[:-KEPT]:
            del self._kept[mark]
        return str(self._made)


class MarksInDirectory:
    """See `Marks`; files in an open directory that is out of the sandbox's reach."""

    def __init__(self, directory: int) -> None:
        self._directory = directory

    def read(self, mark: str) -> bytes:
        """See `Marks.read`."""
        if mark not in self._marks():
            raise KeyError(mark)
        with os.fdopen(self._open(_PREFIX + mark, os.O_RDONLY), "rb") as file:
            return file.read()

    def keep(self, index: bytes) -> str:
        """See `Marks.keep`."""
        marks = sorted(self._marks(), key=int)
        mark = str(int(marks[-1]) + 1 if marks else 1)
        try:
            with os.fdopen(self._open(_PREFIX + mark, os.O_WRONLY | os.O_CREAT), "wb") as file:
                file.write(index)
        except OSError:
            with suppress(FileNotFoundError):
                os.unlink(_PREFIX + mark, dir_fd=self._directory)
            raise
        for old in marks[: 1 - KEPT]:
            os.unlink(_PREFIX + old, dir_fd=self._directory)
        return mark

    def _open(self, name: str, flags: int) -> int:
        return os.open(name, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=self._directory)

    def _marks(self) -> set[str]:
        # Opened anew: btrfs lists what was there when the descriptor was opened.
        with closing(os.open(".", DIRECTORY, dir_fd=self._directory)) as fd:
            names = map(os.fsdecode, names_of(fd))
            return {name.removeprefix(_PREFIX) for name in names if name.startswith(_PREFIX)}


def changes(
    upper: int,
    layers: Sequence[Path],
    marks: Marks,
    since: str | None,
    *,
    most: int,
    patience: Patience,
    as_created: bytes = b"",
) -> FileChanges:
    """Compare an upper with what it was at a mark, and keep what it is now.

    `as_created` is the index to compare with without a mark. The other arguments and what it
    raises: `file_changes.look`. Raises NotKnownError also for a mark that is not kept.
    """
    try:
        index = as_created if since is None else marks.read(since)
    except KeyError:
        raise NotKnownError(
            f"the mark {excerpt(str(since))} is not kept: a sandbox keeps its last {KEPT}; "
            "take a new one by a call without a mark"
        ) from None
    looked = look(upper, layers, index, patience, most)
    mark = since
    if looked.index != index:
        with suppress(OSError):  # no room: the next look is compared with what this one was
            mark = marks.keep(looked.index)
    return FileChanges(
        since=since,
        mark=mark,
        created=looked.counts[Change.CREATED],
        changed=looked.counts[Change.CHANGED],
        removed=looked.counts[Change.REMOVED],
        entries=looked.entries,
        excluded=EXCLUDED,
    )
