"""The resolv.conf of a native sandbox: it names our DNS as long as there is a network policy."""

from __future__ import annotations

import base64
import os
import posixpath
from collections.abc import Callable
from typing import Any

from coldframe.host.egress.listeners import SERVICE
from coldframe.host.rootfs import RootFiles
from coldframe.protocol.errors import FileError, PathNotFoundError

_PATH = "/etc/resolv.conf"
_OURS = (
    "# Written by the sandbox's network policy, which decides what may be asked.\n"
    f"nameserver {SERVICE}\n"
).encode()
_MOST_BYTES = 1 << 16


class ResolvConf:
    """What cannot be written is told, and no fault: addresses can be reached without."""

    def __init__(self, files: RootFiles, problem: Callable[[str], None]) -> None:
        """`problem` is told of what could not be done."""
        self._files, self._problem = files, problem
        self._path = _PATH.encode()
        self._before: bytes | None = None
        """What it held before the first policy; None: there was none."""
        self.written = False

    def note(self) -> dict[str, Any]:
        """What `go_on` needs in another process to put back one day what was there."""
        before = None if self._before is None else base64.b64encode(self._before).decode()
        return {"path": os.fsdecode(self._path), "before": before, "written": self.written}

    def go_on(self, told: dict[str, Any]) -> None:
        """Have what another process had noted."""
        before = told["before"]
        self._path = os.fsencode(told["path"])
        self._before = None if before is None else base64.b64decode(before)
        self.written = told["written"]

    async def write(self) -> None:
        """Name our DNS."""
        try:
            before = await self._exchange()
            if before != _OURS:
                self._before = before
            self.written = before is None or len(before) < _MOST_BYTES
        except FileError as error:
            self._problem(f"{_PATH} was not written: {error}")

    async def restore(self) -> None:
        """Put back what was there, unless somebody has changed it meanwhile."""
        written, self.written = self.written, False
        try:
            if not written or await self._read() != _OURS:
                return
            if self._before is None:
                await self._files.remove(self._path)
            else:
                await self._files.exchange(self._path, self._before, owner=(0, 0), most=0)
        except FileError as error:
            self._problem(f"{_PATH} was not restored: {error}")

    async def _exchange(self) -> bytes | None:
        """Write it; images of whole machines link it to what a service would make."""
        try:
            return await self._files.exchange(self._path, _OURS, owner=(0, 0), most=_MOST_BYTES)
        except FileError:
            target = (await self._files.stat(self._path, follow=False)).target
            if target is None:
                raise
            self._path = posixpath.normpath(posixpath.join(posixpath.dirname(self._path), target))
            return await self._files.exchange(self._path, _OURS, owner=(0, 0), most=_MOST_BYTES)

    async def _read(self) -> bytes | None:
        try:
            return b"".join([p async for p in self._files.read(self._path, length=_MOST_BYTES)])
        except PathNotFoundError:
            return None
