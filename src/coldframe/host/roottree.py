"""Resolve hostile paths below a sandbox's root without ever leaving it.

Everything goes through openat2: links and `..` are resolved inside the root, magic links are
refused, and so is every mount but the root's own (/proc, /sys, /dev), where reading a file can
block or act. What was resolved is looked at (O_PATH, fstat) before it is opened.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from coldframe.host import syscalls
from coldframe.protocol.errors import (
    CapacityError,
    ColdframeError,
    FileError,
    InvalidRequestError,
    PathExistsError,
    PathNotFoundError,
    PathRefusedError,
    SandboxGoneError,
    StorageFullError,
)
from coldframe.protocol.text import encoded, excerpt

IDS_PER_SANDBOX = 65536
OVERFLOW_ID = 65534
_INSIDE = syscalls.RESOLVE_IN_ROOT | syscalls.RESOLVE_NO_MAGICLINKS | syscalls.RESOLVE_NO_XDEV
_RACE_RETRIES = 64
_LINK_LIMIT = 40
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def path_bytes(path: str | bytes) -> bytes:
    """Return an absolute path's bytes.

    Raises:
        InvalidRequestError: empty, relative, with a NUL, not to be encoded, or no path at all.
    """
    if not isinstance(path, str | bytes):
        raise InvalidRequestError(f"path {path!r} is neither text nor bytes")
    raw = encoded(path, f"path {excerpt(path)}")
    if not raw.startswith(b"/"):
        raise InvalidRequestError(f"path {excerpt(path)} is not absolute")
    if b"\0" in raw:
        raise InvalidRequestError(f"path {excerpt(path)} holds a NUL")
    return raw


_BY_ERRNO: dict[int, type[ColdframeError]] = {
    errno.ENOENT: PathNotFoundError,
    errno.ENOTDIR: PathNotFoundError,
    errno.EEXIST: PathExistsError,
    errno.ENOTEMPTY: PathExistsError,
    errno.EISDIR: PathExistsError,
    errno.ENOSPC: StorageFullError,
    errno.EDQUOT: StorageFullError,
    errno.EROFS: StorageFullError,  # all of the root can be written until its pool finds no room
    errno.ELOOP: PathRefusedError,
    errno.EAGAIN: PathRefusedError,
    errno.EBUSY: PathRefusedError,
    errno.ENXIO: PathRefusedError,
    errno.EACCES: PathRefusedError,
    errno.EPERM: PathRefusedError,
    errno.EXDEV: PathRefusedError,
    errno.ESTALE: SandboxGoneError,
    errno.EMFILE: CapacityError,
    errno.ENFILE: CapacityError,
    errno.ENOMEM: CapacityError,
}
_TEXTS = {
    errno.EXDEV: "on a pseudo file system of the sandbox (/proc, /sys, /dev); use exec",
    errno.EROFS: "Read-only file system; the disk below the node's sandboxes has been full",
    errno.ENOTEMPTY: "Directory not empty; remove it with recursive=True",
}


def typed(error: OSError, path: bytes) -> ColdframeError:
    """Return the Coldframe error that a system call's failure on `path` stands for."""
    number = error.errno or 0
    text = _TEXTS.get(number, os.strerror(number))
    return _BY_ERRNO.get(number, FileError)(f"{excerpt(path)}: {text}")


@contextlib.contextmanager
def typed_errors(path: bytes) -> Iterator[None]:
    """Turn any OSError of the block into the typed error for `path`."""
    try:
        yield
    except OSError as error:
        raise typed(error, path) from error


@contextlib.contextmanager
def closing(fd: int) -> Iterator[int]:
    """Close a descriptor at the end of the block."""
    try:
        yield fd
    finally:
        os.close(fd)


@dataclass(frozen=True)
class RootTree:
    """A sandbox's root directory (an O_PATH descriptor it does not own) and its id range."""

    root: int
    id_base: int

    def open(self, path: bytes, flags: int = os.O_PATH) -> int:
        """Open what `path` leads to. Only O_PATH may name what was not looked at.

        Raises OSError.
        """
        for _ in range(_RACE_RETRIES):
            try:
                return syscalls.openat2(self.root, path, flags, resolve=_INSIDE)
            except OSError as error:
                # A rename somewhere on the way while `..` was resolved: ask again.
                if error.errno != errno.EAGAIN:
                    raise
        raise OSError(errno.EAGAIN, "the path kept changing", path)

    def open_regular(self, path: bytes, flags: int = os.O_RDONLY) -> int:
        """Open a regular file's content; anything else is refused before it is touched.

        Raises OSError, PathRefusedError, PathExistsError (a directory).
        """
        with closing(self.open(path)) as handle:
            require_regular(os.fstat(handle), path)
            return reopen(handle, flags)

    def parent(self, path: bytes) -> tuple[int, bytes]:
        """Return an O_PATH descriptor of the directory that holds `path`, and the last name.

        The last name is not resolved, and is never empty, `.` or `..`.
        """
        directory, _, name = path.rstrip(b"/").rpartition(b"/")
        if name in {b"", b".", b".."}:
            raise PathRefusedError(f"{excerpt(path)} does not name an entry of a directory")
        return self.open(directory or b"/", os.O_PATH | os.O_DIRECTORY), name

    def parent_of_target(self, path: bytes) -> tuple[int, bytes]:
        """As `parent`, but links in the last place are followed to where they lead."""
        for _ in range(_LINK_LIMIT):
            directory, name = self.parent(path)
            try:
                target = os.readlink(name, dir_fd=directory)
            except OSError as error:
                if error.errno in {errno.EINVAL, errno.ENOENT}:  # not a link, or nothing yet
                    return directory, name
                os.close(directory)
                raise
            os.close(directory)
            if not target.startswith(b"/"):
                target = path.rstrip(b"/").rpartition(b"/")[0] + b"/" + target
            path = target
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)

    def host_id(self, number: int) -> int:
        """Map a sandbox's id to the host's.

        Raises:
            InvalidRequestError: outside 0..65535: it would be another sandbox's.
        """
        if not 0 <= number < IDS_PER_SANDBOX:
            raise InvalidRequestError(f"id {number} is not in 0..{IDS_PER_SANDBOX - 1}")
        return self.id_base + number

    def own_id(self, host_id: int) -> int:
        """Map a host's id to the sandbox's; ids of nobody in the sandbox become 65534."""
        number = host_id - self.id_base
        return number if 0 <= number < IDS_PER_SANDBOX else OVERFLOW_ID


def reopen(handle: int, flags: int) -> int:
    """Open what an O_PATH descriptor names, never waiting for it."""
    return os.open(f"/proc/self/fd/{handle}", flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)


def fd_path(fd: int) -> Path:
    """The name under which this process reaches what a descriptor of its own names."""
    return Path(f"/proc/self/fd/{fd}")


def require_regular(status: os.stat_result, path: bytes) -> None:
    """Refuse anything but a regular file."""
    if stat.S_ISREG(status.st_mode):
        return
    kind = _KINDS.get(stat.S_IFMT(status.st_mode), "not a file")
    message = f"{excerpt(path)} is {kind}, not a regular file"
    if stat.S_ISDIR(status.st_mode):
        raise PathExistsError(message)
    raise PathRefusedError(message)
