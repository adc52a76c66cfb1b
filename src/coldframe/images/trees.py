"""Walk and remove directory trees that may be hostile, without ever following a link.

Nothing is reached by a path of more than one component below a held descriptor, so neither
links nor depth nor long paths matter. The trees are at rest: their sandbox has ended.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from coldframe.protocol.errors import ImageError

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class Entry:
    """One name of a tree while the walk stands on it."""

    parent: int
    """Descriptor of the directory that holds it; valid until the walk goes on."""
    name: bytes
    path: bytes
    """Relative to the tree's root, without a leading slash; `.` for the root."""
    stat: os.stat_result

    @property
    def proc_path(self) -> bytes:
        """A path for calls that take no descriptor; its last component is not followed."""
        return b"/proc/self/fd/%d/%s" % (self.parent, self.name)


@dataclass
class _Level:
    identity: tuple[int, int]
    path: bytes
    names: list[bytes] = field(default_factory=list)


def identity(status: os.stat_result) -> tuple[int, int]:
    """Return what makes an inode one: device and number."""
    return status.st_dev, status.st_ino


def walk(root: Path | int) -> Iterator[Entry]:
    """Yield every entry below `root`, the root first, directories before their content.

    Names of one directory come in the order of their bytes. One descriptor is open at a
    time, whatever the depth: the way up is `..`, checked.

    Raises:
        OSError: the tree cannot be read.
        ImageError: it changed under the walk.
    """
    top = os.open(root, DIRECTORY) if isinstance(root, Path) else os.dup(root)
    fd = top
    try:
        status = os.fstat(fd)
        yield Entry(fd, b".", b".", status)
        stack = [_Level(identity(status), b"", _names(fd))]
        while True:
            level = stack[-1]
            if not level.names:
                stack.pop()
                if not stack:
                    return
                fd = _ascend(fd, stack[-1].identity)
                continue
            name = level.names.pop()
            path = level.path + name
            status = os.stat(name, dir_fd=fd, follow_symlinks=False)
            yield Entry(fd, name, path, status)
            if stat.S_ISDIR(status.st_mode):
                fd = _descend(fd, name)
                stack.append(_Level(identity(os.fstat(fd)), path + b"/", _names(fd)))
    finally:
        os.close(fd)


def _names(fd: int) -> list[bytes]:
    """Return the names in a directory, last first, as bytes."""
    return sorted((os.fsencode(name) for name in os.listdir(fd)), reverse=True)


def _descend(fd: int, name: bytes) -> int:
    below = os.open(name, DIRECTORY, dir_fd=fd)
    os.close(fd)
    return below


def _ascend(fd: int, expected: tuple[int, int]) -> int:
    above = os.open("..", DIRECTORY, dir_fd=fd)
    if identity(os.fstat(above)) != expected:
        os.close(above)
        raise ImageError("a directory was moved while its tree was being read")
    os.close(fd)
    return above


def open_file(entry: Entry) -> int:
    """Open a regular file of a walk for reading and return the descriptor.

    Raises OSError when it is anything else by now; never blocks.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(entry.name, flags, dir_fd=entry.parent)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.ESTALE, "changed while it was being read", entry.path)
    return fd


def remove_tree(path: Path) -> None:
    """Remove a file or tree, however deep; a missing one is fine.

    Directories are moved up beside the root before they are emptied, so depth costs nothing,
    a removal that was killed can be taken up again, and two may run at once.
    """
    try:
        if not stat.S_ISDIR(path.lstat().st_mode):
            path.unlink()
            return
        top = os.open(path, DIRECTORY)
    except FileNotFoundError:
        return
    try:
        while not _remove_emptied(path):
            _empty(top)
    finally:
        os.close(top)


def _remove_emptied(path: Path) -> bool:
    try:
        path.rmdir()
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        return False
    return True


def _empty(top: int) -> None:
    """Unlink what lies in `top`; what lay in its directories and is one comes up instead."""
    for name in _names(top):
        with suppress(FileNotFoundError):
            if _is_directory(top, name):
                _lift(top, name)
            else:
                os.unlink(name, dir_fd=top)


def _lift(top: int, name: bytes) -> None:
    """Remove one directory of `top`, moving the directories in it up into `top`."""
    fd = os.open(name, DIRECTORY, dir_fd=top)
    try:
        for child in _names(fd):
            with suppress(FileNotFoundError):
                if _is_directory(fd, child):
                    os.rename(child, secrets.token_hex(12), src_dir_fd=fd, dst_dir_fd=top)
                else:
                    os.unlink(child, dir_fd=fd)
    finally:
        os.close(fd)
    os.rmdir(name, dir_fd=top)


def _is_directory(fd: int, name: bytes) -> bool:
    return stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode)
