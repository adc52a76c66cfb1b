"""Write a tree from untrusted descriptions: no path leaves it, no link is followed.

Used for imports, and for COPY steps. Paths are bytes relative to the tree's root.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from coldframe.host.treewalk import DIRECTORY
from coldframe.images.digest import MAX_ID, check_path
from coldframe.protocol.errors import ImageError
from coldframe.protocol.text import excerpt

BLOCK = 1 << 20
_MAX_TIMES = 256 << 20
"""Bytes of the paths of directories whose times are kept until the end."""
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class Metadata:
    """What an inode carries besides its content."""

    mode: int = 0o755
    uid: int = 0
    gid: int = 0
    mtime_ns: int | None = None
    """None: now."""
    xattrs: Mapping[str, bytes] = field(default_factory=dict)


def split(path: bytes) -> tuple[bytes, ...]:
    """Return a path's components, without leading slash and dots; () for the root.

    Raises:
        ImageError: it holds `..` or a NUL, or is longer than any program can name.
    """
    check_path(path)
    parts = tuple(part for part in path.split(b"/") if part not in (b"", b"."))
    if b".." in parts or b"\0" in path:
        raise ImageError(f"{excerpt(path)} would leave the tree; nothing was kept")
    return parts


class TreeWriter:
    """Writes below one directory. Later entries replace earlier ones, as tar does."""

    def __init__(self, root: Path) -> None:
        self._root = os.open(root, DIRECTORY)
        self._parent: tuple[tuple[bytes, ...], int] | None = None
        self._times: dict[bytes, int] = {}
        self._times_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._set_directory_times()
        finally:
            self._forget_parent()
            os.close(self._root)

    def directory(self, path: bytes, metadata: Metadata) -> None:
        """Make a directory, or give an existing one this metadata."""
        parts = split(path)
        if parts:
            parent = self._enter(parts[:-1])
            if not self._is_directory(parent, parts[-1]):
                self._clear(parent, parts[-1])
                os.mkdir(parts[-1], 0o700, dir_fd=parent)
        fd = self._open_directory(parts)
        try:
            os.fchown(fd, *_ids(path, metadata))
            os.fchmod(fd, metadata.mode)
            for name, value in metadata.xattrs.items():
                os.setxattr(fd, name, value)
        finally:
            os.close(fd)
        if metadata.mtime_ns is not None:
            self._times_bytes += len(path)
            if self._times_bytes > _MAX_TIMES:
                raise ImageError(f"the paths of its directories are over {_MAX_TIMES} bytes")
            self._times[b"/".join(parts)] = metadata.mtime_ns

    def file(self, path: bytes, metadata: Metadata, fill: Callable[[int], None]) -> None:
        """Make a regular file; `fill` writes its content to the descriptor."""
        parent, name = self._place(path)
        fd = os.open(name, _NEW, 0o600, dir_fd=parent)
        try:
            fill(fd)
            # Changing the owner clears set-user-id bits and capabilities: they come after.
            os.fchown(fd, *_ids(path, metadata))
            os.fchmod(fd, metadata.mode)
            for key, value in metadata.xattrs.items():
                os.setxattr(fd, key, value)
            if metadata.mtime_ns is not None:
                os.utime(fd, ns=(metadata.mtime_ns, metadata.mtime_ns))
        finally:
            os.close(fd)

    def link(self, path: bytes, target: bytes, metadata: Metadata) -> None:
        """Make a symbolic link; its target is text and may say anything."""
        parent, name = self._place(path)
        os.symlink(target, name, dir_fd=parent)
        self._finish(parent, name, path, metadata)

    def fifo(self, path: bytes, metadata: Metadata) -> None:
        """Make a named pipe."""
        parent, name = self._place(path)
        os.mkfifo(name, 0o600, dir_fd=parent)
        os.chmod(name, metadata.mode, dir_fd=parent)
        self._finish(parent, name, path, metadata)

    def hard_link(self, path: bytes, existing: bytes) -> None:
        """Give a file that is already in the tree a further name.

        Raises:
            ImageError: there is none, it is a directory, or it is the file itself.
        """
        source = split(existing)
        if not source or split(path) == source:
            raise ImageError(f"{excerpt(path)} is a hard link to itself or to the root")
        source_fd = None
        try:
            source_fd = os.dup(self._enter(source[:-1], make=False))
            status = os.stat(source[-1], dir_fd=source_fd, follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                raise ImageError(f"{excerpt(path)} is a hard link to a directory")
            parent, name = self._place(path)
            os.link(
                source[-1], name, src_dir_fd=source_fd, dst_dir_fd=parent, follow_symlinks=False
            )
        except FileNotFoundError:
            raise ImageError(
                f"{excerpt(path)} is a hard link to {excerpt(existing)}, which is not in the tree"
            ) from None
        finally:
            if source_fd is not None:
                os.close(source_fd)

    def read(self, path: bytes) -> bytes | None:
        """Return a small regular file's content; None if there is no such file."""
        parts = split(path)
        try:
            parent = self._enter(parts[:-1], make=False)
            status = os.stat(parts[-1], dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(status.st_mode):
            return None
        fd = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        with os.fdopen(fd, "rb") as file:
            return file.read()

    def remove(self, path: bytes) -> None:
        """Remove an entry that is no directory with content; a missing one is fine."""
        parts = split(path)
        with suppress(FileNotFoundError):
            self._clear(self._enter(parts[:-1], make=False), parts[-1])

    # --- inside ---------------------------------------------------------------------------

    def _place(self, path: bytes) -> tuple[int, bytes]:
        """Return the parent's descriptor and a name in it that is free."""
        parts = split(path)
        if not parts:
            raise ImageError("the root of a tree must be a directory")
        parent = self._enter(parts[:-1])
        self._clear(parent, parts[-1])
        return parent, parts[-1]

    def _enter(self, parts: tuple[bytes, ...], *, make: bool = True) -> int:
        """Return a descriptor of a directory, valid until the next call."""
        if self._parent is not None and self._parent[0] == parts:
            return self._parent[1]
        fd = self._open_directory(parts, make=make)
        self._forget_parent()
        self._parent = (parts, fd)
        return fd

    def _open_directory(self, parts: tuple[bytes, ...], *, make: bool = False) -> int:
        fd = os.dup(self._root)
        try:
            for depth, part in enumerate(parts):
                try:
                    below = self._descend(fd, part, parts[: depth + 1])
                except FileNotFoundError:
                    if not make:
                        raise
                    os.mkdir(part, 0o755, dir_fd=fd)
                    below = self._descend(fd, part, parts[: depth + 1])
                os.close(fd)
                fd = below
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _descend(self, fd: int, name: bytes, shown: tuple[bytes, ...]) -> int:
        try:
            return os.open(name, DIRECTORY, dir_fd=fd)
        except NotADirectoryError:
            path = os.fsdecode(b"/".join(shown))
            raise ImageError(
                f"something lies below {excerpt(path)}, which is not a directory"
            ) from None

    def _is_directory(self, parent: int, name: bytes) -> bool:
        try:
            return stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
        except FileNotFoundError:
            return False

    def _clear(self, parent: int, name: bytes) -> None:
        """Make a name free. A directory must be empty for that: OSError if it is not."""
        if self._is_directory(parent, name):
            os.rmdir(name, dir_fd=parent)
            return
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=parent)

    def _finish(self, parent: int, name: bytes, path: bytes, metadata: Metadata) -> None:
        uid, gid = _ids(path, metadata)
        os.chown(name, uid, gid, dir_fd=parent, follow_symlinks=False)
        if metadata.mtime_ns is not None:
            times = (metadata.mtime_ns, metadata.mtime_ns)
            os.utime(name, ns=times, dir_fd=parent, follow_symlinks=False)

    def _forget_parent(self) -> None:
        if self._parent is not None:
            os.close(self._parent[1])
            self._parent = None

    def _set_directory_times(self) -> None:
        """Done last: every entry that was made in a directory changed its time."""
        for path, mtime_ns in self._times.items():
            try:
                fd = self._open_directory(split(path))
            except (FileNotFoundError, ImageError):  # replaced since
                continue
            try:
                os.utime(fd, ns=(mtime_ns, mtime_ns))
            finally:
                os.close(fd)


