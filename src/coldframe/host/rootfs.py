"""File access to a sandbox from the host: what runtimes promise of files, over a root descriptor.

Asynchronous face of fileops, removal, tardown and tarup. Work runs in file threads under the
sandbox's ids, so what is made is stored with them; nothing here waits for a sandbox's process.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import functools
import os
import stat
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeVar

from coldframe.host import fileops, forks, fsthreads
from coldframe.host.fsthreads import FileThreads
from coldframe.host.removal import remove_path
from coldframe.host.roottree import (
    RootTree,
    closing,
    fd_path,
    path_bytes,
    typed,
    typed_errors,
)
from coldframe.host.tardown import tar_pieces
from coldframe.host.tarup import unpack
from coldframe.protocol.errors import FileError, InvalidRequestError, SandboxGoneError
from coldframe.protocol.models import FileEntry, FileStat

T = TypeVar("T")

_LAST_OFFSET = (1 << 63) - 1


class RootFiles:
    """Files of one sandbox. Usable until `close`; then every call raises SandboxGoneError."""

    def __init__(
        self,
        root: int,
        id_base: int,
        threads: FileThreads,
        default_owner: Callable[[RootTree], tuple[int, int]],
    ) -> None:
        """Reach what is below `root`, an O_PATH descriptor that is taken over.

        `default_owner` tells the sandbox's ids that own what is made for nobody in particular.
        It is asked once, when they are needed first.
        """
        self._tree = RootTree(root, id_base)
        self._threads = threads
        self._tell_owner = default_owner
        self._users = 1
        self._closed = False
        forks.own(self)

    @property
    def tree(self) -> RootTree:
        """For synchronous look-ups by the host itself.

        Raises SandboxGoneError once closed.
        """
        self._require_open()
        return self._tree

    @functools.cached_property
    def _default_owner(self) -> tuple[int, int]:
        return self._tell_owner(self._tree)

    def close(self) -> None:
        """Give the root back, as soon as no job uses it."""
        if not self._closed:
            self._closed = True
            self._release()

    def abandon(self) -> None:
        """See `forks.Owner`."""
        if self._users:
            self._closed, self._users = True, 0
            os.close(self._tree.root)

    async def stat(self, path: str | bytes, *, follow: bool = True) -> FileStat:
        return await self._run(fileops.stat_path, path_bytes(path), follow)

    async def list(self, path: str | bytes) -> tuple[FileEntry, ...]:
        return await self._run(fileops.list_directory, path_bytes(path))

    async def read(
        self, path: str | bytes, *, offset: int = 0, length: int | None = None
    ) -> AsyncIterator[bytes]:
        if not 0 <= offset <= _LAST_OFFSET:
            raise InvalidRequestError(f"offset {offset} is not in 0..{_LAST_OFFSET}")
        if length is not None and length < 0:
            raise InvalidRequestError(f"length {length} is negative")
        raw = path_bytes(path)
        with self._held():
            fd = await self._job(None, fileops.open_file, self._tree, raw, undo=os.close)
            jobs = _InTurn(self, None)
            try:
                at, end = offset, _LAST_OFFSET
                if length is not None:
                    end = min(end, offset + length)
                while at < end:
                    piece = await jobs.run(fileops.read_piece, fd, raw, at, end - at)
                    if not piece:
                        return
                    at += len(piece)
                    yield piece
            finally:
                await jobs.end(functools.partial(os.close, fd))

    async def write(
        self,
        path: str | bytes,
        content: AsyncIterator[bytes],
        *,
        mode: int = 0o644,
        owner: tuple[int, int] | None = None,
        parents: bool = True,
    ) -> int:
        raw, ids = path_bytes(path), self._host_ids(owner)
        with self._held():
            pending = await self._job(
                ids,
                fileops.begin_write,
                self._tree,
                raw,
                mode,
                ids,
                parents,
                undo=fileops.PendingFile.close,
            )
            size, jobs = 0, _InTurn(self, ids)
            try:
                async for piece in content:
                    await jobs.run(pending.append, piece)
                    size += len(piece)
                await jobs.run(pending.commit)
            finally:
                await jobs.end(pending.close)
        return size

    async def exchange(
        self, path: str | bytes, data: bytes, *, owner: tuple[int, int] | None = None, most: int
    ) -> bytes | None:
        """Write a small file and return what it held (at most `most` bytes); None: no such file."""
        raw, ids = path_bytes(path), self._host_ids(owner)
        return await self._job(ids, fileops.exchange, self.tree, raw, data, ids, most)

    async def mkdir(
        self,
        path: str | bytes,
        *,
        mode: int = 0o755,
        owner: tuple[int, int] | None = None,
        parents: bool = True,
        exist_ok: bool = True,
    ) -> None:
        job = functools.partial(
            fileops.make_directory,
            self.tree,
            path_bytes(path),
            mode,
            parents=parents,
            exist_ok=exist_ok,
        )
        await self._job(self._host_ids(owner), job)

    async def move(self, source: str | bytes, target: str | bytes) -> None:
        old, new = path_bytes(source), path_bytes(target)
        try:
            await self._run(fileops.move, old, new)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise typed(error, old) from error
            await self._move_by_copy(old, new)

    async def remove(self, path: str | bytes, *, recursive: bool = False) -> None:
        await self._run(remove_path, path_bytes(path), recursive=recursive)

    async def chmod(self, path: str | bytes, mode: int) -> None:
        await self._run(fileops.change_mode, path_bytes(path), mode)

    async def chown(self, path: str | bytes, uid: int, gid: int) -> None:
        await self._run(fileops.change_owner, path_bytes(path), uid, gid)

    async def tar_down(self, path: str | bytes) -> AsyncIterator[bytes]:
        pieces = tar_pieces(self.tree, path_bytes(path))
        with self._held():
            jobs = _InTurn(self, None)
            try:
                while (piece := await jobs.run(_next_piece, pieces)) is not None:
                    yield piece
            finally:
                await jobs.end(pieces.close)

    async def tar_up(
        self,
        path: str | bytes,
        content: AsyncIterator[bytes],
        *,
        owner: tuple[int, int] | None = None,
    ) -> int:
        raw = path_bytes(path)
        self._host_ids(owner)
        loop = asyncio.get_running_loop()
        source = _Pulled(content, loop)
        done: asyncio.Future[int] = loop.create_future()
        with self._held():
            # A thread of its own: it waits for whoever sends the archive.
            job = functools.partial(self._unpack, raw, source, owner, loop, done)
            threading.Thread(target=job, name="coldframe-unpack", daemon=True).start()
            try:
                return await asyncio.shield(done)
            except asyncio.CancelledError:
                source.abort()
                await asyncio.wait([done])
                done.exception()  # what it failed with does not matter any more
                raise

    def _unpack(
        self,
        path: bytes,
        source: _Pulled,
        owner: tuple[int, int] | None,
        loop: asyncio.AbstractEventLoop,
        done: asyncio.Future[int],
    ) -> None:
        base = self._tree.id_base
        uid, gid = owner or self._default_owner
        outcome: Callable[[], None]
        try:
            fsthreads.enter_thread()
            fsthreads.become(base + uid, base + gid)
            count = unpack(self._tree, path, source.read, owner, fsthreads.become)
            outcome = functools.partial(done.set_result, count)
        except _AbortedError:
            outcome = functools.partial(done.set_exception, FileError("unpacking was cancelled"))
        except _SenderError as error:
            outcome = functools.partial(done.set_exception, error.cause)
        except Exception as error:  # noqa: BLE001 - handed over to the waiting task
            outcome = functools.partial(done.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop has been closed meanwhile
            loop.call_soon_threadsafe(outcome)

    async def _move_by_copy(self, source: bytes, target: bytes) -> None:
        """Move a directory of the image, which overlay cannot rename: copy, swap in, remove."""
        parent, _, _ = target.rstrip(b"/").rpartition(b"/")
        temporary = parent + b"/" + fileops.temporary_name()
        try:
            await self.tar_up(temporary, self.tar_down(source))
            await self._run(_copy_attributes, source, temporary)
            await self._run(fileops.move, temporary, target)
        except BaseException:
            await asyncio.shield(self._discard(temporary))
            raise
        await self.remove(source, recursive=True)

    async def _discard(self, path: bytes) -> None:
        try:
            await self.remove(path, recursive=True)
        except FileError:
            return  # it was never made, or the sandbox took it away

    def _host_ids(self, owner: tuple[int, int] | None) -> tuple[int, int]:
        self._require_open()
        uid, gid = owner or self._default_owner
        return self._tree.host_id(uid), self._tree.host_id(gid)

    async def _run(self, job: Callable[..., T], *args: object, **kwargs: object) -> T:
        """Run a job of the tree as the sandbox's root."""
        return await self._job(None, functools.partial(job, self._tree, *args, **kwargs))

    async def _job(
        self,
        ids: tuple[int, int] | None,
        job: Callable[..., T],
        *args: object,
        undo: Callable[[T], None] | None = None,
    ) -> T:
        """Run a job in a file thread; if nobody waits for it any more, `undo` its result."""
        self._require_open()
        running = self._begin(ids, job, *args)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            if undo is not None:
                running.add_done_callback(functools.partial(_undo, self._threads, undo))
            raise

    def _begin(
        self,
        ids: tuple[int, int] | None,
        job: Callable[..., T],
        *args: object,
        behind: asyncio.Future[Any] | None = None,
    ) -> asyncio.Future[T]:
        """Start a job in a file thread; the root stays open until it has ended."""
        host_ids = ids or (self._tree.id_base, self._tree.id_base)
        self._users += 1
        running = asyncio.ensure_future(self._run_behind(behind, host_ids, job, *args))
        running.add_done_callback(self._job_done)
        return running

    async def _run_behind(
        self,
        behind: asyncio.Future[Any] | None,
        ids: tuple[int, int],
        job: Callable[..., T],
        *args: object,
    ) -> T:
        if behind is not None and not behind.done():
            await asyncio.wait({behind})
        return await self._threads.run(ids, job, *args)

    def _job_done(self, done: asyncio.Future[T]) -> None:
        self._release()
        if not done.cancelled():
            done.exception()  # whoever waited has it; a cancelled waiter wants none

    def _require_open(self) -> None:
        if self._closed:
            raise SandboxGoneError("the sandbox is gone; its files are no longer reachable")

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        """Keep the root open for the block."""
        self._require_open()
        self._users += 1
        try:
            yield
        finally:
            self._release()

    def _release(self) -> None:
        """Close the root behind its last user; a job may outlive whoever waited for it."""
        self._users -= 1
        if self._users == 0:
            os.close(self._tree.root)


