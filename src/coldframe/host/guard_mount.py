"""Mount the file system of a guarded directory in its sandbox, watched from the first open on.

By descriptors alone: no path of the sandbox's is followed.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from coldframe.host import fanotify, syscalls
from coldframe.host.fanotify import ACCESS, CLOSE_WRITE, MODIFY, OPEN, OPEN_EXEC, OPEN_PERM
from coldframe.host.guard import Guard
from coldframe.host.guard_command import GuardedCommand
from coldframe.host.guard_holds import Holds
from coldframe.host.guard_judge import Judge
from coldframe.host.provenance import Ledger
from coldframe.host.roottree import closing

_REALTIME_COARSE = 5
_ELSEWHERE = ACCESS | OPEN | OPEN_EXEC | MODIFY | CLOSE_WRITE
_NOSUID, _NODEV, _NOEXEC = 0x2, 0x4, 0x8


@dataclass(frozen=True)
class Site:
    """The sandbox of which a directory is guarded. The descriptors stay the caller's."""

    init_pid: int
    """On the host."""
    mount_namespace: int
    root: int
    """O_PATH."""
    id_base: int
    layers: Sequence[Path]
    """Trees of the image, top first."""
    ready_ns: int
    """`file_time_ns` when it was ready."""


@dataclass(frozen=True)
class Wanted:
    """What is asked of a guard."""

    owner: tuple[int, int]
    """Host ids."""
    size_bytes: int
    names: frozenset[bytes]
    """Files that are vouched for."""
    trusted: Sequence[bytes]
    """See `Ledger`."""
    others: frozenset[str]
    """See `GuardedCommand`."""


def begin(site: Site, target: int, wanted: Wanted) -> Guard:
    """Mount over a directory (O_PATH, in the sandbox's namespace) and begin to judge.

    Raises:
        OSError: it cannot be mounted or watched.
    """
    uid, gid = map(str, wanted.owner)
    options = {"size": str(wanted.size_bytes), "mode": "0700", "uid": uid, "gid": gid}
    mount = syscalls.mount_detached("tmpfs", options, _NOSUID | _NODEV | _NOEXEC)
    listeners: list[fanotify.Listener] = []
    places: list[int] = []
    try:
        listeners.append(listener := fanotify.Listener())
        listeners.append(changes := fanotify.ChangeListener(mount))
        with closing(_open(mount, b".")) as top:
            listener.watch(top, OPEN_PERM)
            changes.watch(top, MODIFY | CLOSE_WRITE)
        for place in (b".", b"dev/shm", b"tmp"):
            with contextlib.suppress(FileNotFoundError):
                places.append(_open(site.root, place))
                listener.watch(places[-1], _ELSEWHERE)
        if fanotify.birth(site.root).made_ns == 0:
            raise OSError(0, "its file system does not know when files were made")
        command = GuardedCommand(wanted.others)
        ledger = Ledger(
            *(site.ready_ns, _next_tick(), site.layers, wanted.trusted, command.is_outsider)
        )
        judge = Judge(
            *(command, ledger, wanted.names),
            root=os.dup(site.root),
            id_base=site.id_base,
            init_pid=site.init_pid,
        )
        guard = Guard((mount, listener, changes, Holds(listener, places)), judge)
    except BaseException:
        for fd in (mount, *places):
            os.close(fd)
        for one in listeners:
            one.close()
        raise
    try:
        in_namespace(site.mount_namespace, lambda: syscalls.move_mount(mount, target))
        guard.start()
    except BaseException:
        guard.abandon()
        raise
    return guard


def _open(root: int, place: bytes) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    resolve = syscalls.RESOLVE_IN_ROOT | syscalls.RESOLVE_NO_SYMLINKS
    return syscalls.openat2(root, place, flags, resolve=resolve)


def unmount(guard: Guard, mount_namespace: int) -> None:
    """Take the directory away, whoever has files open in it. Raises OSError."""

    def work() -> None:
        os.fchdir(guard.mount)
        syscalls.unmount(b".")

    in_namespace(mount_namespace, work)


def in_namespace(mount_namespace: int, work: Callable[[], None]) -> None:
    """Do something in a mount namespace, in a thread that ends with it. By descriptors only."""

    def enter() -> None:
        syscalls.unshare(syscalls.CLONE_FS)
        syscalls.setns(mount_namespace, syscalls.CLONE_NEWNS)
        work()

    with ThreadPoolExecutor(1) as thread:
        thread.submit(enter).result()


def _next_tick() -> int:
    """Wait until files are made at a later time than now; they carry that of the last tick."""
    now = file_time_ns()
    while (then := file_time_ns()) == now:
        time.sleep(0.0005)  # at most a tick, some milliseconds; the kernel tells nobody of it
    return then


def file_time_ns() -> int:
    """Return the time that a file made now would have: that of the kernel's last tick."""
    return time.clock_gettime_ns(_REALTIME_COARSE)
