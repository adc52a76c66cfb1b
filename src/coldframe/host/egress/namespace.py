"""Do a piece of work in another network namespace: sockets made there stay there."""

from __future__ import annotations

import _thread
import asyncio
import os
from collections.abc import Callable
from typing import TypeVar

from coldframe.host import syscalls
from coldframe.host.processes import namespace_of

T = TypeVar("T")


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


async def work_inside(network: int, work: Callable[[], T]) -> T:
    """Run `work` in the namespace of a descriptor, in a thread that ends with it.

    The thread never comes back, so no way back can fail. What `work` raises is raised here, and
    OSError if the namespace cannot be entered. A caller that is cancelled waits for the end.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def enter() -> None:
        try:
            result = _entered(network, work)
        except BaseException as error:  # noqa: BLE001 (it is raised again by the caller)
            loop.call_soon_threadsafe(done.set_exception, error)
        else:
            loop.call_soon_threadsafe(done.set_result, result)

    # Not threading.Thread: its start waits until the thread runs, and the event loop with it.
    _thread.start_new_thread(enter, ())
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        await asyncio.wait({done})
        raise


def _entered(network: int, work: Callable[[], T]) -> T:
    syscalls.setns(network, syscalls.CLONE_NEWNET)
    return work()


def write_sysctl(name: str, value: str) -> None:
    """Set a `net.` parameter of the namespace that this thread is in."""
    fd = os.open(f"/proc/sys/net/{name}", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, value.encode())
    finally:
        os.close(fd)
