"""The digest of a tree: the same files give the same digest, whenever and wherever.

The form that is hashed is fixed in docs/images.md; a change of it needs a new version line.
Times are left out, so that a tree built twice is one layer.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from coldframe.host.treewalk import Entry, identity, open_file, walk
from coldframe.protocol.errors import ImageError
from coldframe.protocol.text import excerpt

VERSION = b"coldframe-tree-1"
MAX_ID = 65535
"""Sandboxes map this many ids; a file of a higher one could not be seen inside."""
MAX_FILE = 64 << 30
"""Bytes. A sparse file of an absurd size would keep the digest busy for days."""
MAX_TREE = 512 << 30
"""Bytes. So would many of them."""
MAX_ENTRIES = 4 << 20
"""What is kept of each while it is looked at adds up."""
MAX_PATH = 4095
"""Bytes. No program can name more, and records of a chain of directories grow as its square."""

_KINDS = {
    stat.S_IFREG: b"f",
    stat.S_IFDIR: b"d",
    stat.S_IFLNK: b"l",
    stat.S_IFIFO: b"p",
    stat.S_IFSOCK: b"s",
    stat.S_IFCHR: b"c",
    stat.S_IFBLK: b"b",
}
_LAYER_XATTRS = frozenset(f"trusted.overlay.{name}" for name in ("opaque", "redirect", "metacopy"))
_CARRIED_XATTRS = frozenset(
    ("security.capability", "system.posix_acl_access", "system.posix_acl_default")
)


@dataclass(frozen=True)
class TreeDigest:
    """What one pass over a tree finds."""

    digest: str
    size_bytes: int
    """Sum of the contents, each hard-linked file once."""
    entries: int


def digest_tree(root: Path) -> TreeDigest:
    """Return the digest of the tree below `root`.

    Raises:
        ImageError: an entry that no layer may hold, which the message names, or more than
            `MAX_TREE` bytes or `MAX_ENTRIES` entries.
        OSError: the tree cannot be read.
    """
    whole = hashlib.sha256()
    _feed(whole, VERSION)
    seen: dict[tuple[int, int], bytes] = {}
    size = count = 0
    for entry in walk(root):
        check_entry(entry)
        count += 1
        check_count(count)
        inode = identity(entry.stat)
        if not stat.S_ISDIR(entry.stat.st_mode) and entry.stat.st_nlink > 1:
            first = seen.setdefault(inode, entry.path)
            if first != entry.path:
                _feed(whole, b"h", entry.path, first)
                continue
        if stat.S_ISREG(entry.stat.st_mode):
            size += entry.stat.st_size
            if size > MAX_TREE:
                raise ImageError(f"its files have more than {MAX_TREE} bytes, holes included")
        _feed(whole, *_fields(entry))
    return TreeDigest(whole.hexdigest(), size, count)


def check_entry(entry: Entry) -> None:
    """Refuse what no layer may hold.

    Raises:
        ImageError: an id above 65535, a file of an absurd size, a path that no program can
            name, or a device that is not an overlay whiteout.
    """
    status, path = entry.stat, entry.path
    check_path(path)
    shown = os.fsdecode(path)
    if status.st_uid > MAX_ID or status.st_gid > MAX_ID:
        raise ImageError(
            f"{shown!r} belongs to {status.st_uid}:{status.st_gid}; "
            f"a layer holds the ids 0 to {MAX_ID} only"
        )
    _check_size(entry)
    if stat.S_ISBLK(status.st_mode) or (stat.S_ISCHR(status.st_mode) and status.st_rdev != 0):
        raise ImageError(f"{shown!r} is a device; layers hold none")


def check_path(path: bytes) -> None:
    """Refuse a path that no program can name. Raises ImageError."""
    if len(path) > MAX_PATH:
        raise ImageError(f"{excerpt(path)} is a path of over {MAX_PATH} bytes")


def check_count(entries: int) -> None:
    """Refuse more entries than a layer may have. Raises ImageError."""
    if entries > MAX_ENTRIES:
        raise ImageError(f"it has more than {MAX_ENTRIES} entries")


def _check_size(entry: Entry) -> None:
    size = entry.stat.st_size
    if stat.S_ISREG(entry.stat.st_mode) and size > MAX_FILE:
        raise ImageError(f"{excerpt(entry.path)} has {size} bytes; at most {MAX_FILE} are kept")


def is_whiteout(status: os.stat_result) -> bool:
    """Whether an entry of a layer says that the name is gone."""
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


def layer_xattrs(entry: Entry) -> Iterator[tuple[str, bytes]]:
    """Yield the extended attributes that belong to a layer, in order of their names."""
    for name in sorted(os.listxattr(entry.proc_path, follow_symlinks=False)):
        if name.startswith("user.") or name in _CARRIED_XATTRS or name in _LAYER_XATTRS:
            yield name, os.getxattr(entry.proc_path, name, follow_symlinks=False)


def strip_foreign_xattrs(root: Path) -> None:
    """Remove what overlay wrote for itself: file handles and counts of one file system.

    Left in place they would tie the layer to the disk that it was written on.
    """
    for entry in walk(root):
        for name in os.listxattr(entry.proc_path, follow_symlinks=False):
            if name.startswith("trusted.overlay.") and name not in _LAYER_XATTRS:
                os.removexattr(entry.proc_path, name, follow_symlinks=False)


def describe(whole: hashlib._Hash, entry: Entry) -> None:
    """Add the record of one entry to a digest, whoever owns it.

    Raises:
        ImageError: a file of an absurd size.
        OSError: it cannot be read.
    """
    _check_size(entry)
    _feed(whole, *_fields(entry, owner=b""))


def _fields(entry: Entry, owner: bytes | None = None) -> Iterator[bytes]:
    status = entry.stat
    yield _KINDS[stat.S_IFMT(status.st_mode)]
    yield entry.path
    yield b"%o" % stat.S_IMODE(status.st_mode)
    yield b"%d:%d" % (status.st_uid, status.st_gid) if owner is None else owner
    if stat.S_ISREG(status.st_mode):
        yield b"%d" % status.st_size
        yield _content(entry)
    elif stat.S_ISLNK(status.st_mode):
        yield os.readlink(entry.name, dir_fd=entry.parent)
    elif stat.S_ISCHR(status.st_mode):
        yield b"%d:%d" % (os.major(status.st_rdev), os.minor(status.st_rdev))
    for name, value in layer_xattrs(entry):
        yield b"x" + os.fsencode(name)
        yield value


def _content(entry: Entry) -> bytes:
    with os.fdopen(open_file(entry), "rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").digest()


def _feed(whole: hashlib._Hash, *fields: bytes) -> None:
    """Add one record: netstrings, then a newline, so that no two records look alike."""
    whole.update(b"".join(b"%d:%s," % (len(field), field) for field in fields) + b"\n")
