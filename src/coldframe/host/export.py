"""Copy an upper directory out as a layer: what was written, deleted and replaced, and no more.

The tree is hostile and at rest (its processes are dead). It is walked by descriptors, no link is
followed, and what a layer has no use for is left behind.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from coldframe.host import syscalls
from coldframe.host.roottree import closing, reopen
from coldframe.protocol.errors import FileError, StorageFullError

_FICLONE = 0x40049409
_PIECE = 8 << 20
_DEPTH_LIMIT = 1024
_STAY = syscalls.RESOLVE_NO_XDEV | syscalls.RESOLVE_NO_SYMLINKS | syscalls.RESOLVE_NO_MAGICLINKS
_LOOK = os.O_PATH | os.O_NOFOLLOW
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_KEPT_XATTRS = frozenset({"trusted.overlay.opaque", "security.capability"})


def export_layer(directory: int, name: bytes, target: Path) -> None:
    """Copy the upper `name` of an open directory (taken over) into the empty `target`.

    Ids stay as they are stored, which is as the sandbox has them. Raises StorageFullError,
    FileError.
    """
    try:
        with (
            closing(directory),
            closing(os.open(target, _OPEN_DIRECTORY)) as into,
            closing(syscalls.openat2(directory, name, _OPEN_DIRECTORY, resolve=_STAY)) as top,
        ):
            _Copy(top, into).run()
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise StorageFullError(f"{target}: {error.strerror}") from error
        raise FileError(f"the upper cannot be copied to {target}: {error}") from error


class _Copy:
    def __init__(self, source: int, target: int) -> None:
        self._source, self._target = source, target
        self._seen: dict[int, bytes] = {}

    def run(self) -> None:
        """Copy everything below the source, then its own attributes."""
        top = os.fstat(self._source)
        levels = [(os.dup(self._source), os.dup(self._target), self._names(self._source), b"", top)]
        try:
            while levels:
                source, target, names, prefix, status = levels[-1]
                name = next(names, None)
                if name is None:
                    # Last, or the copies below would change its times.
                    _copy_attributes(source, target, status)
                    levels.pop()
                    os.close(source)
                    os.close(target)
                    continue
                below = self._entry(source, target, name, prefix + name)
                if below is not None:
                    if len(levels) >= _DEPTH_LIMIT:
                        raise FileError(f"the upper is deeper than {_DEPTH_LIMIT} levels")
                    levels.append(below)
        finally:
            for source, target, *_ in levels:
                os.close(source)
                os.close(target)

    def _names(self, fd: int) -> Iterator[bytes]:
        with closing(os.open(".", _OPEN_DIRECTORY, dir_fd=fd)) as listing:
            names = [os.fsencode(name) for name in os.listdir(listing)]  # noqa: PTH208
        return iter(sorted(names))

    def _entry(
        self, source: int, target: int, name: bytes, path: bytes
    ) -> tuple[int, int, Iterator[bytes], bytes, os.stat_result] | None:
        """Copy one entry; of a directory return the level that is left to do."""
        with closing(syscalls.openat2(source, name, _LOOK, resolve=_STAY)) as handle:
            status = os.fstat(handle)
            if stat.S_ISDIR(status.st_mode):
                os.mkdir(name, 0o700, dir_fd=target)
                opened = reopen(handle, os.O_RDONLY | os.O_DIRECTORY)
                made = os.open(name, _OPEN_DIRECTORY, dir_fd=target)
                return opened, made, self._names(opened), path + b"/", status
            if status.st_nlink > 1 and self._linked(status, target, name, path):
                return None
            if stat.S_ISREG(status.st_mode):
                with (
                    closing(reopen(handle, os.O_RDONLY)) as content,
                    closing(os.open(name, _NEW_FILE, 0o600, dir_fd=target)) as made,
                ):
                    _copy_content(content, made, status)
                    _copy_attributes(content, made, status)
                return None
            self._special(handle, target, name, status)
        return None

    def _linked(self, status: os.stat_result, target: int, name: bytes, path: bytes) -> bool:
        """Link to where the same inode was copied before, if it was."""
        first = self._seen.get(status.st_ino)
        if first is None:
            self._seen[status.st_ino] = path
            return False
        os.link(first, name, src_dir_fd=self._target, dst_dir_fd=target, follow_symlinks=False)
        return True

    def _special(self, handle: int, target: int, name: bytes, status: os.stat_result) -> None:
        mode = status.st_mode
        if stat.S_ISLNK(mode):
            os.symlink(os.readlink(b"", dir_fd=handle), name, dir_fd=target)
        elif stat.S_ISCHR(mode) and status.st_rdev == 0:
            os.mknod(name, stat.S_IFCHR, 0, dir_fd=target)  # a whiteout
        elif stat.S_ISFIFO(mode):
            os.mkfifo(name, 0o600, dir_fd=target)
        else:
            return  # a socket that nobody listens on any more, or a device: no part of a layer
        os.chown(name, status.st_uid, status.st_gid, dir_fd=target, follow_symlinks=False)
        if not stat.S_ISLNK(mode):
            os.chmod(name, stat.S_IMODE(mode), dir_fd=target)
        times = (status.st_atime_ns, status.st_mtime_ns)
        os.utime(name, ns=times, dir_fd=target, follow_symlinks=False)


def _copy_attributes(source: int, target: int, status: os.stat_result) -> None:
    os.fchown(target, status.st_uid, status.st_gid)
    os.fchmod(target, stat.S_IMODE(status.st_mode))
    for name in os.listxattr(source):
        if name in _KEPT_XATTRS or name.startswith("user."):
            with contextlib.suppress(FileNotFoundError):
                os.setxattr(target, name, os.getxattr(source, name))
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))


def _copy_content(source: int, target: int, status: os.stat_result) -> None:
    """Share the blocks where the file system can, else copy what is not a hole."""
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise
    else:
        return
    at = 0
    while at < status.st_size:
        try:
            start = os.lseek(source, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                break
            raise
        at = min(os.lseek(source, start, os.SEEK_HOLE), status.st_size)
        _copy_range(source, target, start, at)
    os.ftruncate(target, status.st_size)


def _copy_range(source: int, target: int, start: int, end: int) -> None:
    while start < end:
        data = os.pread(source, min(_PIECE, end - start), start)
        if not data:
            return
        view = memoryview(data)
        while view:
            done = os.pwrite(target, view, start)
            start, view = start + done, view[done:]
