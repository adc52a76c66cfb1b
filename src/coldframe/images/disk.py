"""What files need to survive: syncs, atomic records, and a full disk that is named."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coldframe.host import syscalls
from coldframe.images.trees import NO_SPACE
from coldframe.protocol.errors import StorageFullError


def sync_file_system(path: Path) -> None:
    """Wait until everything written to the file system of `path` is on disk. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        syscalls.syncfs(fd)
    finally:
        os.close(fd)


def sync_directory(path: Path) -> None:
    """Make the renames in one directory last through a loss of power."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_record(path: Path, content: Mapping[str, Any], scratch: Path) -> None:
    """Write JSON so that `path` holds the old content or the new, whatever happens.

    `scratch` is a directory of our own on the same file system.
    """
    made = scratch / "record"
    with made.open("w") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    made.rename(path)
    sync_directory(path.parent)


@contextmanager
def full_disk_named() -> Iterator[None]:
    """Raise StorageFullError where the system says that no space is left."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        raise StorageFullError(f"no space is left for images: {error}") from error
