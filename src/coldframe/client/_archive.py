"""Pack and unpack trees on this side. An archive that comes from a sandbox is hostile.

Unpacking never follows a link: every directory is opened from its parent without following, so
a member cannot land outside whatever the archive says. Links are made only if nobody who follows
them later can leave: their `..` parts come first and are no more than their own depth. By
induction each part of such a link then stays inside. (tarfile's own filters resolve names on
disk, and older versions of Python have none.)
"""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

from coldframe.protocol.errors import (
    FileError,
    FileTooLargeError,
    PathExistsError,
    PathRefusedError,
)
from coldframe.protocol.sparse import content, data_extents, sparse_headers, sparse_map
from coldframe.protocol.sparse_maps import DamagedArchiveError
from coldframe.protocol.tar import TarReader, leads_out
from coldframe.protocol.text import excerpt

MAX_MEMBERS = 1_000_000
_BUFFER = 256 << 10
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class _PieceReader(io.RawIOBase):
    """A file object over a function that returns the next piece, empty at the end."""

    def __init__(self, next_piece: Callable[[], bytes]) -> None:
        self._next, self._piece, self._at = next_piece, b"", 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        parts, missing = [], size
        while missing:
            if self._at == len(self._piece):
                self._piece, self._at = self._next(), 0
            if not self._piece:
                break
            part = self._piece[self._at : self._at + missing]
            self._at += len(part)
            missing -= len(part)
            parts.append(part)
        return b"".join(parts)


OnRefused = Callable[[str], None]
"""Told why a member is left out."""


def unpack(
    next_piece: Callable[[], bytes],
    target: Path,
    max_bytes: int,
    on_refused: OnRefused | None = None,
) -> int:
    """Unpack a tar that comes in pieces into a local directory; return the number of members.

    Args:
        on_refused: leave out a member that must not be unpacked; None: refuse the archive.
    Raises:
        PathRefusedError, PathExistsError, FileTooLargeError, FileError: see `download_tree`.
    """
    target.mkdir(parents=True, exist_ok=True)
    root = os.open(target, _DIRECTORY)
    try:
        reader = TarReader(lambda _: next_piece())
        return _Unpacker(root, reader, max_bytes, on_refused).run()
    except DamagedArchiveError as error:
        raise FileError(f"the archive is damaged: {error}") from error
    finally:
        os.close(root)


class _Unpacker:
    def __init__(
        self, root: int, reader: TarReader, max_bytes: int, on_refused: OnRefused | None
    ) -> None:
        self._root, self._reader, self._on_refused = root, reader, on_refused
        self._max = self._left = max_bytes
        self._modes: list[tuple[tuple[str, ...], tarfile.TarInfo]] = []

    def run(self) -> int:
        count = 0
        for member in self._reader:
            count += 1
            if count > MAX_MEMBERS:
                raise FileTooLargeError(f"the archive has more than {MAX_MEMBERS} members")
            try:
                self._one(member)
            except PathRefusedError as error:
                if self._on_refused is None:
                    raise
                self._on_refused(str(error))
                count -= 1
        for parts, member in reversed(self._modes):
            with self._directory(parts) as fd:
                _finish(fd, member)
        return count

    def _one(self, member: tarfile.TarInfo) -> None:
        """Make one member.

        Raises:
            PathRefusedError: it would leave the directory, or is no file, directory or link.
        """
        try:
            self._placed(member)
        except ValueError as error:  # a NUL in a name
            raise PathRefusedError(f"archive member {excerpt(member.name)}: {error}") from error

    def _placed(self, member: tarfile.TarInfo) -> None:
        parts = _parts(member.name)
        if member.isdir():
            with self._directory(parts, make=True):
                self._modes.append((parts, member))
            return
        if not parts:
            raise PathRefusedError(
                f"archive member {excerpt(member.name)} names the directory itself"
            )
        with self._directory(parts[:-1], make=True) as parent:
            try:
                self._make(member, parts, parent)
            except FileExistsError:
                raise PathExistsError(
                    f"{excerpt(member.name)} exists already in the local directory; name an empty "
                    "one"
                ) from None

    def _make(self, member: tarfile.TarInfo, parts: tuple[str, ...], parent: int) -> None:
        name = parts[-1]
        if member.islnk():
            source = _parts(member.linkname)
            with self._directory(source[:-1]) as origin:
                if not source:
                    raise PathRefusedError(f"{excerpt(member.name)} is a hard link to a directory")
                _link(source[-1], origin, name, parent)
        elif member.issym():
            _check_link(member, depth=len(parts) - 1)
            os.symlink(member.linkname, name, dir_fd=parent)
        elif member.isreg():
            self._file(member, name, parent)
        else:
            raise PathRefusedError(
                f"archive member {excerpt(member.name)} is not a file or directory"
            )

    def _file(self, member: tarfile.TarInfo, name: str, parent: int) -> None:
        self._left -= member.size
        if self._left < 0:
            raise FileTooLargeError(f"the tree holds more than {self._max} bytes")
        fd = os.open(name, _FILE, 0o600, dir_fd=parent)
        try:
            self._reader.write(member, fd)
            _finish(fd, member)
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _directory(self, parts: tuple[str, ...], *, make: bool = False) -> Iterator[int]:
        fd = os.dup(self._root)
        try:
            for part in parts:
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, 0o700, dir_fd=fd)
                try:
                    below = os.open(part, _DIRECTORY, dir_fd=fd)
                except OSError as error:
                    where = "/".join(parts)
                    raise PathRefusedError(
                        f"{excerpt(where)} leads over what is no directory"
                    ) from error
                os.close(fd)
                fd = below
            yield fd
        finally:
            os.close(fd)


