"""File access to a sandbox from the host: what runtimes promise of files, over a root descriptor.

Asynchronous face of fileops, removal, tardown and tarup. Work runs in file threads under the
sandbox's ids, so what is made is stored with them; nothing here waits for a sandbox's process.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import os
import stat
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TypeVar

from coldframe.host import fileops, fsthreads
from coldframe.host.fsthreads import FileThreads
from coldframe.host.pulling import Read, pull
from coldframe.host.removal import remove_path
from coldframe.host.rootjobs import InTurn, RootJobs
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
from coldframe.protocol.errors import FileError, InvalidRequestError
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
        self._jobs = RootJobs(root, id_base, threads)
        self._tell_owner = default_owner

    @property
    def tree(self) -> RootTree:
        """For synchronous look-ups by the host itself.

        Raises SandboxGoneError once closed.
        """
        return self._jobs.tree

    @functools.cached_property
    def _default_owner(self) -> tuple[int, int]:
        return self._tell_owner(self.tree)

    def close(self) -> None:
        """Give the root back, as soon as no job uses it."""
        self._jobs.close()

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
        with self._jobs.held() as tree:
            fd = await self._jobs.run(None, fileops.open_file, tree, raw, undo=os.close)
            jobs = InTurn(self._jobs, None)
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
        with self._jobs.held() as tree:
            job = functools.partial(fileops.begin_write, tree, raw, mode, ids, parents)
            pending = await self._jobs.run(ids, job, undo=fileops.PendingFile.close)
            size, jobs = 0, InTurn(self._jobs, ids)
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
        return await self._jobs.run(ids, fileops.exchange, self.tree, raw, data, ids, most)

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
        await self._jobs.run(self._host_ids(owner), job)

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
        with self._jobs.held():
            jobs = InTurn(self._jobs, None)
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
        raw, ids = path_bytes(path), self._host_ids(owner)

        def work(read: Read) -> int:
            fsthreads.enter_thread()
            fsthreads.become(*ids)
            return unpack(tree, raw, read, owner, fsthreads.become)

        with self._jobs.held() as tree:
            return await pull(content, work)

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
        tree = self.tree
        uid, gid = owner or self._default_owner
        return tree.host_id(uid), tree.host_id(gid)

    async def _run(self, job: Callable[..., T], *args: object, **kwargs: object) -> T:
        """Run a job of the tree as the sandbox's root."""
        return await self._jobs.run(None, functools.partial(job, self.tree, *args, **kwargs))


def _next_piece(pieces: Iterator[bytes]) -> bytes | None:
    return next(pieces, None)


def _copy_attributes(tree: RootTree, source: bytes, target: bytes) -> None:
    """Give a directory another's owner and mode."""
    with typed_errors(target), closing(tree.open(source)) as old, closing(tree.open(target)) as new:
        status = os.fstat(old)
        os.chown(fd_path(new), status.st_uid, status.st_gid)
        fd_path(new).chmod(stat.S_IMODE(status.st_mode))
