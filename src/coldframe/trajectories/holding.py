"""One process at a time writes into a directory."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from coldframe.protocol.errors import ColdframeError

LOCK_FILE = ".lock"


@contextlib.contextmanager
def held(directory: Path, taken: ColdframeError) -> Iterator[None]:
    """Hold a directory while entered; the kernel lets go of it when the process dies.

    Raises:
        ColdframeError: `taken`, if another process holds it.
        OSError: the lock cannot be made there.
    """
    fd = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise taken from None
        yield
    finally:
        os.close(fd)
