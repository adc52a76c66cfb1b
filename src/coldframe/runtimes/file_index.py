"""What one look saw of a tree, entry by entry in the order of the walk, as bytes.

A record holds a name and how deep it lies, never a path: a tree of any depth costs its entries.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator
from typing import NamedTuple

from coldframe.protocol.errors import NotKnownError
from coldframe.protocol.models import FileKind

MOST_BYTES = 16 << 20
"""Of one index: about 200,000 entries."""

WHITEOUT, OPAQUE, DIRECTORY, FILE, LINK = b"w", b"o", b"d", b"f", b"l"
KINDS = {
    FILE: FileKind.FILE,
    DIRECTORY: FileKind.DIRECTORY,
    OPAQUE: FileKind.DIRECTORY,
    LINK: FileKind.LINK,
    b"p": FileKind.FIFO,
    b"s": FileKind.SOCKET,
    b"c": FileKind.DEVICE,
}
_LETTERS = {
    stat.S_IFREG: FILE,
    stat.S_IFDIR: DIRECTORY,
    stat.S_IFLNK: LINK,
    stat.S_IFIFO: b"p",
    stat.S_IFSOCK: b"s",
}
_PLACE = struct.Struct("<IHB")
_STATE = struct.Struct("<cHIIQ")
_INODE = struct.Struct("<Qq")
FRESH = _INODE.pack(0, 0)
"""Stands for an inode that was written too lately: another write may leave it the same time."""
_NAME_AT = _PLACE.size + _STATE.size + _INODE.size


class Seen(NamedTuple):
    """One entry as a look saw it."""

    depth: int
    """0 for the root, 1 for what lies in it."""
    name: bytes
    state: bytes
    """Kind, mode, owner and size, packed."""
    inode: bytes
    """Number and time of change, packed; what is the same here was not written in between."""
    content: bytes
    """SHA-256 of content or target; empty: not known, or there is none."""
    record: bytes | None = None
    """As it stands in an index."""

    @property
    def kind(self) -> bytes:
        """One of KINDS, or WHITEOUT."""
        return self.state[:1]


def letter(status: os.stat_result) -> bytes:
    """Return the kind of what a status is of; whiteouts and opaque directories need a look."""
    return _LETTERS.get(stat.S_IFMT(status.st_mode), b"c")


def state_of(kind: bytes, status: os.stat_result) -> bytes:
    """Return what makes two states of a path equal but for their content."""
    size = status.st_size if kind in (FILE, LINK) else 0
    mode = stat.S_IMODE(status.st_mode)
    return _STATE.pack(kind, mode, status.st_uid, status.st_gid, size)


def inode_of(status: os.stat_result) -> bytes:
    """Return what differs once an inode was written."""
    return _INODE.pack(status.st_ino, status.st_ctime_ns)


def size_in(state: bytes) -> int:
    """Return the size in a packed state."""
    return int(_STATE.unpack(state)[4])


class IndexWriter:
    """Collects records. Raises NotKnownError beyond MOST_BYTES."""

    def __init__(self) -> None:
        self.content = bytearray()

    def write(self, seen: Seen) -> None:
        """Append a record."""
        self.content += seen.record or b"".join(
            (
                _PLACE.pack(seen.depth, len(seen.name), len(seen.content)),
                *(seen.state, seen.inode, seen.name, seen.content),
            )
        )
        if len(self.content) > MOST_BYTES:
            raise NotKnownError(
                "what changed of its files could not be told: the sandbox has written more files "
                f"than an index of {MOST_BYTES >> 20} MiB holds"
            )


def records(index: bytes) -> Iterator[Seen]:
    """Yield the records of an index, in order."""
    at = 0
    while at < len(index):
        depth, name_size, content_size = _PLACE.unpack_from(index, at)
        state_at = at + _PLACE.size
        inode_at = state_at + _STATE.size
        name_at = at + _NAME_AT
        content_at = name_at + name_size
        end = content_at + content_size
        yield Seen(
            depth,
            index[name_at:content_at],
            index[state_at:inode_at],
            index[inode_at:name_at],
            index[content_at:end],
            index[at:end],
        )
        at = end