def _ids(path: bytes, metadata: Metadata) -> tuple[int, int]:
    if not (0 <= metadata.uid <= MAX_ID and 0 <= metadata.gid <= MAX_ID):
        raise ImageError(
            f"{excerpt(path)} belongs to {metadata.uid}:{metadata.gid}; "
            f"a layer holds the ids 0 to {MAX_ID} only"
        )
    return metadata.uid, metadata.gid


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write every byte."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def write_bytes(*pieces: bytes) -> Callable[[int], None]:
    """Return a `fill` that writes these bytes."""

    def fill(fd: int) -> None:
        _write_pieces(fd, pieces)

    return fill


def _write_pieces(fd: int, pieces: Iterable[bytes]) -> None:
    for piece in pieces:
        write_all(fd, piece)


def copy_content(source: int, target: int) -> None:
    """Copy a regular file's content, keeping its holes.

    Raises:
        ImageError: it became shorter meanwhile.
        OSError: no space is left.
    """
    size = os.fstat(source).st_size
    offset = 0
    while offset < size:
        try:
            begin = os.lseek(source, offset, os.SEEK_DATA)
        except OSError:  # ENXIO: nothing but a hole follows
            break
        end = os.lseek(source, begin, os.SEEK_HOLE)
        os.lseek(source, begin, os.SEEK_SET)
        os.lseek(target, begin, os.SEEK_SET)
        while begin < end:
            data = os.read(source, min(BLOCK, end - begin))
            if not data:
                raise ImageError("a file became shorter while it was being copied")
            write_all(target, data)
            begin += len(data)
        offset = end
    os.ftruncate(target, size)
