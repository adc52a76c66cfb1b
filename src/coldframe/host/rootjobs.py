"""Run jobs on one sandbox's root in file threads; the root stays open as long as any uses it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from coldframe.host import forks
from coldframe.host.fsthreads import FileThreads
from coldframe.host.roottree import RootTree
from coldframe.protocol.errors import SandboxGoneError

T = TypeVar("T")
Ids = tuple[int, int]
"""Host ids (uid, gid) of what a job makes."""


class RootJobs:
    """Jobs on one root. Usable until `close`; then every call raises SandboxGoneError."""

    def __init__(self, root: int, id_base: int, threads: FileThreads) -> None:
        """`root` is an O_PATH descriptor that is taken over."""
        self._tree = RootTree(root, id_base)
        self._threads = threads
        self._users = 1
        self._closed = False
        forks.own(self)

    @property
    def tree(self) -> RootTree:
        """What jobs work on. Raises SandboxGoneError once closed."""
        if self._closed:
            raise SandboxGoneError("the sandbox is gone; its files are no longer reachable")
        return self._tree

    def close(self) -> None:
        """Give the root back, as soon as no job uses it. Twice is fine."""
        if not self._closed:
            self._closed = True
            self._release()

    def abandon(self) -> None:
        """See `forks.Owner`."""
        if self._users:
            self._closed, self._users = True, 0
            os.close(self._tree.root)

    async def run(
        self,
        ids: Ids | None,
        job: Callable[..., T],
        *args: object,
        undo: Callable[[T], None] | None = None,
    ) -> T:
        """Run a job under these ids, None: as the sandbox's root.

        It goes on when the caller is cancelled; `undo` is then given its result.
        """
        running = self.begin(ids, job, *args)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            if undo is not None:
                running.add_done_callback(functools.partial(_undo, self._threads, undo))
            raise

    def begin(self, ids: Ids | None, job: Callable[..., T], *args: object) -> asyncio.Future[T]:
        """Start a job as `run` does."""
        return self._begin(self.tree, ids, job, *args)

    def finish(
        self, ids: Ids | None, job: Callable[[], None], *, behind: asyncio.Future[Any] | None
    ) -> asyncio.Future[None]:
        """Start a job that gives something back, once another has ended; also when closed."""
        return self._begin(self._tree, ids, job, behind=behind)

    def _begin(
        self,
        tree: RootTree,
        ids: Ids | None,
        job: Callable[..., T],
        *args: object,
        behind: asyncio.Future[Any] | None = None,
    ) -> asyncio.Future[T]:
        host_ids = ids or (tree.id_base, tree.id_base)
        self._users += 1
        running = asyncio.ensure_future(self._run_behind(behind, host_ids, job, *args))
        running.add_done_callback(self._job_done)
        return running

    async def _run_behind(
        self, behind: asyncio.Future[Any] | None, ids: Ids, job: Callable[..., T], *args: object
    ) -> T:
        if behind is not None and not behind.done():
            await asyncio.wait({behind})
        return await self._threads.run(ids, job, *args)

    def _job_done(self, done: asyncio.Future[T]) -> None:
        self._release()
        if not done.cancelled():
            done.exception()  # whoever waited has it; a cancelled waiter wants none

    @contextlib.contextmanager
    def held(self) -> Iterator[RootTree]:
        """Keep the root open for the block."""
        tree = self.tree
        self._users += 1
        try:
            yield tree
        finally:
            self._release()

    def _release(self) -> None:
        """Close the root behind its last user; a job may outlive whoever waited for it."""
        self._users -= 1
        if self._users == 0:
            os.close(self._tree.root)


class InTurn:
    """Jobs on one open thing (a descriptor, a generator), never two at once.

    A job goes on when its caller is cancelled. Ended under it, a descriptor's number may be
    another file's by then, and a generator refuses.
    """

    def __init__(self, jobs: RootJobs, ids: Ids | None) -> None:
        self._jobs, self._ids = jobs, ids
        self._last: asyncio.Future[Any] | None = None

    async def run(self, job: Callable[..., T], *args: object) -> T:
        """Run a job; the caller waits for each before the next."""
        running = self._last = self._jobs.begin(self._ids, job, *args)
        return await asyncio.shield(running)

    async def end(self, job: Callable[[], None]) -> None:
        """Run the last job behind all others, also when the sandbox is gone.

        It runs to its end, also when the caller is cancelled.
        """
        await asyncio.shield(self._jobs.finish(self._ids, job, behind=self._last))


def _undo(threads: FileThreads, undo: Callable[[T], None], done: asyncio.Future[T]) -> None:
    if not done.cancelled() and done.exception() is None:
        threads.submit(undo, done.result())
