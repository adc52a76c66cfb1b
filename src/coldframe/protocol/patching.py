"""Apply a patch to files of a sandbox: all of it, or nothing.

Everything is read and computed before anything is written. Then every new content is written
beside its target, and only renames and removals are left: a failure among those is undone.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from coldframe.protocol import patches
from coldframe.protocol.errors import (
    ColdframeError,
    Execution,
    FileTooLargeError,
    InvalidRequestError,
    PatchError,
    PathNotFoundError,
    StaleBaseError,
)
from coldframe.protocol.models import MIB, FileKind, FileStat
from coldframe.protocol.pieces import close_source, pieces_of
from coldframe.protocol.text import encoded, excerpt

MAX_FILE_BYTES = 64 * MIB


class Files(Protocol):
    """The sandbox's files, as `FileAccess` of a runtime or a client has them."""

    async def stat(self, path: str | bytes, *, follow: bool = True) -> FileStat: ...

    def read(
        self, path: str | bytes, *, offset: int = 0, length: int | None = None
    ) -> AsyncIterator[bytes]: ...

    async def write(
        self,
        path: str | bytes,
        content: AsyncIterator[bytes],
        *,
        mode: int = 0o644,
        owner: tuple[int, int] | None = None,
        parents: bool = True,
    ) -> int: ...

    async def move(self, source: str | bytes, target: str | bytes) -> None: ...

    async def remove(self, path: str | bytes, *, recursive: bool = False) -> None: ...


@dataclass(frozen=True)
class Patched:
    """What a patch did, by the patch's paths."""

    written: tuple[str, ...]
    """Files that were changed or are new."""
    removed: tuple[str, ...]
    """Files that are not there any more: deleted, or renamed."""
    sha256: Mapping[str, str]
    """Digests of what was written: the base of a next patch."""


@dataclass(frozen=True)
class _Base:
    """A file as it was read."""

    content: bytes
    stat: FileStat

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()


@dataclass(frozen=True)
class _Write:
    path: str
    content: bytes
    mode: int
    owner: tuple[int, int] | None


async def apply_patch(
    files: Files,
    patch: str | bytes,
    base_sha256: Mapping[str, str] | None,
    *,
    root: str,
    strip: int,
    total_bytes: int | None = None,
) -> Patched:
    """Apply a patch to the files below `root`; see the SDK's `Sandbox.apply_patch`.

    `total_bytes`: how much all files that it reads may have together; None: any.
    """
    if not root.startswith("/"):
        raise InvalidRequestError(f"root {excerpt(root)} is not absolute")
    if not 0 <= strip < 100:
        raise InvalidRequestError(f"strip {strip} is not from 0 to 99")
    # In a thread, here and below: whoever serves others on this loop must not stop for a large one.
    changes = await asyncio.to_thread(patches.parse, encoded(patch, "the patch"), strip)
    work = _Work(files, root.rstrip("/"), total_bytes)
    await work.check_base(base_sha256 or {})
    for change in changes:
        await work.plan(change)
    # From here on a cancelled caller must not leave half of it.
    return await _finish(asyncio.ensure_future(work.carry_out()))


async def _finish(work: asyncio.Task[Patched]) -> Patched:
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait({work})
        if not work.cancelled():
            work.exception()
        raise


