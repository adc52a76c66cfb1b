"""Do a piece of work in another network namespace: sockets made there stay there."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from coldframe.host.processes import namespace_of

T = TypeVar("T")

_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def open_network(pid: int, inode: int) -> int:
    """Return a descriptor of a process' network namespace.

    `inode` is the namespace's number: a pid that now names another process is found out.
    Raises ProcessLookupError if the process has ended.
    """
    try:
        fd = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ProcessLookupError(pid) from error
    if os.fstat(fd).st_ino != inode or namespace_of(pid, "net") != inode:
        os.close(fd)
        raise ProcessLookupError(pid)
    return fd


def run_inside(network: int, work: Callable[[], T]) -> T:
    """Run `work` in the namespace of a descriptor, in a thread that ends with it.

    Blocks until it is done; the thread never comes back, so no way back can fail. What `work`
    raises is raised here, and OSError if the namespace cannot be entered.
    """
    outcome: list[T] = []
    failure: list[BaseException] = []

    def enter() -> None:
        try:
            if _libc.setns(network, _CLONE_NEWNET) < 0:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number), "setns")
            outcome.append(work())
        except BaseException as error:  # noqa: BLE001 (it is raised again by the caller)
            failure.append(error)

    thread = threading.Thread(target=enter, name="coldframe-egress", daemon=True)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return outcome[0]


def write_sysctl(name: str, value: str) -> None:
    """Set a `net.` parameter of the namespace that this thread is in."""
    Path("/proc/sys/net", name).write_text(value)
