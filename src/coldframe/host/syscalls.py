"""The kernel calls that Python's os module lacks. Raise OSError as os does; keep no state.

Numbers from 424 on are the same on every architecture that Coldframe supports.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long

_OPEN_TREE, _MOVE_MOUNT, _FSOPEN, _FSCONFIG, _FSMOUNT, _FSPICK = 428, 429, 430, 431, 432, 433
_OPENAT2 = 437
_MOUNT_SETATTR = 442

RESOLVE_NO_XDEV = 0x01
RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_NO_SYMLINKS = 0x04
RESOLVE_BENEATH = 0x08
RESOLVE_IN_ROOT = 0x10

CLONE_FS = 0x200
CLONE_NEWNS = 0x20000
CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
AT_EMPTY_PATH = 0x1000
OPEN_TREE_CLONE = 1
OPEN_TREE_CLOEXEC = os.O_CLOEXEC
MOUNT_ATTR_NOATIME = 0x10
_MOUNT_ATTR_IDMAP = 0x00100000
_MOVE_MOUNT_F_EMPTY_PATH, _MOVE_MOUNT_T_EMPTY_PATH = 0x04, 0x40

_FSCONFIG_SET_FLAG, _FSCONFIG_SET_STRING = 0, 1
_FSCONFIG_CMD_CREATE, _FSCONFIG_CMD_RECONFIGURE = 6, 7
_FSPICK_CLOEXEC, _FSPICK_EMPTY_PATH = 0x1, 0x8
_FSOPEN_CLOEXEC = _FSMOUNT_CLOEXEC = 1
_MNT_DETACH = 2


class _OpenHow(ctypes.Structure):
    _fields_ = (
        ("flags", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("resolve", ctypes.c_uint64),
    )


class _CapHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _CapData(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


_CAP_VERSION = 0x20080522
_HOW_SIZE = ctypes.c_size_t(ctypes.sizeof(_OpenHow))


def _fail(what: str | bytes | None = None) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), what)


def openat2(dirfd: int, path: bytes, flags: int, *, resolve: int, mode: int = 0) -> int:
    """Open `path` below `dirfd` under the given RESOLVE_ rules; always close-on-exec."""
    how = _OpenHow(flags | os.O_CLOEXEC, mode, resolve)
    fd: int = _syscall(_OPENAT2, dirfd, ctypes.c_char_p(path), ctypes.byref(how), _HOW_SIZE)
    if fd < 0:
        raise _fail(path)
    return fd


def address_of(buffer: bytearray) -> ctypes.c_void_p:
    """Return where a buffer lies, for a call during which it is held and keeps its size.

    Of an empty one nothing.

    An array of ctypes costs a type for each length, which is garbage in a cycle afterwards.
    """
    if not buffer:
        return ctypes.c_void_p()
    return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(buffer)))


def ioctl(fd: int, request: int, argument: bytearray) -> None:
    """Make a device call that reads and writes `argument`; other threads run meanwhile.

    `fcntl.ioctl` stops them all for an argument of more than 1 KiB.
    """
    if _libc.ioctl(ctypes.c_int(fd), ctypes.c_ulong(request), address_of(argument)) < 0:
        raise _fail()


def set_fs_ids(uid: int, gid: int) -> None:
    """Set this thread's file system ids and raise its effective capabilities again.

    The kernel drops the file capabilities when the id leaves 0; they are given back, so that
    the thread still reaches what other ids closed to it, while what it makes belongs to `uid`.
    """
    _libc.setfsgid(ctypes.c_uint(gid))
    _libc.setfsuid(ctypes.c_uint(uid))
    header = _CapHeader(_CAP_VERSION, 0)
    data = (_CapData * 2)()
    if _libc.capget(ctypes.byref(header), data) != 0:
        raise _fail()
    for half in data:
        half.effective = half.permitted
    if _libc.capset(ctypes.byref(header), data) != 0:
        raise _fail()


def effective_capabilities() -> int:
    """Return this thread's effective capabilities as a bit mask."""
    header = _CapHeader(_CAP_VERSION, 0)
    data = (_CapData * 2)()
    if _libc.capget(ctypes.byref(header), data) != 0:
        raise _fail()
    low, high = int(data[0].effective), int(data[1].effective)
    return low | high << 32


def unshare(flags: int) -> None:
    """Leave what this thread shares with others (CLONE_ flags)."""
    if _libc.unshare(ctypes.c_int(flags)) != 0:
        raise _fail()