class _Work:
    def __init__(self, files: Files, root: str, total_bytes: int | None) -> None:
        self._files, self._root = files, root
        self._left = total_bytes
        self._bases: dict[str, _Base | None] = {}
        self._writes: list[_Write] = []
        self._removals: list[str] = []
        self._undo: list[_Undo] = []
        self._strays: list[str] = []
        self._directories: list[str] = []

    def _absolute(self, path: str) -> str:
        return f"{self._root}/{path}"

    # --- read and compute -------------------------------------------------------------

    async def check_base(self, base_sha256: Mapping[str, str]) -> None:
        for path, digest in base_sha256.items():
            base = await self._base(path)
            found = "missing" if base is None else base.sha256
            if found != digest.lower():
                raise StaleBaseError(f"{path}: is {found}, the patch was made against {digest}")

    async def _base(self, path: str) -> _Base | None:
        if path not in self._bases:
            self._bases[path] = await self._read(path)
        return self._bases[path]

    async def _read(self, path: str) -> _Base | None:
        absolute = self._absolute(path)
        try:
            stat = await self._files.stat(absolute, follow=False)
        except PathNotFoundError:
            return None
        if stat.kind is not FileKind.FILE:
            raise PatchError(f"{path}: is a {stat.kind}, not a file")
        content = bytearray()
        most = MAX_FILE_BYTES if self._left is None else min(MAX_FILE_BYTES, self._left)
        source = self._files.read(absolute, length=most + 1)
        try:
            async for piece in source:
                content += piece
        finally:
            await close_source(source)
        if len(content) > most:
            what = f"{path}: more than {MAX_FILE_BYTES} bytes cannot be patched"
            if most < MAX_FILE_BYTES:
                what = f"{path}: too large beside the rest; patch fewer files at once"
            raise FileTooLargeError(what)
        if self._left is not None:
            self._left -= len(content)
        return _Base(bytes(content), stat)

    async def plan(self, change: patches.FileChange) -> None:
        base = None
        if change.old_path is not None:
            base = await self._base(change.old_path)
            if base is None:
                raise PatchError(f"{change.old_path}: no such file below {self._root or '/'}")
        old = b"" if base is None else base.content
        content = await asyncio.to_thread(patches.apply, old, change)
        if change.new_path is None:
            self._removals.append(change.path)
            return
        if change.new_path != change.old_path:
            if await self._base(change.new_path) is not None:
                raise PatchError(f"{change.new_path}: exists already")
            if change.old_path is not None and not change.copy:
                self._removals.append(change.old_path)
        self._writes.append(_new_file(change, content, base))

    # --- carry out --------------------------------------------------------------------

    async def carry_out(self) -> Patched:
        try:
            staged = [(write, await self._stage(write)) for write in self._writes]
            await self._check_unchanged()
            for write, temporary in staged:
                await self._put(write, temporary)
            for path in self._removals:
                await self._put_aside(path)
        except BaseException as error:
            await self._roll_back(error)
            raise
        await self._clean()
        return Patched(
            written=tuple(write.path for write in self._writes),
            removed=tuple(self._removals),
            sha256={w.path: hashlib.sha256(w.content).hexdigest() for w in self._writes},
        )

    async def _stage(self, write: _Write) -> str:
        await self._note_missing_parents(write.path)
        temporary = self._beside(write.path)
        self._strays.append(temporary)
        await self._write(temporary, write)
        return temporary

    async def _note_missing_parents(self, path: str) -> None:
        missing: list[str] = []
        parent = self._absolute(path).rpartition("/")[0]
        while parent and parent not in self._directories:
            try:
                await self._files.stat(parent)
            except PathNotFoundError:
                missing.append(parent)
                parent = parent.rpartition("/")[0]
            else:
                break
        self._directories += reversed(missing)

    async def _write(self, target: str, write: _Write) -> None:
        content = pieces_of(write.content)
        await self._files.write(target, content, mode=write.mode, owner=write.owner)

    def _beside(self, path: str) -> str:
        directory = self._absolute(path).rpartition("/")[0]
        return f"{directory}/.coldframe-patch-{secrets.token_hex(8)}"

    async def _check_unchanged(self) -> None:
        for path, base in self._bases.items():
            try:
                now = await self._files.stat(self._absolute(path), follow=False)
            except PathNotFoundError:
                now = None
            before = None if base is None else base.stat
            if _identity(now) != _identity(before):
                raise StaleBaseError(f"{path}: changed while the patch was being applied")

    async def _put(self, write: _Write, temporary: str) -> None:
        self._undo.append(_Undo(write.path, self._bases.get(write.path), None))
        await self._files.move(temporary, self._absolute(write.path))
        self._strays.remove(temporary)

    async def _put_aside(self, path: str) -> None:
        aside = self._beside(path)
        self._undo.append(_Undo(path, self._bases[path], aside))
        await self._files.move(self._absolute(path), aside)
        self._strays.append(aside)

    # --- undo -------------------------------------------------------------------------

    async def _roll_back(self, cause: BaseException) -> None:
        for undo in reversed(self._undo):
            try:
                await self._undo_one(undo)
            except PathNotFoundError:
                continue  # the step itself had failed
            except ColdframeError as error:
                raise PatchError(
                    f"{undo.path}: could not be put back ({error}) after: {cause}",
                    execution=Execution.UNKNOWN,
                ) from cause
        await self._clean()
        self._strays = self._directories[::-1]
        await self._clean()

    async def _undo_one(self, undo: _Undo) -> None:
        target = self._absolute(undo.path)
        if undo.aside is not None:
            await self._files.move(undo.aside, target)
        elif undo.base is None:
            await self._files.remove(target)
        else:
            stat = undo.base.stat
            temporary = self._beside(undo.path)
            self._strays.append(temporary)
            owner = (stat.uid, stat.gid)
            await self._write(temporary, _Write(undo.path, undo.base.content, stat.mode, owner))
            await self._files.move(temporary, target)

    async def _clean(self) -> None:
        for stray in self._strays:
            try:
                await self._files.remove(stray)
            except ColdframeError:
                continue  # never written, moved into place, or the sandbox has ended
        self._strays.clear()


@dataclass(frozen=True)
class _Undo:
    path: str
    base: _Base | None
    aside: str | None


def _new_file(change: patches.FileChange, content: bytes, base: _Base | None) -> _Write:
    assert change.new_path is not None
    if base is None:
        return _Write(change.new_path, content, change.mode or 0o644, None)
    mode = base.stat.mode
    if change.mode is not None:
        readable = (mode & 0o444) >> 2
        mode = mode | readable if change.mode & 0o111 else mode & ~0o111
    return _Write(change.new_path, content, mode, (base.stat.uid, base.stat.gid))


def _identity(stat: FileStat | None) -> tuple[object, ...] | None:
    if stat is None:
        return None
    return (stat.kind, stat.size, stat.mtime_ns, stat.mode, stat.uid, stat.gid)
