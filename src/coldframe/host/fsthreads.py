"""Threads that act on files as a sandbox's user, with the host's reach.

File system ids and capabilities belong to a thread, so file work runs in threads of its own:
each job sets the ids that what it makes shall have. Their umask is 0 and theirs alone.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from coldframe.host import syscalls

P = ParamSpec("P")
T = TypeVar("T")

_current = threading.local()


def enter_thread() -> None:
    """Make the calling thread one that may change its ids: its own umask, for good."""
    syscalls.unshare(syscalls.CLONE_FS)
    os.umask(0)
    _current.ids = (0, 0)


def become(uid: int, gid: int) -> None:
    """Give the calling thread these host ids for what it makes from now on."""
    if _current.ids != (uid, gid):
        _current.ids = None
        syscalls.set_fs_ids(uid, gid)
        _current.ids = (uid, gid)


async def run_to_its_end(
    job: Callable[..., T], /, *args: object, cancelled: Callable[[], None] | None = None
) -> T:
    """Run a job in a thread; a cancelled caller returns when the job has ended, not before.

    For jobs on what their caller takes away behind them: a directory, a mount, a descriptor.
    `cancelled` tells the job that it may stop.
    """
    running = asyncio.ensure_future(asyncio.to_thread(job, *args))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if cancelled is not None:
            cancelled()
        await asyncio.wait({running})
        if not running.cancelled():
            running.exception()  # nobody wants it any more
        raise


class FileThreads:
    """A few threads that run one file job at a time each, never one that can block for long."""

    def __init__(self, threads: int = 4) -> None:
        self._pool = ThreadPoolExecutor(
            threads, thread_name_prefix="coldframe-files", initializer=enter_thread
        )

    async def run(
        self,
        ids: tuple[int, int],
        job: Callable[P, T],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Run a job under the host ids (uid, gid); cancelling does not stop it midway."""

        def work() -> T:
            become(*ids)
            return job(*args, **kwargs)

        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def submit(self, job: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> None:
        """Run a small job behind those that are queued; nobody waits for it."""
        self._pool.submit(job, *args, **kwargs)

    def close(self) -> None:
        """End the threads once their jobs are done."""
        self._pool.shutdown(wait=True)
