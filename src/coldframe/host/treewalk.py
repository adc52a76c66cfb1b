"""Walk directory trees that may be hostile, without ever following a link.

Nothing is reached by a path of more than one component below a held descriptor, so neither links
nor depth nor long paths matter: a level costs two system calls and its own name, however deep.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from coldframe.protocol.errors import FileTooLargeError

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_DIRECTORY = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})


@dataclass(slots=True)  # frozen would take as long to make as the look at the inode
class Entry:
    """One name of a tree while the walk stands on it."""

    parent: int
    """Descriptor of the directory that holds it; valid until the walk goes on."""
    name: bytes
    above: bytes | bytearray
    """Path of its directory with a slash behind it; the walk's own, which it changes."""
    stat: os.stat_result
    depth: int = 1
    """0 for the root, 1 for what lies in it."""

    @property
    def path(self) -> bytes:
        """Relative to the tree's root, without a leading slash; `.` for the root.

        Made anew at each look, and only until the walk goes on.
        """
        return bytes(self.above) + self.name

    @property
    def proc_path(self) -> bytes:
        """A path for calls that take no descriptor; its last component is not followed."""
        return b"/proc/self/fd/%d/%s" % (self.parent, self.name)


@dataclass(slots=True)
class _Level:
    identity: tuple[int, int]
    names: list[bytes]
    path_size: int
    """How much of the path leads here, the slash included."""


def identity(status: os.stat_result) -> tuple[int, int]:
    """Return what makes an inode one: device and number."""
    return status.st_dev, status.st_ino


def walk(
    root: Path | int,
    most_names: int | None = None,
    *,
    enter: Callable[[Entry], bool] = lambda _: True,
    moving: bool = False,
) -> Iterator[Entry]:
    """Yield every entry below `root`, the root first, directories before their content.

    Names of one directory come in the order of their bytes. One descriptor is open at a
    time, whatever the depth: the way up is `..`, checked. Directories that `enter` does not
    want are yielded, and not looked into. In a `moving` tree a name that is gone, or no directory
    any more, when the walk comes to it is passed over.

    Raises:
        OSError: the tree cannot be read; ESTALE: it changed under the walk, where the walk stood.
        FileTooLargeError: more than `most_names` would have to be held at once.
    """
    fd = os.open(root, DIRECTORY) if isinstance(root, Path) else os.dup(root)
    above = bytearray()
    try:
        status = os.fstat(fd)
        yield Entry(fd, b".", above, status, 0)
        names = _names(fd, most_names)
        held = len(names)
        stack = [_Level(identity(status), names, 0)]
        while True:
            level = stack[-1]
            if not level.names:
                stack.pop()
                if not stack:
                    return
                fd = _ascend(fd, stack[-1].identity)
                del above[stack[-1].path_size :]
                continue
            name = level.names.pop()
            held -= 1
            try:
                status = os.stat(name, dir_fd=fd, follow_symlinks=False)
            except FileNotFoundError:
                if moving:
                    continue
                raise
            entry = Entry(fd, name, above, status, len(stack))
            yield entry
            if stat.S_ISDIR(status.st_mode) and enter(entry):
                try:
                    fd = _descend(fd, name)
                except OSError as error:
                    if moving and error.errno in _NO_DIRECTORY:
                        continue
                    raise
                above += name + b"/"
                names = _names(fd, None if most_names is None else most_names - held)
                held += len(names)
                stack.append(_Level(identity(os.fstat(fd)), names, len(above)))
    finally:
        os.close(fd)


def _names(fd: int, most: int | None) -> list[bytes]:
    """Return the names in a directory, last first, as bytes."""
    if most is None:
        names = names_of(fd)
    else:
        names = []
        with os.scandir(fd) as entries:
            for entry in entries:
                names.append(os.fsencode(entry.name))
                if len(names) > most:
                    raise FileTooLargeError("a tree has too many names in its directories")
    names.sort(reverse=True)
    return names


def names_of(directory: int) -> list[bytes]:
    """Return the names in a directory, in no order."""
    return [os.fsencode(name) for name in os.listdir(directory)]


def _descend(fd: int, name: bytes) -> int:
    below = os.open(name, DIRECTORY, dir_fd=fd)
    os.close(fd)
    return below


def _ascend(fd: int, expected: tuple[int, int]) -> int:
    above = os.open("..", DIRECTORY, dir_fd=fd)
    if identity(os.fstat(above)) != expected:
        os.close(above)
        raise OSError(errno.ESTALE, "a directory was moved while its tree was being read")
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
