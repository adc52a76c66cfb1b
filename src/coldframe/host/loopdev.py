"""Attach a file to a loop device that goes away with its last user.

The device keeps the descriptor's open file, so a flock taken on it lives exactly as long as the
device, whoever is killed meanwhile.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct

_LOOP_CTL_GET_FREE = 0x4C82
_LOOP_CONFIGURE = 0x4C0A
_AUTOCLEAR = 4
_DIRECT_IO = 16
_INFO_BYTES = 232
_FLAGS_AT = 52
_RESERVED_BYTES = 64
_BLOCK = 4096
_RETRIES = 64


def attach(fd: int) -> tuple[int, str]:
    """Attach an open file; return a descriptor of the device, and the device's path.

    The device is cleared when that descriptor and every mount of it are gone.
    Raises OSError.
    """
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    try:
        for _ in range(_RETRIES):
            path = f"/dev/loop{fcntl.ioctl(control, _LOOP_CTL_GET_FREE)}"
            try:
                return _configure(path, fd), path
            except OSError as error:
                if error.errno != errno.EBUSY:  # somebody else was faster
                    raise
        raise OSError(errno.EBUSY, "no free loop device")
    finally:
        os.close(control)


def _configure(path: str, fd: int) -> int:
    device = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        info = bytearray(_INFO_BYTES)
        struct.pack_into("I", info, _FLAGS_AT, _AUTOCLEAR | _DIRECT_IO)
        config = struct.pack("II", fd, _BLOCK) + bytes(info) + bytes(_RESERVED_BYTES)
        fcntl.ioctl(device, _LOOP_CONFIGURE, config)
    except BaseException:
        os.close(device)
        raise
    return device