def setns(namespace: int, kind: int) -> None:
    """Let this thread enter the namespace of a descriptor; `kind` is its CLONE_ flag."""
    if _libc.setns(ctypes.c_int(namespace), ctypes.c_int(kind)) != 0:
        raise _fail("setns")


def unmount(path: bytes) -> None:
    """Take a mount away, whoever still uses it."""
    if _libc.umount2(ctypes.c_char_p(path), _MNT_DETACH) != 0:
        raise _fail(path)


def mount_detached(fs_type: str, options: Mapping[str, str | None], attributes: int = 0) -> int:
    """Mount a file system nowhere and return its root's descriptor (the mount lives with it).

    An option whose value is None is a flag; `attributes` are MOUNT_ATTR_ bits.
    """
    context: int = _syscall(_FSOPEN, ctypes.c_char_p(fs_type.encode()), _FSOPEN_CLOEXEC)
    if context < 0:
        raise _fail(fs_type)
    try:
        for key, value in options.items():
            command = _FSCONFIG_SET_FLAG if value is None else _FSCONFIG_SET_STRING
            text = None if value is None else ctypes.c_char_p(os.fsencode(value))
            _fsconfig(context, command, ctypes.c_char_p(key.encode()), text)
        _fsconfig(context, _FSCONFIG_CMD_CREATE, None, None)
        mount: int = _syscall(_FSMOUNT, context, _FSMOUNT_CLOEXEC, attributes)
        if mount < 0:
            raise _fail(fs_type)
        return mount
    except OSError as error:
        raise OSError(error.errno, _context_message(context) or error.strerror) from None
    finally:
        os.close(context)


def _fsconfig(
    context: int, command: int, key: ctypes.c_char_p | None, value: ctypes.c_char_p | None
) -> None:
    if _syscall(_FSCONFIG, context, command, key, value, 0) < 0:
        raise _fail()


def _context_message(context: int) -> str:
    """What the kernel says about the last failure, if it says anything."""
    try:
        os.set_blocking(context, False)
        return os.read(context, 4096).decode("utf-8", "replace").strip().removeprefix("e ")
    except OSError:
        return ""


def open_tree(dirfd: int, path: bytes = b"", *, clone: bool = True) -> int:
    """Return a descriptor of the mount at `path`, by default of a detached clone of it."""
    flags = OPEN_TREE_CLOEXEC | AT_EMPTY_PATH | (OPEN_TREE_CLONE if clone else 0)
    fd: int = _syscall(_OPEN_TREE, dirfd, ctypes.c_char_p(path), flags)
    if fd < 0:
        raise _fail(path)
    return fd


def reconfigure(mount: int, options: Mapping[str, str]) -> None:
    """Change options of a mounted file system, by the root of it."""
    flags = _FSPICK_CLOEXEC | _FSPICK_EMPTY_PATH
    context: int = _syscall(_FSPICK, mount, ctypes.c_char_p(b""), flags)
    if context < 0:
        raise _fail()
    try:
        for key, value in options.items():
            text = ctypes.c_char_p(os.fsencode(value))
            _fsconfig(context, _FSCONFIG_SET_STRING, ctypes.c_char_p(key.encode()), text)
        _fsconfig(context, _FSCONFIG_CMD_RECONFIGURE, None, None)
    finally:
        os.close(context)


def move_mount(mount: int, target: int) -> None:
    """Attach a detached mount to a directory, both by descriptor."""
    empty = ctypes.c_char_p(b"")
    flags = _MOVE_MOUNT_F_EMPTY_PATH | _MOVE_MOUNT_T_EMPTY_PATH
    if _syscall(_MOVE_MOUNT, mount, empty, target, empty, flags) < 0:
        raise _fail()


def idmap_mount(tree: int, user_namespace: int) -> None:
    """Show a detached clone's files under the ids that a user namespace maps them to."""
    attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_IDMAP, 0, 0, user_namespace)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    path = ctypes.c_char_p(b"")
    if _syscall(_MOUNT_SETATTR, tree, path, AT_EMPTY_PATH, attributes, size) < 0:
        raise _fail()


def syncfs(fd: int) -> None:
    """Write what a file system holds in memory; fails if some of it was lost since the last time.

    The last time is counted for each opened file. Raises OSError.
    """
    if _libc.syncfs(ctypes.c_int(fd)) != 0:
        raise _fail()


def punch_hole(fd: int, offset: int, size: int) -> None:
    """Give back the space of a part of a file; it reads as zeros, and the file is as long."""
    mode = ctypes.c_int(0x03)  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
    if _libc.fallocate64(ctypes.c_int(fd), mode, ctypes.c_int64(offset), ctypes.c_int64(size)) < 0:
        raise _fail()