def _link(old: str, origin: int, new: str, parent: int) -> None:
    try:
        os.link(old, new, src_dir_fd=origin, dst_dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError as error:
        raise PathRefusedError(f"{excerpt(new)} is a hard link to what was not unpacked") from error


def _finish(fd: int, member: tarfile.TarInfo) -> None:
    os.fchmod(fd, member.mode & 0o777)
    # A time that cannot be set (the archive may say anything) is not worth the tree.
    with contextlib.suppress(ValueError, OverflowError, OSError):
        os.utime(fd, (member.mtime, member.mtime))


def _parts(name: str) -> tuple[str, ...]:
    if name.startswith("/"):
        raise PathRefusedError(f"archive member {excerpt(name)} is absolute")
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if ".." in parts:
        raise PathRefusedError(f"archive member {excerpt(name)} holds '..'")
    return parts


def _check_link(member: tarfile.TarInfo, *, depth: int) -> None:
    target = member.linkname
    if leads_out(target, depth):
        raise PathRefusedError(f"link {excerpt(member.name)} -> {excerpt(target)} may lead outside")


def pack(local: Path, write: Callable[[bytes], None], owner: tuple[int, int]) -> None:
    """Write a pax tar of a local directory's content, piece by piece.

    Raises:
        FileNotFoundError: there is no such directory.
        NotADirectoryError: it is not a directory.
        PathRefusedError: it holds a device, FIFO or socket.
    """
    if not local.is_dir():
        number = errno.ENOTDIR if local.exists() else errno.ENOENT
        raise OSError(number, os.strerror(number), str(local))
    with tarfile.open(
        fileobj=_PieceWriter(write), mode="w|", bufsize=_BUFFER, format=tarfile.PAX_FORMAT
    ) as archive:
        for path in sorted(local.iterdir()):
            _add(archive, path, path.name, owner)


def _add(archive: tarfile.TarFile, path: Path, name: str, owner: tuple[int, int]) -> None:
    found: tarfile.TarInfo | None = archive.gettarinfo(path, name)
    member = _owned(found, path, owner)
    if not member.isreg():
        archive.addfile(member)
        for below in sorted(path.iterdir()) if member.isdir() else ():
            _add(archive, below, f"{name}/{below.name}", owner)
        return
    with path.open("rb") as file:
        extents = data_extents(file.fileno(), os.fstat(file.fileno()))
        if extents is None:
            archive.addfile(member, file)
            return
        table = sparse_map(member.size, extents)
        member.pax_headers = sparse_headers(name, member.size)
        member.size = len(table) + sum(length for _, length in extents)
        pieces = itertools.chain([table], content(file.fileno(), extents))
        archive.addfile(member, _PieceReader(lambda: next(pieces, b"")))


def _owned(member: tarfile.TarInfo | None, path: Path, owner: tuple[int, int]) -> tarfile.TarInfo:
    # A socket is nothing that tarfile knows.
    if member is None or not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
        raise PathRefusedError(f"{excerpt(os.fspath(path))} is a device, FIFO or socket")
    member.uid, member.gid = owner
    member.uname = member.gname = ""
    return member


class _PieceWriter(io.RawIOBase):
    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self._write(bytes(data))
        return len(data)
