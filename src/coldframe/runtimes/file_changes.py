"""What has become of a sandbox's files since an earlier look, told from its upper alone.

The upper is walked beside the index of the look before, both in the order of the walk, so that
memory grows neither with depth nor with what did not change. What neither has is the image's.
The upper is hostile and may change meanwhile; a change that falls under the walk may be told now
or at the next look. Why no tree search by generation, nor events: docs/adr/0066.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path

from coldframe.host.patience import Patience
from coldframe.host.treewalk import Entry, walk
from coldframe.images.digest import is_whiteout
from coldframe.protocol.models import Change, FileChange
from coldframe.runtimes.file_contents import Contents
from coldframe.runtimes.file_index import (
    DIRECTORY,
    FILE,
    FRESH,
    KINDS,
    LINK,
    OPAQUE,
    WHITEOUT,
    IndexWriter,
    Seen,
    inode_of,
    letter,
    records,
    size_in,
    state_of,
)
from coldframe.runtimes.image_below import ImageBelow
from coldframe.runtimes.image_changes import at_rest, is_opaque, opened

EXCLUDED = (
    "times of files",
    "extended attributes",
    "which names are hard links of one file",
    "sizes of directories",
    "/proc, /sys, /dev and whatever else is mounted in the sandbox",
    "writes to a mapping of a file that was written by it at the look before",
)
MOST_PATH_BYTES = 256 << 10
"""All paths of one answer together: those of a deep tree are long."""
MOST_NAMES = 200_000
"""Names that are held at once."""
_FRESH_NS = 20_000_000
"""Longer than any kernel's tick, by which times of change are told apart."""


@dataclass(frozen=True)
class Looked:
    """What one look told."""

    counts: Counter[Change]
    entries: tuple[FileChange, ...]
    """In the order of their paths, not all of them."""
    index: bytes
    """To compare the next look with."""


def look(upper: int, layers: Sequence[Path], index: bytes, patience: Patience, most: int) -> Looked:
    """Compare an upper over its layers (top first) with the index of an earlier look.

    Args:
        upper: descriptor of the upper directory, not taken over.
        index: empty: compare with the layers alone.
        most: entries to return; all are counted.
    Raises:
        NotKnownError: it took longer than there was patience, or there is too much to index.
        FileTooLargeError: more than MOST_NAMES in its directories.
        FileError: it kept changing, or cannot be read.
    Blocks; run it in a thread.
    """
    return at_rest(layers, lambda image: _Look(upper, image, index, patience, most).run())


@dataclass
class _Level:
    """A directory on the way to where the walk stands."""

    was_hidden: bool
    """At the look before, nothing of the image's showed in it."""
    is_hidden: bool
    vanished: set[bytes] | None = None
    """Names of the image's that do not show any more, but for those that are told otherwise."""


