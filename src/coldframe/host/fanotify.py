"""Learn who opens and writes files of a file system, and hold opens back until they are judged."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from dataclasses import dataclass

from coldframe.host.syscalls import AT_EMPTY_PATH, address_of, ioctl

ACCESS, MODIFY, CLOSE_WRITE, OPEN = 0x1, 0x2, 0x8, 0x20
OPEN_EXEC, OPEN_PERM, OPEN_EXEC_PERM = 0x1000, 0x10000, 0x40000
OVERFLOW = 0x4000

_CLOEXEC, _NONBLOCK, _CLASS_CONTENT, _UNLIMITED = 0x1, 0x2, 0x4, 0x10 | 0x20
_REPORT_FID = 0x200
_MARK_ADD, _MARK_REMOVE, _MARK_FLUSH, _MARK_FILESYSTEM = 0x1, 0x2, 0x80, 0x100
_FIONREAD = 0x541B
_ALLOW, _DENY = 1, 2
_EVENT = struct.Struct("=IBBHQii")
_INFO = struct.Struct("=BBHQ")
_ANSWER = struct.Struct("=iI")
_READ_BYTES = 1 << 16
_STATX_BTIME, _STATX_BASIC = 0x800, 0x7FF
_STATX = struct.Struct("=I28xQQ32xqI44xII")
_STATX_BYTES = 256
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a process did to a regular file."""

    mask: int
    fd: int
    """Of the file, the receiver's to close; negative: none."""
    pid: int
    """On the host; it may have ended."""


@dataclass(frozen=True, slots=True)
class Change:
    """Something that a process did to a file, by a descriptor or by its name."""

    mask: int
    inode: int
    """0: more happened than could be told."""
    pid: int
    """On the host; it may have ended."""


@dataclass(frozen=True, slots=True)
class Birth:
    """What tells one file from another, and when it was made."""

    key: tuple[int, int, int]
    """Device and inode number, which a later file may have, and when it was made."""
    size: int
    made_ns: int
    """0: the file system does not know."""


class Listener:
    """One group of the kernel's. To close it lets everything pass that was held back."""

    _kind = _CLASS_CONTENT

    def __init__(self) -> None:
        """Raises OSError: no right, too many of them, or a kernel without."""
        flags = _CLOEXEC | _NONBLOCK | _UNLIMITED | self._kind
        self.fd: int = _libc.fanotify_init(
            ctypes.c_uint(flags), ctypes.c_uint(os.O_RDONLY | os.O_CLOEXEC)
        )
        if self.fd < 0:
            raise _fail()

    def watch(self, directory: int, mask: int) -> None:
        """Be told of every file of the file system that a directory is on. Raises OSError."""
        self._mark(_MARK_ADD, mask, directory)

    def watch_less(self, directory: int, mask: int) -> None:
        """Take back a part of `watch`. Raises OSError."""
        self._mark(_MARK_REMOVE, mask, directory)

    def unwatch(self, directory: int) -> None:
        """Be told of nothing any more. `directory` is any one that is there. Raises OSError."""
        self._mark(_MARK_FLUSH, 0, directory)

    def _mark(self, what: int, mask: int, directory: int) -> None:
        result = _libc.fanotify_mark(
            ctypes.c_int(self.fd),
            ctypes.c_uint(what | _MARK_FILESYSTEM),
            ctypes.c_uint64(mask),
            ctypes.c_int(directory),
            ctypes.c_char_p(b"."),
        )
        if result < 0:
            raise _fail()

    def backlog(self) -> int:
        """Return how many events wait."""
        waiting = bytearray(4)
        ioctl(self.fd, _FIONREAD, waiting)
        return int.from_bytes(waiting, "little") // _EVENT.size

    def take(self) -> Event | None:
        """Take the next event; None: none waits. What is held back must be answered.

        One at a time: of several the kernel drops in silence those that it has no descriptor for.

        Raises:
            OSError: it had none for this one, which is gone; what was held back was refused.
        """
        try:
            data = os.read(self.fd, _EVENT.size)
        except BlockingIOError:
            return None
        _, _, _, _, mask, fd, pid = _EVENT.unpack(data)
        return Event(mask, fd, pid)

    def answer(self, event: Event, *, allow: bool) -> None:
        """Let an open that was held back go on or fail with EPERM."""
        os.write(self.fd, _ANSWER.pack(event.fd, _ALLOW if allow else _DENY))

    def close(self) -> None:
        """Stop. Twice is fine."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class ChangeListener(Listener):
    """Tells of changes on one file system by inode; `truncate` by name tells no other kind."""

    _kind = _REPORT_FID

    def __init__(self, directory: int) -> None:
        """Raises OSError, as a `Listener` does.

        Args:
            directory: any one of the file system.
        """
        super().__init__()
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        try:
            self._directory = os.open(".", flags, dir_fd=directory)
        except OSError:
            super().close()
            raise

    def close(self) -> None:
        """Stop. Twice is fine."""
        if self.fd >= 0:
            os.close(self._directory)
        super().close()

    def changes(self, most: int) -> list[Change]:
        """Take so many, or a few more, in the kernel's order, of files that are still there.

        Raises:
            OSError: it cannot be told what one of them was made to.
        """
        found: list[Change] = []
        while most > 0:
            try:
                data = os.read(self.fd, _READ_BYTES)
            except BlockingIOError:
                break
            at = 0
            while at < len(data):
                length, _, _, head, mask, _, pid = _EVENT.unpack_from(data, at)
                inode = 0 if mask & OVERFLOW else self._inode(data[at + head : at + length])
                if inode is not None:
                    found.append(Change(mask, inode, pid))
                at += length
                most -= 1
        return found

    def _inode(self, beside: bytes) -> int | None:
        """Return the inode that a record is about; None: it is gone."""
        handle = bytearray(beside[_INFO.size :])
        fd = _libc.open_by_handle_at(
            ctypes.c_int(self._directory),
            address_of(handle),
            ctypes.c_int(os.O_PATH | os.O_CLOEXEC),
        )
        if fd < 0:
            if ctypes.get_errno() == errno.ESTALE:
                return None
            raise _fail()
        try:
            return os.fstat(fd).st_ino
        finally:
            os.close(fd)


def birth(fd: int) -> Birth:
    """Return which file a descriptor is of, and when it was made. Raises OSError."""
    buffer = bytearray(_STATX_BYTES)
    result = _libc.statx(
        ctypes.c_int(fd),
        ctypes.c_char_p(b""),
        ctypes.c_int(AT_EMPTY_PATH),
        ctypes.c_uint(_STATX_BASIC | _STATX_BTIME),
        address_of(buffer),
    )
    if result < 0:
        raise _fail()
    mask, inode, size, seconds, nanoseconds, major, minor = _STATX.unpack_from(buffer)
    made = seconds * 1_000_000_000 + nanoseconds if mask & _STATX_BTIME else 0
    return Birth((major << 32 | minor, inode, made), size, made)


def _fail() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
