"""Remove a hostile tree: any depth and names, no link followed, few descriptors."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass

from coldframe.host import syscalls
from coldframe.host.roottree import RootTree, closing, typed_errors
from coldframe.protocol.errors import FileError
from coldframe.protocol.text import excerpt

_BATCH, _LARGEST_BATCH = 512, 1 << 16
"""Directories that one pass over a directory notes: twice as many each time, since whoever has made
many may have made half a million."""
_PASSES = 1000
_OPEN_LEVELS = 64
_STAY = syscalls.RESOLVE_NO_XDEV | syscalls.RESOLVE_NO_SYMLINKS | syscalls.RESOLVE_NO_MAGICLINKS
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


@dataclass
class _Level:
    name: bytes
    identity: tuple[int, int]
    fd: int
    """-1 while too many levels below it are open."""
    pending: list[bytes]
    passes: int = 0


def remove_path(tree: RootTree, path: bytes, *, recursive: bool) -> None:
    """Remove a file, a link, or a directory (with all below it if `recursive`).

    Raises PathNotFoundError, PathExistsError (not empty), PathRefusedError (a mount).
    """
    with typed_errors(path):
        directory, name = tree.parent(path)
        with closing(directory):
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
            if not stat.S_ISDIR(status.st_mode):
                os.unlink(name, dir_fd=directory)
            elif recursive:
                remove_tree(directory, name)
            else:
                os.rmdir(name, dir_fd=directory)


def remove_tree(directory: int, name: bytes) -> None:
    """Remove the directory `name` of `directory` and all below it. Raises OSError, FileError."""
    levels = [_enter(directory, name)]
    try:
        while levels:
            level = levels[-1]
            if level.pending:
                _descend(levels)
            elif not _empty_files(level):
                _leave(directory, levels)
    finally:
        for level in levels:
            if level.fd >= 0:
                os.close(level.fd)


def _enter(directory: int, name: bytes) -> _Level:
    fd = syscalls.openat2(directory, name, _DIRECTORY, resolve=_STAY)
    status = os.fstat(fd)
    return _Level(name, (status.st_dev, status.st_ino), fd, [])


def _empty_files(level: _Level) -> bool:
    """Unlink what is no directory and note some that are; return whether the level had entries."""
    level.passes += 1
    if level.passes > _PASSES:
        raise FileError(f"{excerpt(level.name)} is being filled while it is removed")
    most = min(_BATCH << min(level.passes, 16), _LARGEST_BATCH)
    found = False
    with os.scandir(level.fd) as entries:
        for entry in entries:
            found = True
            name = os.fsencode(entry.name)
            if entry.is_dir(follow_symlinks=False):
                level.pending.append(name)
                if len(level.pending) >= most:
                    break
                continue
            _ignoring_absence(os.unlink, name, level.fd)
    return found


def _descend(levels: list[_Level]) -> None:
    level = levels[-1]
    name = level.pending.pop()
    try:
        levels.append(_enter(level.fd, name))
    except OSError as error:
        if error.errno not in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}:
            raise
        return  # replaced meanwhile: the next pass sees what it is
    if len(levels) > _OPEN_LEVELS:
        above = levels[-_OPEN_LEVELS - 1]
        if above.fd >= 0:
            os.close(above.fd)
            above.fd = -1


def _leave(directory: int, levels: list[_Level]) -> None:
    """Remove the directory that was emptied from the one above it.

    If somebody has put something into it since, the next pass sees that: of the one above it, or
    of itself if it is the first.
    """
    left = levels[-1]
    try:
        _ignoring_absence(os.rmdir, left.name, levels[-2].fd if len(levels) > 1 else directory)
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        if len(levels) == 1:
            return
    os.close(left.fd)
    levels.pop()
    if len(levels) > 1 and levels[-2].fd < 0:
        _reopen_above(levels)


def _reopen_above(levels: list[_Level]) -> None:
    """Open the level above the last again by `..`, and only if it is still the same."""
    above = levels[-2]
    fd = syscalls.openat2(levels[-1].fd, b"..", _DIRECTORY, resolve=_STAY)
    status = os.fstat(fd)
    if (status.st_dev, status.st_ino) != above.identity:
        os.close(fd)
        raise FileError(f"{excerpt(above.name)} was moved while it was removed")
    above.fd = fd


def _ignoring_absence(call: Callable[..., None], name: bytes, directory: int) -> None:
    try:
        call(name, dir_fd=directory)
    except (FileNotFoundError, IsADirectoryError):
        return  # gone, or replaced meanwhile: the next pass sees what it is
