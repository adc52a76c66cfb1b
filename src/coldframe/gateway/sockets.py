"""Unix sockets, each of one process: who serves one holds a lock beside it to its end.

So nobody takes the place of one that is leaving, and what a killed one left is cleared away by
whoever gets its lock. The lock's file says of a stand-in that it is one: a node that clients
started because there was none, which leaves its sandboxes to whoever is meant to serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import signal
import socket
import stat
import time
from collections.abc import Mapping
from pathlib import Path

from coldframe.protocol import places
from coldframe.protocol.errors import CapabilityError

_BACKLOG = 1024
_LEAVING_S = 60.0
"""How long one who lets nobody in any more may take to be gone."""
_LOOK_S = 0.05
_STAND_IN = b"stand-in"
_held: dict[Path, int] = {}
"""Locks that this process holds to its end."""


async def claim(path: Path, *, relieve: bool = False, stand_in: bool = False) -> None:
    """Hold the lock of a socket; its directory is made. Twice is fine.

    Args:
        path: of the socket.
        relieve: take over from a stand-in; clients that use it wait for a moment.
        stand_in: let the next one do so.
    Raises:
        CapabilityError: somebody else serves there, or the directory cannot be written.
    """
    if path in _held:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(f"{path.name}.lock")
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise CapabilityError(
            f"no socket can be made at {path}: {error}; run this as root, or choose another place"
        ) from error
    try:
        await _lock(fd, path, relieve=relieve)
        os.ftruncate(fd, 0)
        os.pwrite(fd, _STAND_IN if stand_in else b"", 0)
    except BaseException:
        os.close(fd)
        raise
    _held[path] = fd


def go_on(locks: Mapping[str, int]) -> None:
    """Hold the locks that the program before held in this process."""
    _held.update({Path(path): fd for path, fd in locks.items()})


def locks() -> dict[str, int]:
    """Return what is held, by path."""
    return {str(path): fd for path, fd in _held.items()}


async def _lock(fd: int, path: Path, *, relieve: bool) -> None:
    patient_until = time.monotonic() + _LEAVING_S
    asked: set[int] = set()
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = _served_by(path)
            if pid and pid not in asked and relieve and os.pread(fd, 64, 0) == _STAND_IN:
                asked.add(pid)
                patient_until = time.monotonic() + _LEAVING_S
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)
            elif (pid is not None and pid not in asked) or time.monotonic() > patient_until:
                raise CapabilityError(
                    f"another node serves at {path}: see coldframe node status; "
                    "coldframe node stop ends it and its sandboxes"
                ) from None
            await asyncio.sleep(_LOOK_S)
        else:
            return


def _served_by(path: Path) -> int | None:
    """Return the process that answers at a socket; None: nobody does; 0: it cannot be told."""
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        try:
            with places.address_of(path) as address:
                probe.connect(address)
        except OSError:
            return None
        credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[:4], "little")


async def listen(path: Path) -> socket.socket:
    """Claim a path and return a socket that only root and this process's user can connect to.

    Raises:
        CapabilityError: the path is taken, or no socket can be made there.
    """
    await claim(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _bind(listener, path)
    except OSError as error:
        listener.close()
        raise CapabilityError(f"no socket can be made at {path}: {error}") from error
    return listener


def _bind(listener: socket.socket, path: Path) -> None:
    if path.exists() and not stat.S_ISSOCK(path.lstat().st_mode):
        raise FileExistsError(errno.EEXIST, "something else is there")
    path.unlink(missing_ok=True)  # whoever made it is gone, else we had not got its lock
    umask = os.umask(0o177)
    try:
        with places.address_of(path) as address:
            listener.bind(address)
    finally:
        os.umask(umask)
    listener.listen(_BACKLOG)
