"""Files of sandboxes, and what became of them."""

from __future__ import annotations

from enum import StrEnum

from coldframe.protocol.models.base import MIB, Model

HASHED_FILE_BYTES = 16 * MIB
"""Of a changed file up to this size the digest is told."""
MOST_CHANGES = 1000
"""Changed paths that are told at once; all are counted."""


class FileKind(StrEnum):
    """What a path is."""

    FILE = "file"
    DIRECTORY = "directory"
    LINK = "link"
    FIFO = "fifo"
    SOCKET = "socket"
    DEVICE = "device"


class FileStat(Model):
    """Metadata of one path in the sandbox; ids are the sandbox's own."""

    kind: FileKind
    mode: int
    """Permission bits, 0 to 0o7777."""
    uid: int
    gid: int
    size: int
    mtime_ns: int
    ctime_ns: int
    """Of its last change of content, names or metadata; nobody inside can set it."""
    nlink: int
    blocks: int
    """Allocated blocks of 512 bytes."""
    target: bytes | None = None
    """Of a link."""


class FileEntry(Model):
    """One name in a directory. The name is hostile bytes."""

    name: bytes
    stat: FileStat


class Change(StrEnum):
    """What became of a path between two looks."""

    CREATED = "created"
    CHANGED = "changed"
    """Its content, kind, mode or owner."""
    REMOVED = "removed"


class FileChange(Model):
    """One path that is not what it was. The path is hostile bytes."""

    path: bytes
    """Absolute."""
    change: Change
    kind: FileKind
    """As it is now; of what was removed, as it was."""
    size: int = 0
    """Of a file as it is now; else 0."""
    sha256: str | None = None
    """Of a file's content; None: not read, for it is over HASHED_FILE_BYTES or the look's sum."""


class FileChanges(Model):
    """How a sandbox's files differ between two looks; it says nothing of who changed them."""

    since: str | None
    """The mark of the look before; None: compared with the image."""
    mark: str | None
    """To be given as `since` next time. None: no look could be kept, compare with the image."""
    created: int
    changed: int
    removed: int
    """A directory stands for all that went with it."""
    entries: tuple[FileChange, ...]
    """The first of them, in the order of their paths."""
    excluded: tuple[str, ...]
    """What is not looked at."""

    @property
    def total(self) -> int:
        """How many paths there are, those that `entries` leaves out included."""
        return self.created + self.changed + self.removed

    @property
    def left_out(self) -> int:
        """How many paths `entries` leaves out."""
        return self.total - len(self.entries)
