"""Trajectories and their bytes on disk: content-addressed, atomic, read back before trusted.

A reader sees a whole file or none: everything is written under a temporary name, synced, and
renamed, and the directory is synced after it. Loss of power costs at most what was not yet
reported as written.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from coldframe.protocol import strict_json
from coldframe.protocol.errors import ColdframeError, Side
from coldframe.trajectories.base import BlobRef, OutputRef
from coldframe.trajectories.schema import Trajectory

__all__ = ["BlobStore", "StoreError", "TrajectoryInvalidError", "read_trajectory", "write_json"]

TRAJECTORY_FILE = "trajectory.json"
MAX_FILE_BYTES = 1 << 30
"""Of what is read as a whole: a directory may be somebody else's."""


class StoreError(ColdframeError):
    """A stored file is missing, cut or not what its name says; the message names it."""

    code = "store_corrupt"
    side = Side.OBSERVATION


class TrajectoryInvalidError(StoreError):
    """A trajectory does not follow the schema, or a blob that it names is not there."""

    code = "trajectory_invalid"


def sync_directory(directory: Path) -> None:
    """Make renames in `directory` survive loss of power."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_file(path: Path) -> None:
    """Make a file's content survive loss of power."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def written_beside(
    path: Path, content: bytes, *, mode: int = 0o644, sync: bool = True
) -> Iterator[Path]:
    """Give a file with that content beside `path`; what was not moved is removed at the end.

    Raises:
        OSError: it cannot be written.
    """
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(fd, mode)
            if sync:
                os.fsync(fd)
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)
    if sync:
        sync_directory(path.parent)


def write_atomic(path: Path, content: bytes, *, sync: bool = True) -> None:
    """Write `content` to `path` so that a reader sees the old file or the new one, whole.

    Raises:
        OSError: it cannot be written; the old file is as it was.
    """
    with written_beside(path, content, sync=sync) as made:
        made.rename(path)


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON, in its own order, atomically.

    Raises:
        ValueError: it holds NaN or an infinity, which JSON cannot say.
    """
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    # A path on the host need not be UTF-8: what is not is written as an escape, and read back so.
    write_atomic(path, text.encode("utf-8", "backslashreplace") + b"\n")


def read_regular(path: Path) -> bytes:
    """Return the bytes of a file; nothing that blocks or never ends is taken for one.

    Raises:
        OSError: there is none, it is no regular file, or has over MAX_FILE_BYTES.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is no regular file")
        content = b"" if status.st_size > MAX_FILE_BYTES else file.read(MAX_FILE_BYTES + 1)
        if max(status.st_size, len(content)) > MAX_FILE_BYTES:  # it may grow meanwhile
            raise OSError(errno.EFBIG, f"is over {MAX_FILE_BYTES} bytes")
        return content


class BlobStore:
    """Bytes under the digest of themselves; the same bytes are stored once."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, sha256: str) -> Path:
        """Return where the bytes of that digest lie, whether or not they do."""
        return self.root / sha256[:2] / sha256

    def put(self, content: bytes) -> BlobRef:
        """Store bytes and return their reference. Storing them again changes nothing.

        They survive the process at once and loss of power after `sync`, which
        `write_trajectory` calls: an agent's step waits for no disk.
        """
        digest = hashlib.sha256(content).hexdigest()
        path = self.path(digest)
        try:
            # A blob that was cut by loss of power has another size, and is written anew.
            whole = path.stat().st_size == len(content)
        except FileNotFoundError:
            whole = False
        if not whole:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, content, sync=False)
        return BlobRef(sha256=digest, bytes=len(content))

    def sync(self, refs: Iterable[BlobRef]) -> None:
        """Make these blobs survive loss of power."""
        paths = {self.path(ref.sha256) for ref in refs}
        for path in paths:
            sync_file(path)
        # What holds them may have been made for them.
        for directory in {path.parent for path in paths} | ({self.root} if paths else set()):
            sync_directory(directory)

    def get(self, ref: BlobRef) -> bytes:
        """Return the bytes, checked against their digest.

        Raises:
            StoreError: they are missing or were changed.
        """
        path = self.path(ref.sha256)
        try:
            content = read_regular(path)
        except FileNotFoundError:
            raise StoreError(f"{path}: this blob is missing") from None
        except OSError as error:
            raise StoreError(f"{path}: {error.strerror}") from None
        if hashlib.sha256(content).hexdigest() != ref.sha256:
            raise StoreError(f"{path}: the content is not what its name says")
        return content


def references(value: Any) -> Iterator[BlobRef]:
    """Yield every blob that a model, or anything inside it, refers to."""
    if isinstance(value, BlobRef):
        yield value
    elif isinstance(value, OutputRef):
        yield value.stored
    elif hasattr(value, "__pydantic_fields__"):
        for name in value.__pydantic_fields__:
            yield from references(getattr(value, name))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from references(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from references(item)


def write_trajectory(directory: Path, trajectory: Trajectory, blobs: BlobStore) -> None:
    """Write a trajectory, then read it back: what is reported as written can be read.

    Raises:
        TrajectoryInvalidError: what was read is not what was written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / TRAJECTORY_FILE
    blobs.sync(references(trajectory))
    write_json(path, trajectory.model_dump(mode="json"))
    sync_directory(directory.parent)
    if read_trajectory(path, blobs) != trajectory:
        raise TrajectoryInvalidError(f"{path}: reading it back gives another trajectory")


def read_trajectory(path: Path, blobs: BlobStore, *, verify_blobs: bool = False) -> Trajectory:
    """Return a validated trajectory; every blob that it names is there.

    Args:
        verify_blobs: also compare the content of every blob with its digest.
    Raises:
        TrajectoryInvalidError: it is missing, cut, of another schema, or lacks a blob.
    """
    try:
        content = read_regular(path)
        strict_json.parse(content)  # pydantic takes NaN, and the last of two keys
        trajectory = Trajectory.model_validate_json(content)
    except strict_json.NotStrictError as error:
        raise TrajectoryInvalidError(f"{path}: {error}") from None
    except OSError as error:
        raise TrajectoryInvalidError(f"{path}: {error.strerror or error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "file"
        raise TrajectoryInvalidError(f"{path}: {where}: {first['msg']}") from None
    for ref in references(trajectory):
        if verify_blobs:
            blobs.get(ref)
        elif not blobs.path(ref.sha256).is_file():
            raise TrajectoryInvalidError(f"{path}: blob {ref.sha256} is missing")
    return trajectory
