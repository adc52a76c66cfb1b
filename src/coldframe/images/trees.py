"""Remove directory trees that may be hostile, without ever following a link.

Nothing is reached by a path of more than one component below a held descriptor, so neither
links nor depth nor long paths matter. The trees are at rest: their sandbox has ended.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from coldframe.host.treewalk import DIRECTORY, names_of

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


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
    for name in names_of(top):
        with suppress(FileNotFoundError):
            if _is_directory(top, name):
                _lift(top, name)
            else:
                os.unlink(name, dir_fd=top)


def _lift(top: int, name: bytes) -> None:
    """Remove one directory of `top`, moving the directories in it up into `top`."""
    fd = os.open(name, DIRECTORY, dir_fd=top)
    try:
        for child in names_of(fd):
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
