"""Read an archive of an agent's files member by member, and let through what may travel.

Nothing is unpacked, and no name is followed: members that are fit are copied as they stand.
"""

from __future__ import annotations

import hashlib
import os
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import IO, Any

from coldframe.protocol.errors import FileError
from coldframe.protocol.models import MIB
from coldframe.protocol.sparse_maps import DamagedArchiveError
from coldframe.protocol.tar import TarReader, leads_out
from coldframe.protocol.text import excerpt
from coldframe.rollouts.artifacts import Artifact as Declared
from coldframe.trajectories.recorder import plain_text
from coldframe.trajectories.verification import Artifact

NEVER = ("/tests", "/logs/verifier", "/proc", "/sys", "/dev")
"""Never taken, even where they lie in what is declared: the verifier's own places, the kernel's."""
_PATH_MAX = 4095
_PIECE = MIB
_BLOCK = 512


def is_in(path: str, places: Sequence[str]) -> bool:
    """Whether a path is one of these places, or lies in one."""
    return any(PurePosixPath(path).is_relative_to(place) for place in places)


@dataclass
class Sifted:
    """Reads one archive member by member and decides; nothing is unpacked."""

    declared: Declared
    directory: bool
    most: int
    entries: list[Artifact] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)
    _files: set[str] = field(default_factory=set)
    _below: str = ""
    """The last directory that is left out, with a slash."""

    def run(self, source: IO[bytes], target: IO[bytes], until: float) -> bool:
        """Copy what may go on; False if there is too much of it, or no time left.

        Raises:
            FileError: it is no archive.
        """
        try:
            if not self._copy_members(source, target, until):
                return False
        except DamagedArchiveError as error:
            raise FileError(f"not a valid archive: {error}") from error
        target.write(bytes(2 * _BLOCK))
        return True

    def _copy_members(self, source: IO[bytes], target: IO[bytes], until: float) -> bool:
        reader = _reader(source)
        for member in reader:
            if time.monotonic() > until:
                return False
            if self.directory and self._excluded(member):
                continue
            if len(self.entries) + len(self.refused) >= self.most:
                return False
            path = self._path(member)
            reason = self._unfit(member) or _out_of_place(path)
            if reason:
                self.refused.append((path, reason))
                continue
            self.entries.append(self._entry(member, path, reader))
            copy(source, target, reader.start, reader.end)
        return True

    def _excluded(self, member: tarfile.TarInfo) -> bool:
        """Whether it is left out; directories come before what lies in them."""
        if self._below and member.name.startswith(self._below):
            return True
        if not self.declared.excludes(member.name):
            return False
        if member.isdir():
            self._below = f"{member.name}/"
        return True

    def _path(self, member: tarfile.TarInfo) -> str:
        if not self.directory:
            return self.declared.source
        return f"{self.declared.source.rstrip('/')}/{member.name}"

    def _unfit(self, member: tarfile.TarInfo) -> str | None:
        parts = PurePosixPath(member.name).parts
        if not parts or member.name.startswith("/") or ".." in parts:
            return "a name that leads outside"
        if member.issym():
            if leads_out(member.linkname, len(parts) - 1):
                return f"a link that may lead outside: {excerpt(member.linkname)}"
            return None
        if member.islnk():
            return None if member.linkname in self._files else "a hard link to what is left out"
        if not (member.isreg() or member.isdir()):
            return "neither a regular file, a directory nor a link"
        return None

    def _entry(self, member: tarfile.TarInfo, path: str, reader: TarReader) -> Artifact:
        digest = None
        if member.isreg():
            self._files.add(member.name)
            digest = _content_digest(member, reader)
        return Artifact(
            path=plain_text(path),
            kind=_kind(member),
            size=member.size if member.isreg() else 0,
            sha256=digest,
            sparse=reader.extents is not None,
        )


def _out_of_place(path: str) -> str | None:
    """Say why nothing may lie there."""
    if is_in(path, NEVER):
        return "never taken"
    length = len(os.fsencode(path))
    return f"a path of {length} bytes: no program opens it" if length > _PATH_MAX else None


def _kind(member: tarfile.TarInfo) -> Any:
    if member.isdir():
        return "directory"
    if member.issym():
        return "link"
    return "hard_link" if member.islnk() else "file"


def _reader(source: IO[bytes]) -> TarReader:
    """Read an archive from its begin, whoever else reads in it meanwhile."""
    at = 0

    def read(size: int) -> bytes:
        nonlocal at
        source.seek(at)
        data = source.read(size)
        at += len(data)
        return data

    return TarReader(read)


def _content_digest(member: tarfile.TarInfo, reader: TarReader) -> str:
    digest = hashlib.sha256()
    for extent in reader.extents or ():
        digest.update(b"%d %d\n" % extent)
    for _, data in reader.content(member):
        digest.update(data)
    return digest.hexdigest()


def copy(source: IO[bytes], target: IO[bytes], start: int, end: int) -> None:
    """Copy the bytes from `start` to `end`."""
    source.seek(start)
    while start < end and (piece := source.read(min(_PIECE, end - start))):
        target.write(piece)
        start += len(piece)
