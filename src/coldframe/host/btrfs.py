"""The few btrfs calls that uppers need: subvolumes made, limited and dropped (linux/btrfs.h).

Limits are those of simple quotas (Linux 6.7 and later): writers get EDQUOT beyond, at once. They
are of groups; each subvolume has one of its own and may belong to others.
"""

from __future__ import annotations

import contextlib
import os
import struct
import uuid
from pathlib import Path

from coldframe.host import syscalls

_MAGIC = 0x94
_READ, _WRITE = 2, 1
_NAME_BYTES = 4088
_NAME_BYTES_2 = 4040
_ENABLE_SIMPLE_QUOTA = 4
_LIMIT_REFERENCED = 1
_SET_LIMIT = 1
_INHERIT = 4
_FIRST_OBJECT = 256
ALL = 1 << 48 | 1
"""The group of every subvolume that `create_subvolume` makes."""
_RESERVED = ("rsv_data", "rsv_meta_pertrans", "rsv_meta_prealloc")


def _number(direction: int, command: int, size: int) -> int:
    return direction << 30 | size << 16 | _MAGIC << 8 | command


_SUBVOL_CREATE_2 = _number(_WRITE, 24, 4096)
_SNAP_DESTROY = _number(_WRITE, 15, 4096)
_SYNC = _number(0, 8, 0)
_INO_LOOKUP = _number(_READ | _WRITE, 18, 4096)
_FS_INFO = _number(_READ, 31, 1024)
_QUOTA_CTL = _number(_READ | _WRITE, 40, 16)
_QGROUP_CREATE = _number(_WRITE, 42, 16)
_QGROUP_LIMIT = _number(_READ, 43, 48)


def _named(head: bytes, name: str, longest: int) -> bytearray:
    raw = os.fsencode(name)
    if len(raw) >= longest:
        raise ValueError(f"a subvolume's name has at most {longest - 1} bytes")
    return bytearray(head + raw.ljust(longest, b"\0"))


def create_subvolume(directory: int, name: str, limit_bytes: int | None = None) -> None:
    """Make a subvolume in an open directory, after `enable_limits`. Raises OSError."""
    limited, most = (0, 0) if limit_bytes is None else (1, limit_bytes)
    limits = (_SET_LIMIT * limited, 1, 0, 0, _LIMIT_REFERENCED * limited, most, 0, 0, 0, ALL)
    rules = bytearray(struct.pack("10Q", *limits))
    at = syscalls.address_of(rules).value
    head = struct.pack("qQQQQQQ", 0, 0, _INHERIT, len(rules), at, 0, 0)
    syscalls.ioctl(directory, _SUBVOL_CREATE_2, _named(head, name, _NAME_BYTES_2))


def destroy_subvolume(directory: int, name: str) -> None:
    """Drop a subvolume with all its content, at once; its space comes back soon. Raises OSError."""
    syscalls.ioctl(directory, _SNAP_DESTROY, _named(struct.pack("q", 0), name, _NAME_BYTES))


def sweep(directory: int) -> None:
    """Commit, and begin to free what was dropped. Raises OSError."""
    syscalls.ioctl(directory, _SYNC, bytearray())


def enable_limits(root: int) -> None:
    """Let limits be set on this file system, now without any. Twice is fine. Raises OSError."""
    syscalls.ioctl(root, _QUOTA_CTL, bytearray(struct.pack("QQ", _ENABLE_SIMPLE_QUOTA, 0)))
    with contextlib.suppress(FileExistsError):
        syscalls.ioctl(root, _QGROUP_CREATE, bytearray(struct.pack("QQ", 1, ALL)))


def limit(root: int, group: int, limit_bytes: int) -> None:
    """Bound what a group may hold; by the root, which is in none. Raises OSError."""
    arguments = struct.pack("6Q", group, _LIMIT_REFERENCED, limit_bytes, 0, 0, 0)
    syscalls.ioctl(root, _QGROUP_LIMIT, bytearray(arguments))


def group_of(subvolume: int) -> int:
    """Return the group that is an open subvolume's own. Raises OSError."""
    found = bytearray(struct.pack("QQ", 0, _FIRST_OBJECT) + bytes(_NAME_BYTES_2 + 40))
    syscalls.ioctl(subvolume, _INO_LOOKUP, found)
    return int(struct.unpack_from("Q", found)[0])


def directory_of_all(root: int) -> Path:
    """Return where the kernel tells of the group of all, by the root. Raises OSError."""
    told = bytearray(1024)
    syscalls.ioctl(root, _FS_INFO, told)
    return Path(f"/sys/fs/btrfs/{uuid.UUID(bytes=bytes(told[16:32]))}/qgroups/1_1")


def held_bytes(group: Path) -> int:
    """Return what a group holds, or is just getting, as its limit counts. Raises OSError."""
    # In this order: what becomes written between two of these is counted twice, and not left out.
    return sum(int((group / name).read_text()) for name in (*_RESERVED, "referenced"))


def most_bytes(group: Path) -> int:
    """Return what a group may hold; 0: it has no limit yet. Raises OSError."""
    return int((group / "max_referenced").read_text())


def unwritten_bytes() -> int:
    """Return what was written to all btrfs of this machine and is not on their disks yet."""
    kinds = ("data", "mixed")
    files = (Path("/sys/fs/btrfs").glob(f"*/allocation/{kind}/bytes_may_use") for kind in kinds)
    total = 0
    for file in (file for found in files for file in found):
        with contextlib.suppress(OSError, ValueError):  # unmounted meanwhile
            total += int(file.read_text())
    return total
