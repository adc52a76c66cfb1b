"""Digests of directories that do not depend on the machine that they lie on.

One canonical line per entry, sorted by path, hashed with SHA-256: kind, executable bit, path,
content. Owners, times and the other mode bits say nothing about what a task is.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from coldframe.protocol.errors import TaskError

CHUNK = 1 << 20
IGNORED = frozenset({".git", "__pycache__", ".DS_Store"})


def file_sha256(path: Path) -> str:
    """Return the hex digest of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(CHUNK):
            digest.update(piece)
    return digest.hexdigest()


def _walk(path: Path) -> Iterator[Path]:
    yield path
    if path.is_dir() and not path.is_symlink():
        for child in sorted(path.iterdir()):
            if child.name not in IGNORED:
                yield from _walk(child)


def _line(path: Path, relative: str) -> bytes:
    name = os.fsencode(relative)
    if path.is_symlink():
        kind, content = b"link", os.fsencode(path.readlink())
    elif path.is_dir():
        kind, content = b"dir", b""
    elif path.is_file():
        executable = bool(path.stat().st_mode & 0o111)
        kind, content = (b"exec" if executable else b"file"), file_sha256(path).encode()
    else:
        raise TaskError(f"{path}: not a file, directory or link")
    # Lengths before names: no name can pretend to be two fields.
    return b"%s %d:%s %d:%s\n" % (kind, len(name), name, len(content), content)


def tree_digest(directory: Path, names: Iterable[str] | None = None) -> str:
    """Return the digest of a directory, or of the named entries in it that exist.

    Raises:
        TaskError: a FIFO, socket or device lies in it, or something cannot be read.
    """
    digest = hashlib.sha256(b"coldframe.tree/1\n")
    try:
        tops = sorted((one.name for one in directory.iterdir()) if names is None else names)
        for top in tops:
            path = directory / top
            if top in IGNORED or not os.path.lexists(path):
                continue
            for entry in _walk(path):
                digest.update(_line(entry, entry.relative_to(directory).as_posix()))
    except OSError as error:
        raise TaskError(f"{error.filename}: {error.strerror}") from error
    return digest.hexdigest()
