"""Digests of a sandbox's state by parts: equal states of one image give equal digests.

A runtime that knows what was written over the image is asked only for that, and what was
written back as it had been does not count; of any other runtime every file is read.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterable

from coldframe.node.life import Sandbox
from coldframe.protocol.errors import (
    FileError,
    FileTooLargeError,
    NotKnownError,
    PathNotFoundError,
)
from coldframe.protocol.models import FileKind, FileStat, Fingerprint
from coldframe.protocol.text import excerpt
from coldframe.runtimes.base import FileAccess, KnowsChanges, SandboxHandle

EXCLUDED = (
    "times of files",
    "extended attributes",
    "which names are hard links of one file",
    "which parts of a file are holes",
    "sizes of directories",
    "/proc, /sys and /dev",
    "pids, ages, memory and open files of processes",
    "connections, and sockets that are not listening TCP",
    "name, labels and lease",
)
"""What may differ between two sandboxes of the same fingerprint."""

MOST_BYTES = 64 << 30
"""Content that is read for one fingerprint; a sparse file costs nothing to make."""

LIMIT_S = 60.0
"""How long a look at the files may take."""

_USERS_BYTES = 1 << 20
_PSEUDO = frozenset({b"proc", b"sys", b"dev"})
_LOOPBACK_ONLY = "none: no egress, loopback only"


async def take(sandbox: Sandbox, handle: SandboxHandle) -> Fingerprint:
    """Return the fingerprint of a sandbox that takes operations.

    It is exact when nothing in the sandbox runs meanwhile; else it is that of some states in
    between.

    Raises:
        NotKnownError: its files could not be told within LIMIT_S.
        FileTooLargeError: more than MOST_BYTES of content, or too many names.
        SandboxGoneError: it ended.
    """
    spec = sandbox.spec
    parts = {
        "files": await _files_digest(handle, sandbox.image_digest),
        "processes": _digest(sorted(Counter(p.name for p in await handle.processes()).items())),
        "ports": _digest(await handle.listening_ports()),
        "users": _digest(
            [
                spec.user,
                await _content(handle.files, "/etc/passwd"),
                await _content(handle.files, "/etc/group"),
            ]
        ),
        "limits": _digest(
            [
                spec.cpu,
                spec.memory_bytes,
                spec.pids,
                spec.disk_bytes,
                spec.shm_bytes,
                spec.no_new_privileges,
                sorted(spec.env.items()),
                spec.workdir,
            ]
        ),
        "network": _digest(_LOOPBACK_ONLY if spec.network.empty else spec.network.digest),
    }
    return Fingerprint(digest=_digest(sorted(parts.items())), excluded=EXCLUDED, **parts)


async def _files_digest(handle: SandboxHandle, image_digest: str) -> str:
    if not isinstance(handle, KnowsChanges):
        return await _read_all(handle.files, image_digest)
    return await handle.digest_changes(image_digest.encode(), LIMIT_S)


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


async def _read_all(files: FileAccess, image_digest: str) -> str:
    try:
        async with asyncio.timeout(LIMIT_S):
            return await _Files(files).digest(image_digest)
    except TimeoutError:
        raise NotKnownError(
            f"the state of its files could not be told within {LIMIT_S:g} s"
        ) from None


async def _content(files: FileAccess, path: str) -> str | None:
    """The digest of a file's content; None if there is no such file.

    Of one too large to hold users it is that of its beginning: all of it is among the files.
    """
    content = hashlib.sha256()
    try:
        async for piece in files.read(path, length=_USERS_BYTES):
            content.update(piece)
    except FileError:
        return None
    return content.hexdigest()


class _Files:
    """One pass over the files."""

    def __init__(self, files: FileAccess) -> None:
        self._files = files
        self._left = MOST_BYTES

    async def digest(self, image_digest: str) -> str:
        """Hash every entry's path, kind, mode, owner, and content or target, in order."""
        whole = hashlib.sha256(image_digest.encode())
        async for path, stat in self._walk():
            _feed(whole, [path, *await self._state(path, stat)])
        return whole.hexdigest()

    async def _walk(self) -> AsyncIterator[tuple[bytes, FileStat]]:
        yield b"/", await self._files.stat("/")
        waiting = [b"/"]
        while waiting:
            directory = waiting.pop()
            try:
                entries = sorted(await self._files.list(directory), key=lambda entry: entry.name)
            except PathNotFoundError:  # removed meanwhile
                continue
            for entry in entries:
                path = directory.rstrip(b"/") + b"/" + entry.name
                if directory == b"/" and entry.name in _PSEUDO:
                    continue
                yield path, entry.stat
                if entry.stat.kind is FileKind.DIRECTORY:
                    waiting.append(path)

    async def _state(self, path: bytes, stat: FileStat) -> list[bytes]:
        fields = [
            stat.kind.encode(),
            b"%o %d %d" % (stat.mode, stat.uid, stat.gid),
            stat.target or b"",
        ]
        if stat.kind is FileKind.FILE:
            fields.append(await self._content(path, stat.size))
        return fields

    async def _content(self, path: bytes, size: int) -> bytes:
        content = hashlib.sha256()
        self._left -= size
        try:
            if self._left >= 0:
                async for piece in self._files.read(path, length=size):
                    content.update(piece)
                return content.digest()
        except FileError:  # removed or replaced meanwhile
            return b"gone"
        raise FileTooLargeError(
            f"a fingerprint would read more than {MOST_BYTES} bytes, up to {excerpt(path)}"
        )


def _feed(whole: hashlib._Hash, fields: Iterable[bytes]) -> None:
    for field in fields:
        whole.update(b"%d:" % len(field))
        whole.update(field)
    whole.update(b"\n")
