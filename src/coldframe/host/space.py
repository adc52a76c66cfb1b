"""How much room a file system has: nothing is begun on one that is nearly full."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from coldframe.protocol.errors import StorageFullError

RESERVE_BYTES = 256 << 20
"""What is kept back of a disk, so that what has begun can go on."""


def free_bytes(directory: int) -> int:
    """Return how much room the file system of an open file or directory has."""
    status = os.fstatvfs(directory)
    return status.f_bavail * status.f_frsize


def require_space(directory: int, shown: str) -> None:
    """Refuse to begin anything on a file system that is nearly full.

    Raises StorageFullError below 256 MiB or without free inodes.
    """
    _require_space(os.fstatvfs(directory), shown)


def require_space_at(path: Path) -> None:
    """As `require_space`, by path."""
    _require_space(os.statvfs(path), str(path))


def _require_space(status: os.statvfs_result, shown: str) -> None:
    free = status.f_bavail * status.f_frsize
    if free < RESERVE_BYTES:
        raise StorageFullError(
            f"{shown}: only {free >> 20} MiB are free; make room there, or set COLDFRAME_HOME to a "
            f"larger file system (the last {RESERVE_BYTES >> 20} MiB are kept back)"
        )
    if status.f_files and status.f_favail == 0:
        raise StorageFullError(f"{shown}: no inodes are free; remove files there")


def file_system_of(path: Path) -> str:
    """Return the type of the file system that a path is on, as mountinfo names it."""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        if left.split(" ")[2] == wanted:
            return right.split(" ", 1)[0]
    return "btrfs" if os.major(device) == 0 else "unknown"


@contextlib.contextmanager
def full_named(shown: str) -> Iterator[None]:
    """Turn a full disk inside the block into StorageFullError."""
    try:
        yield
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise StorageFullError(f"{shown}: {error.strerror}") from error
        raise
