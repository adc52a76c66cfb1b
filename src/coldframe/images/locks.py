"""Locks that die with their holder: flock on files that belong to what they guard."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def try_lock(path: Path, *, exclusive: bool) -> int | None:
    """Lock an existing file without waiting; None if another holder is in the way.

    Returns the descriptor that holds the lock until it is closed.
    Raises FileNotFoundError if the file is gone, also when it went while it was being locked.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(fd), path.lstat()):
            raise FileNotFoundError(path)
    except BlockingIOError:
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, made if missing, waiting for it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
