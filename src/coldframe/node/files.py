"""Files of a sandbox, refused as soon as its state takes no operation."""

from __future__ import annotations

from collections.abc import AsyncIterator

from coldframe.node.life import Sandbox
from coldframe.protocol.models import FileEntry, FileStat
from coldframe.runtimes.base import FileAccess


class GuardedFiles:
    """See `FileAccess`. Every call also raises SandboxStateError and SandboxGoneError."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    @property
    def _readable(self) -> FileAccess:
        return self._sandbox.require_readable().files

    @property
    def _files(self) -> FileAccess:
        return self._sandbox.require_ready().files

    async def stat(self, path: str | bytes, *, follow: bool = True) -> FileStat:
        """See `FileAccess.stat`."""
        return await self._readable.stat(path, follow=follow)

    async def list(self, path: str | bytes) -> tuple[FileEntry, ...]:
        """See `FileAccess.list`."""
        return await self._readable.list(path)

    def read(
        self, path: str | bytes, *, offset: int = 0, length: int | None = None
    ) -> AsyncIterator[bytes]:
        """See `FileAccess.read`."""
        return self._readable.read(path, offset=offset, length=length)

    async def write(
        self,
        path: str | bytes,
        content: AsyncIterator[bytes],
        *,
        mode: int = 0o644,
        owner: tuple[int, int] | None = None,
        parents: bool = True,
    ) -> int:
        """See `FileAccess.write`."""
        return await self._files.write(path, content, mode=mode, owner=owner, parents=parents)

    async def mkdir(
        self,
        path: str | bytes,
        *,
        mode: int = 0o755,
        owner: tuple[int, int] | None = None,
        parents: bool = True,
        exist_ok: bool = True,
    ) -> None:
        """See `FileAccess.mkdir`."""
        await self._files.mkdir(path, mode=mode, owner=owner, parents=parents, exist_ok=exist_ok)

    async def move(self, source: str | bytes, target: str | bytes) -> None:
        """See `FileAccess.move`."""
        await self._files.move(source, target)

    async def remove(self, path: str | bytes, *, recursive: bool = False) -> None:
        """See `FileAccess.remove`."""
        await self._files.remove(path, recursive=recursive)

    async def chmod(self, path: str | bytes, mode: int) -> None:
        """See `FileAccess.chmod`."""
        await self._files.chmod(path, mode)

    async def chown(self, path: str | bytes, uid: int, gid: int) -> None:
        """See `FileAccess.chown`."""
        await self._files.chown(path, uid, gid)

    def tar_down(self, path: str | bytes) -> AsyncIterator[bytes]:
        """See `FileAccess.tar_down`."""
        return self._readable.tar_down(path)

    async def tar_up(
        self,
        path: str | bytes,
        content: AsyncIterator[bytes],
        *,
        owner: tuple[int, int] | None = None,
    ) -> int:
        """See `FileAccess.tar_up`."""
        return await self._files.tar_up(path, content, owner=owner)
