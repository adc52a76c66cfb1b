"""A directory for the time of a block that does not outlive its process for long.

Whoever makes one holds its lock, which the kernel lets go of however the process ends. The next one
that is made in the same place removes what nobody holds; `coldframe gc` does in the system's.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = ".coldframe-scratch-"


@contextlib.contextmanager
def scratch(parent: Path | None = None) -> Iterator[Path]:
    """Make a directory of our own in `parent` (default: the system's), removed with the block."""
    parent = parent or system_directory()
    reap(parent)
    with contextlib.ExitStack() as stack:
        while (directory := _locked(parent, stack)) is None:
            pass  # another process reaped it before it was locked
        yield directory


def system_directory() -> Path:
    """Where directories are made if nothing else is said."""
    return Path(tempfile.gettempdir())


def left(parent: Path) -> Iterator[Path]:
    """Yield each directory that a dead process of this user left, locked for the moment."""
    for directory in sorted(parent.glob(f"{PREFIX}*")):
        with contextlib.suppress(OSError):  # somebody holds it, or has just removed it
            fd = _open(directory)
            try:
                status = os.fstat(fd)
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if status.st_uid == os.geteuid() and _is_at(fd, directory):
                    yield directory
            finally:
                os.close(fd)


def reap(parent: Path) -> tuple[Path, ...]:
    """Remove what dead processes of this user left in `parent`; return what is gone."""
    gone = []
    for directory in left(parent):
        shutil.rmtree(directory, ignore_errors=True)
        if not os.path.lexists(directory):
            gone.append(directory)
    return tuple(gone)


def _locked(parent: Path, stack: contextlib.ExitStack) -> Path | None:
    """Return a new directory, locked and there until `stack` is left; None if it was reaped."""
    made = tempfile.TemporaryDirectory(
        prefix=PREFIX,
        dir=parent,
        ignore_cleanup_errors=True,  # what stays is reaped later
    )
    directory = Path(made.name)
    try:
        fd = _open(directory)
    except FileNotFoundError:
        made.cleanup()
        return None
    stack.callback(os.close, fd)  # after the removal: nobody reaps what is being removed
    stack.callback(made.cleanup)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return directory if _is_at(fd, directory) else None


def _open(directory: Path) -> int:
    return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _is_at(fd: int, directory: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(fd), directory.lstat())
    return False
