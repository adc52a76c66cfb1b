"""Read an archive of an agent's files member by member, and let through what may travel.

Nothing is unpacked, and no name is followed: members that are fit are copied as they stand.
"""

from __future__ import annotations

import hashlib
import os
import tarfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import IO, Any, cast

from coldframe.protocol.errors import FileError
from coldframe.protocol.models import MIB
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
        """Copy what may go on; False if there is too much of it, or no time left."""
        for member, start, end in _members(source):
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
            self.entries.append(self._entry(member, path, source))
            copy(source, target, start, end)
        target.write(bytes(2 * _BLOCK))
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
            return _leaves(member.linkname, depth=len(parts) - 1)
        if member.islnk():
            return None if member.linkname in self._files else "a hard link to what is left out"
        if not (member.isreg() or member.isdir()):
            return "neither a regular file, a directory nor a link"
        return None

    def _entry(self, member: tarfile.TarInfo, path: str, source: IO[bytes]) -> Artifact:
        extents = _extents(member)
        digest = None
        if member.isreg():
            self._files.add(member.name)
            digest = _content_digest(member, source)
        return Artifact(
            path=plain_text(path),
            kind=_kind(member),
            size=member.size if member.isreg() else 0,
            sha256=digest,
            sparse=extents is not None,
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


def _leaves(link: str, *, depth: int) -> str | None:
    """Say how a link would lead out of the tree that it lies `depth` directories deep in."""
    parts = [part for part in link.split("/") if part not in {"", "."}]
    ups = 0
    while ups < len(parts) and parts[ups] == "..":
        ups += 1
    if link.startswith("/") or ups > depth or ".." in parts[ups:]:
        return f"a link that may lead outside: {link[:200]!r}"
    return None


def _members(source: IO[bytes]) -> Iterator[tuple[tarfile.TarInfo, int, int]]:
    """Yield each member with the bytes that are its headers and content.

    Raises:
        FileError: it is no archive.
    """
    try:
        with tarfile.open(
            fileobj=source, mode="r:", encoding="utf-8", errors="surrogateescape"
        ) as archive:
            while (member := archive.next()) is not None:
                yield member, member.offset, cast(Any, archive).offset
                # The archive remembers every member otherwise.
                cast(Any, archive).members.clear()
    except (tarfile.TarError, ValueError, EOFError) as error:
        raise FileError(f"not a valid archive: {error}") from error


def _extents(member: tarfile.TarInfo) -> list[tuple[int, int]] | None:
    return getattr(member, "sparse", None)


def _content_digest(member: tarfile.TarInfo, source: IO[bytes]) -> str:
    digest = hashlib.sha256()
    extents = _extents(member)
    length = member.size
    if extents is not None:
        digest.update(b"".join(b"%d %d\n" % extent for extent in extents))
        length = sum(size for _, size in extents)
    source.seek(member.offset_data)
    while length > 0 and (piece := source.read(min(_PIECE, length))):
        digest.update(piece)
        length -= len(piece)
    return digest.hexdigest()


def copy(source: IO[bytes], target: IO[bytes], start: int, end: int) -> None:
    """Copy the bytes from `start` to `end`."""
    source.seek(start)
    while start < end and (piece := source.read(min(_PIECE, end - start))):
        target.write(piece)
        start += len(piece)
