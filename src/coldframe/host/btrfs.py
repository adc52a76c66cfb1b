"""The few btrfs calls that uppers need: subvolumes made, limited and dropped (linux/btrfs.h)."""

from __future__ import annotations

import os
import struct

from coldframe.host import syscalls

_MAGIC = 0x94
_READ, _WRITE = 2, 1
_NAME_BYTES = 4088
_ENABLE_SIMPLE_QUOTA = 4
_LIMIT_REFERENCED = 1


def _number(direction: int, command: int, size: int) -> int:
    return direction << 30 | size << 16 | _MAGIC << 8 | command


_SUBVOL_CREATE = _number(_WRITE, 14, 4096)
_SNAP_DESTROY = _number(_WRITE, 15, 4096)
_SYNC = _number(0, 8, 0)
_QUOTA_CTL = _number(_READ | _WRITE, 40, 16)
_QGROUP_LIMIT = _number(_READ, 43, 48)


def _named(name: str) -> bytearray:
    raw = os.fsencode(name)
    if len(raw) >= _NAME_BYTES:
        raise ValueError(f"a subvolume's name has at most {_NAME_BYTES - 1} bytes")
    return bytearray(struct.pack("q", 0) + raw.ljust(_NAME_BYTES, b"\0"))


def create_subvolume(directory: int, name: str) -> None:
    """Make a subvolume in an open directory. Raises OSError."""
    syscalls.ioctl(directory, _SUBVOL_CREATE, _named(name))


def destroy_subvolume(directory: int, name: str) -> None:
    """Drop a subvolume with all its content, at once; its space comes back soon. Raises OSError."""
    syscalls.ioctl(directory, _SNAP_DESTROY, _named(name))


def sweep(directory: int) -> None:
    """Commit, and begin to free what was dropped. Raises OSError."""
    syscalls.ioctl(directory, _SYNC, bytearray())


def enable_simple_quota(directory: int) -> None:
    """Let limits be set on this file system (Linux 6.7 and later). Raises OSError."""
    syscalls.ioctl(directory, _QUOTA_CTL, bytearray(struct.pack("QQ", _ENABLE_SIMPLE_QUOTA, 0)))


def limit_subvolume(subvolume: int, limit_bytes: int) -> None:
    """Bound what an open subvolume may hold; writers get EDQUOT beyond. Raises OSError."""
    arguments = struct.pack("6Q", 0, _LIMIT_REFERENCED, limit_bytes, 0, 0, 0)
    syscalls.ioctl(subvolume, _QGROUP_LIMIT, bytearray(arguments))