class _InTurn:
    """Jobs on one open thing (a descriptor, a generator), never two at once.

    A job goes on when its caller is cancelled. Ended under it, a descriptor's number may be
    another file's by then, and a generator refuses.
    """

    def __init__(self, files: RootFiles, ids: tuple[int, int] | None) -> None:
        self._files, self._ids = files, ids
        self._last: asyncio.Future[Any] | None = None

    async def run(self, job: Callable[..., T], *args: object) -> T:
        """Run a job; the caller waits for each before the next."""
        self._files._require_open()
        running = self._last = self._files._begin(self._ids, job, *args)
        return await asyncio.shield(running)

    async def end(self, job: Callable[[], None]) -> None:
        """Run the last job behind all others, also when the sandbox is gone.

        It runs to its end, also when the caller is cancelled.
        """
        await asyncio.shield(self._files._begin(self._ids, job, behind=self._last))


class _AbortedError(Exception):
    """The unpacking was given up by whoever asked for it."""


class _SenderError(Exception):
    """Whoever sends the archive failed; wrapped, or it would pass for a failure of ours."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class _Pulled:
    """Lets a thread read from an asynchronous iterator of the loop."""

    def __init__(self, content: AsyncIterator[bytes], loop: asyncio.AbstractEventLoop) -> None:
        self._content, self._loop = content, loop
        self._rest = b""
        self._aborted = False
        self._task: asyncio.Task[bytes | None] | None = None

    def read(self, size: int) -> bytes:
        """Return at most `size` bytes, empty at the end. Called in the thread."""
        while not self._rest:
            pull = asyncio.run_coroutine_threadsafe(self._next(), self._loop)
            try:
                piece = pull.result()
            except concurrent.futures.CancelledError as error:
                raise _AbortedError from error
            except _AbortedError:
                raise
            except Exception as error:
                raise _SenderError(error) from error
            if piece is None:
                return b""
            self._rest = piece
        data, self._rest = self._rest[:size], self._rest[size:]
        return data

    def abort(self) -> None:
        """Make the thread's present or next read fail. Called in the loop."""
        self._aborted = True
        if self._task is not None:
            self._task.cancel()

    async def _next(self) -> bytes | None:
        if self._aborted:
            raise _AbortedError
        self._task = asyncio.current_task()
        try:
            return await anext(self._content, None)
        finally:
            self._task = None


def _next_piece(pieces: Iterator[bytes]) -> bytes | None:
    return next(pieces, None)


def _undo(threads: FileThreads, undo: Callable[[T], None], done: asyncio.Future[T]) -> None:
    if not done.cancelled() and done.exception() is None:
        threads.submit(undo, done.result())


def _copy_attributes(tree: RootTree, source: bytes, target: bytes) -> None:
    """Give a directory another's owner and mode."""
    with typed_errors(target), closing(tree.open(source)) as old, closing(tree.open(target)) as new:
        status = os.fstat(old)
        os.chown(fd_path(new), status.st_uid, status.st_gid)
        fd_path(new).chmod(stat.S_IMODE(status.st_mode))
