"""A directory for the time of a block that does not outlive its process for long.

Whoever makes one holds its lock; the kernel lets go of it however the process ends, and the next
one that is made removes what nobody holds.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PREFIX = "coldframe-check-"
_LOCK = ".lock"
_JUST_MADE_S = 60.0
"""Younger than this, it may be one whose maker has not locked it yet."""


@contextlib.contextmanager
def scratch(parent: Path | None = None) -> Iterator[Path]:
    """Make a directory of our own in `parent` (default: the system's), removed with the block."""
    parent = parent or Path(tempfile.gettempdir())
    _reap(parent)
    directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield directory
    finally:
        shutil.rmtree(directory)
        os.close(lock)


def _reap(parent: Path) -> None:
    """Remove what dead processes of this user left."""
    for directory in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # in use, or being removed by another process
            status = directory.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                continue
            if time.time() - status.st_ctime < _JUST_MADE_S:
                continue
            lock = os.open(directory / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory)
            finally:
                os.close(lock)