class _Look:
    def __init__(
        self, upper: int, image: ImageBelow, index: bytes, patience: Patience, most: int
    ) -> None:
        self._upper, self._image, self._patience, self._most = upper, image, patience, most
        self._before: Iterator[Seen | None] = chain(records(index), repeat(None))
        self._next = next(self._before)
        self._after = IndexWriter()
        self._fresh_from_ns = time.time_ns() - _FRESH_NS
        self._contents = Contents(image, patience)
        self._path_bytes = MOST_PATH_BYTES
        self._counts: Counter[Change] = Counter()
        self._entries: list[FileChange] = []
        self._way: list[bytes] = []
        self._levels: list[_Level] = []
        self._shared = 0
        """How many names of the way lead to where the image's side stands, or stood above."""
        self._untold_below: int | None = None
        """Depth of something that went with all it held: that is not told again."""

    def run(self) -> Looked:
        for entry in walk(self._upper, MOST_NAMES, moving=True):
            self._patience.check()
            depth, name = entry.depth, entry.name
            self._pass_gone(depth, name)
            self._leave_to(depth)
            seen = self._next
            if seen is not None and seen.depth == depth and seen.name == name:
                self._next, self._untold_below = next(self._before), None
            else:
                seen = None
            self._note(entry, seen)
        self._pass_gone(0, b"")
        self._leave_to(0)
        entries = sorted(self._entries, key=lambda one: one.path)
        return Looked(self._counts, tuple(entries), bytes(self._after.content))

    # --- where it stands --------------------------------------------------------------

    def _leave_to(self, depth: int) -> None:
        """Go up to the directory that holds what lies at `depth`."""
        while len(self._levels) > depth:
            self._tell_vanished(len(self._levels) - 1)
            self._levels.pop()
        if len(self._way) >= depth:
            del self._way[max(depth - 1, 0) :]
            self._shared = min(self._shared, len(self._way))

    def _below(self, depth: int, name: bytes) -> os.stat_result | None:
        """What the image has at a name at this depth."""
        if depth == 0:
            return self._image.root_stat()
        above = depth - 1
        self._image.leave_to(min(self._shared, above))
        for one in self._way[self._image.depth : above]:
            self._image.enter(one)
        self._shared = above
        return self._image.look_at(name)[0]

    # --- what is not there any more ---------------------------------------------------

    def _pass_gone(self, depth: int, name: bytes) -> None:
        """Tell what the look before had seen ahead of this name, and is not in the upper now."""
        while (seen := self._next) is not None and (
            seen.depth > depth or (seen.depth == depth and seen.name < name)
        ):
            self._patience.check()
            self._next = next(self._before)
            if self._untold_below is None or seen.depth <= self._untold_below:
                self._untold_below = None
                self._gone(seen)

    def _gone(self, seen: Seen) -> None:
        self._leave_to(seen.depth)
        parent = self._levels[seen.depth - 1]
        if parent.vanished is not None:
            parent.vanished.discard(seen.name)
        below = None if parent.is_hidden else self._below(seen.depth, seen.name)
        if below is not None:
            change = Change.CREATED if seen.kind == WHITEOUT else Change.CHANGED
            self._tell(change, seen.name, state_of(letter(below), below))
        elif seen.kind != WHITEOUT:
            self._tell(Change.REMOVED, seen.name, seen.state)
        self._untold_below = seen.depth

    def _tell_vanished(self, depth: int) -> None:
        """Tell what the image has in a directory that was made anew."""
        for name in sorted(self._levels[depth].vanished or ()):
            del self._way[depth:]
            self._shared = min(self._shared, depth)
            below = self._below(depth + 1, name)
            if below is not None:
                self._tell(Change.REMOVED, name, state_of(letter(below), below))

    # --- what is there ----------------------------------------------------------------

    def _note(self, entry: Entry, seen: Seen | None) -> None:
        """Tell what became of an entry of the upper, and keep what it is now."""
        depth, name, status = entry.depth, entry.name, entry.stat
        parent = self._levels[depth - 1] if depth else _Level(False, False)
        if parent.vanished is not None:
            parent.vanished.discard(name)
        inode = inode_of(status)
        if seen is not None and seen.inode == inode:
            now = seen
        else:
            fresh = status.st_ctime_ns >= self._fresh_from_ns
            now = self._changed(entry, seen, parent, FRESH if fresh else inode)
        self._after.write(now)
        if now.kind in (DIRECTORY, OPAQUE):
            self._enter(entry, seen, now, parent)
        elif seen is not None and seen.kind in (DIRECTORY, OPAQUE):
            self._untold_below = depth

    def _enter(self, entry: Entry, seen: Seen | None, now: Seen, parent: _Level) -> None:
        was_hidden = parent.was_hidden or (seen is not None and seen.kind != DIRECTORY)
        level = _Level(was_hidden, parent.is_hidden or now.kind == OPAQUE)
        if now.kind == OPAQUE and not was_hidden and entry.depth:
            self._below(entry.depth, entry.name)  # stand where it lies
            level.vanished = self._image.names_in(entry.name)
        self._levels.append(level)
        if entry.depth:
            self._way.append(entry.name)

    def _changed(self, entry: Entry, seen: Seen | None, parent: _Level, inode: bytes) -> Seen:
        """Return what an entry is now, and tell how that differs from what it was."""
        depth, name = entry.depth, entry.name
        if is_whiteout(entry.stat):
            state = state_of(WHITEOUT, entry.stat)
        elif letter(entry.stat) == DIRECTORY and _opaque(entry):
            state = state_of(OPAQUE, entry.stat)
        else:
            state = _state(entry)
        below = None
        if seen is None and not parent.was_hidden:
            below = self._below(depth, name)
        before = _was(seen, below)
        if state[:1] == WHITEOUT:
            if before is not None:
                self._tell(Change.REMOVED, name, before)
            return Seen(depth, name, state, inode, b"")
        content = b""
        if before is None:
            content = self._contents.of(entry) if self._has_room else b""
            self._tell(Change.CREATED, name, state, content)
        elif not _same(before, state):
            content = self._contents.of(entry) if self._has_room else b""
            self._tell(Change.CHANGED, name, state, content)
        elif state[:1] in (FILE, LINK):
            was = self._contents.below(entry.name, below) if seen is None else seen.content
            content = self._contents.of(entry) if was or self._has_room else b""
            if not was or was != content:
                self._tell(Change.CHANGED, name, state, content)
        return Seen(depth, name, state, inode, content)

    # --- telling ----------------------------------------------------------------------

    @property
    def _has_room(self) -> bool:
        return len(self._entries) < self._most

    def _tell(self, change: Change, name: bytes, state: bytes, content: bytes = b"") -> None:
        self._counts[change] += 1
        if not self._has_room:
            return
        path = b"/" + (b"/".join((*self._way, name)) if self._levels else b"")
        self._path_bytes -= len(path)
        if self._path_bytes < 0:
            self._most = len(self._entries)
            return
        kind, removed = state[:1], change is Change.REMOVED
        self._entries.append(
            FileChange(
                path=path,
                change=change,
                kind=KINDS[kind],
                size=size_in(state) if kind == FILE and not removed else 0,
                sha256=content.hex() if kind == FILE and content else None,
            )
        )


def _state(entry: Entry) -> bytes:
    return state_of(letter(entry.stat), entry.stat)


def _was(seen: Seen | None, below: os.stat_result | None) -> bytes | None:
    """The state that showed before; None: nothing did."""
    if seen is not None:
        return None if seen.kind == WHITEOUT else seen.state
    return None if below is None else state_of(letter(below), below)


def _same(one: bytes, other: bytes) -> bool:
    """Whether two states are equal, but for whether a directory hides the image's."""
    return one[1:] == other[1:] and KINDS[one[:1]] == KINDS[other[:1]]


def _opaque(entry: Entry) -> bool:
    with suppress(FileNotFoundError, NotADirectoryError), opened(entry) as directory:
        return is_opaque(directory)
    return False  # gone meanwhile
