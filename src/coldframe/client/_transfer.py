"""File operations of both SDKs, on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import tempfile
from collections.abc import AsyncIterator, Coroutine
from functools import partial
from pathlib import Path
from stat import S_ISREG
from typing import IO, TYPE_CHECKING, Any, BinaryIO, TypeAlias, TypeVar

from coldframe.client import _archive as archive
from coldframe.client._content import Repeated, async_pieces
from coldframe.protocol.errors import FileTooLargeError, PathNotFoundError, PathRefusedError
from coldframe.protocol.models import FileEntry, FileStat
from coldframe.protocol.pieces import close_source
from coldframe.protocol.text import excerpt

if TYPE_CHECKING:
    from coldframe.client._inside import SandboxCore

T = TypeVar("T")
Path_: TypeAlias = str | bytes
Owner: TypeAlias = tuple[int, int] | None


async def iterate(
    core: SandboxCore, path: Path_, offset: int, length: int | None
) -> AsyncIterator[bytes]:
    source = (await core.files()).read(path, offset=offset, length=length)
    try:
        async for piece in source:
            yield piece
    finally:
        await close_source(source)


async def read(
    core: SandboxCore, path: Path_, offset: int, length: int | None, max_bytes: int
) -> bytes:
    # One byte more than is allowed tells a file that is too large from one that just fits.
    wanted = max_bytes + 1 if length is None else min(length, max_bytes + 1)
    content = bytearray()
    async for piece in iterate(core, path, offset, wanted):
        content += piece
    if len(content) > max_bytes:
        raise FileTooLargeError(
            f"{excerpt(path)} holds more than {max_bytes} bytes: iterate or download it"
        )
    return bytes(content)


async def write(
    core: SandboxCore,
    path: Path_,
    content: AsyncIterator[bytes],
    *,
    mode: int,
    owner: Owner,
    parents: bool,
    operation_id: str | None,
) -> int:
    files = await core.files(operation_id)
    try:
        return await files.write(path, content, mode=mode, owner=owner, parents=parents)
    finally:
        await close_source(content)


async def download(core: SandboxCore, path: Path_, local: Path) -> int:
    """Write beside the target, then rename: the target is whole or as it was."""
    source = iterate(core, path, 0, None)
    try:
        first = await anext(source, b"")
        opening = asyncio.ensure_future(asyncio.to_thread(_open_beside, local))
        try:
            file = await asyncio.shield(opening)
        except asyncio.CancelledError:
            await asyncio.wait({opening})  # the thread goes on: what it makes is ours to remove
            if opening.exception() is None:
                opening.result().close()
                _unlink(opening.result().name)
            raise
        return await _fill(file, first, source, local)
    finally:
        await close_source(source)


async def _fill(file: IO[bytes], first: bytes, source: AsyncIterator[bytes], local: Path) -> int:
    size = 0
    try:
        with file:
            size += await asyncio.to_thread(file.write, first)
            async for piece in source:
                size += await asyncio.to_thread(file.write, piece)
        await asyncio.to_thread(os.replace, file.name, local)
    except BaseException:
        _unlink(file.name)
        raise
    return size


def _unlink(name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name)  # noqa: PTH108


def _open_beside(local: Path) -> IO[bytes]:
    file = tempfile.NamedTemporaryFile(  # noqa: SIM115
        dir=local.parent, prefix=f".{local.name[:64]}.", delete=False
    )
    umask = os.umask(0)
    os.umask(umask)
    os.fchmod(file.fileno(), 0o666 & ~umask)
    return file


async def upload(
    core: SandboxCore,
    local: Path,
    path: Path_,
    *,
    mode: int | None,
    owner: Owner,
    parents: bool,
    operation_id: str | None,
) -> int:
    with await asyncio.to_thread(_open_regular, local) as file:
        if mode is None:
            mode = os.fstat(file.fileno()).st_mode & 0o777
        return await write(
            core,
            path,
            async_pieces(file),
            mode=mode,
            owner=owner,
            parents=parents,
            operation_id=operation_id,
        )


def _open_regular(local: Path) -> BinaryIO:
    """Open a file for reading; a FIFO would be waited for, and a device has no end."""
    fd = os.open(local, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    file = os.fdopen(fd, "rb")
    if not S_ISREG(os.fstat(fd).st_mode):
        file.close()
        raise PathRefusedError(f"{excerpt(str(local))} is not a regular file")
    return file


async def stat(core: SandboxCore, path: Path_, follow: bool) -> FileStat:
    return await (await core.files()).stat(path, follow=follow)


async def exists(core: SandboxCore, path: Path_, follow: bool) -> bool:
    try:
        await stat(core, path, follow)
    except PathNotFoundError:
        return False
    return True


async def list_directory(core: SandboxCore, path: Path_) -> tuple[FileEntry, ...]:
    return await (await core.files()).list(path)


async def mkdir(
    core: SandboxCore,
    path: Path_,
    *,
    mode: int,
    owner: Owner,
    parents: bool,
    exist_ok: bool,
    operation_id: str | None,
) -> None:
    files = await core.files(operation_id)
    await files.mkdir(path, mode=mode, owner=owner, parents=parents, exist_ok=exist_ok)


async def move(core: SandboxCore, source: Path_, target: Path_, operation_id: str | None) -> None:
    await (await core.files(operation_id)).move(source, target)


async def remove(core: SandboxCore, path: Path_, recursive: bool, operation_id: str | None) -> None:
    await (await core.files(operation_id)).remove(path, recursive=recursive)


async def chmod(core: SandboxCore, path: Path_, mode: int, operation_id: str | None) -> None:
    await (await core.files(operation_id)).chmod(path, mode)


async def chown(
    core: SandboxCore, path: Path_, uid: int, gid: int, operation_id: str | None
) -> None:
    await (await core.files(operation_id)).chown(path, uid, gid)


async def tar_down(core: SandboxCore, path: Path_) -> AsyncIterator[bytes]:
    source = (await core.files()).tar_down(path)
    try:
        async for piece in source:
            yield piece
    finally:
        await close_source(source)


async def tar_up(
    core: SandboxCore,
    path: Path_,
    content: AsyncIterator[bytes],
    *,
    owner: Owner,
    operation_id: str | None,
) -> int:
    files = await core.files(operation_id)
    try:
        return await files.tar_up(path, content, owner=owner)
    finally:
        await close_source(content)


async def download_tree(
    core: SandboxCore,
    path: Path_,
    local: Path,
    max_bytes: int,
    on_refused: archive.OnRefused | None,
) -> int:
    """Read the archive on the loop and unpack it in a thread, one piece at a time."""
    source = tar_down(core, path)
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[None] = loop.create_future()

    async def next_piece() -> bytes:
        return await _unless(stopped, _next_piece(source))

    def pull() -> bytes:
        return asyncio.run_coroutine_threadsafe(next_piece(), loop).result()

    work = asyncio.create_task(
        asyncio.to_thread(archive.unpack, pull, local, max_bytes, on_refused)
    )
    try:
        return await asyncio.shield(work)
    finally:
        await _end(work, stopped)
        await close_source(source)


async def upload_tree(core: SandboxCore, local: Path, path: Path_, owner: Owner) -> int:
    files = await core.files()
    await files.mkdir(path)
    if owner is None:
        above = await files.stat(path)
        owner = (above.uid, above.gid)
    content = Repeated(partial(packed, local, owner))
    try:
        return await files.tar_up(path, content, owner=owner)
    finally:
        await close_source(content)


async def packed(local: Path, owner: tuple[int, int]) -> AsyncIterator[bytes]:
    """Pack in a thread that is never more than two pieces ahead of the reader."""
    loop = asyncio.get_running_loop()
    pieces: asyncio.Queue[bytes] = asyncio.Queue(maxsize=1)
    stopped: asyncio.Future[None] = loop.create_future()

    async def put(data: bytes) -> None:
        await _unless(stopped, pieces.put(data))

    def write(data: bytes) -> None:
        asyncio.run_coroutine_threadsafe(put(data), loop).result()

    def pack() -> None:
        archive.pack(local, write, owner)
        write(b"")

    work = asyncio.create_task(asyncio.to_thread(pack))
    work.add_done_callback(lambda _: _stop(stopped))
    try:
        while piece := await _unless(stopped, pieces.get()):
            yield piece
        await work
    except InterruptedError:
        await work
    finally:
        await _end(work, stopped)


async def _next_piece(source: AsyncIterator[bytes]) -> bytes:
    return await anext(source, b"")


async def _unless(stopped: asyncio.Future[None], step: Coroutine[Any, Any, T]) -> T:
    """Return what `step` returns. Raises InterruptedError once `stopped` is done."""
    task: asyncio.Future[T] = asyncio.ensure_future(step)
    both: set[asyncio.Future[Any]] = {task, stopped}
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise InterruptedError(errno.EINTR, "the transfer was stopped")
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


async def _end(work: asyncio.Task[Any], stopped: asyncio.Future[None]) -> None:
    """Let a thread's next step fail and wait for its end; what it raised is known already."""
    _stop(stopped)
    await asyncio.wait({work})
    if not work.cancelled():
        work.exception()


def _stop(stopped: asyncio.Future[None]) -> None:
    if not stopped.done():
        stopped.set_result(None)
