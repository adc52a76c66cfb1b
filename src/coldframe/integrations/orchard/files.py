"""Files as Orchard's client knows them: whole, in base64."""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
import posixpath
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request

from coldframe.gateway.context import body, enter
from coldframe.gateway.identity import Scope
from coldframe.integrations.orchard import words
from coldframe.protocol.errors import FileError, FileTooLargeError, InvalidRequestError
from coldframe.protocol.models import MIB, FileEntry, FileKind, FileStat
from coldframe.protocol.text import excerpt

router = APIRouter(prefix="/sandboxes/{sandbox_id}/files")

_FILE_BYTES = 96 * MIB


@router.post("")
async def upload(request: Request, sandbox_id: str) -> dict[str, Any]:
    """Write a file, whole or not at all; directories above it are made."""
    tenant = enter(request, Scope.EXEC)
    asked = await body(request, words.Upload)
    info = await words.found(tenant, sandbox_id)
    try:
        content = base64.b64decode(asked.content, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequestError(f"content: no base64: {error}") from error

    async def pieces() -> AsyncIterator[bytes]:
        yield content

    size = await tenant.node.files(info.id).write(
        _path(asked.path), pieces(), mode=0o644, owner=None, parents=True
    )
    return {"success": True, "path": asked.path, "size": size}


@router.get("")
async def download(request: Request, sandbox_id: str, path: str) -> dict[str, Any]:
    """Read a file."""
    tenant = enter(request, Scope.READ)
    info = await words.found(tenant, sandbox_id)
    content = bytearray()
    async for piece in tenant.node.files(info.id).read(_path(path), offset=0, length=None):
        content += piece
        if len(content) > _FILE_BYTES:
            raise FileTooLargeError(f"{excerpt(path)} holds more than {_FILE_BYTES} bytes")
    return {
        "path": path,
        "content": base64.b64encode(content).decode("ascii"),
        "size": len(content),
    }


@router.get("/list")
async def list_files(
    request: Request, sandbox_id: str, path: str = words.WORKDIR
) -> dict[str, Any]:
    """List a directory, by name."""
    tenant = enter(request, Scope.READ)
    info = await words.found(tenant, sandbox_id)
    directory = _path(path)
    files = tenant.node.files(info.id)
    found = sorted(await files.list(directory), key=lambda entry: entry.name)
    shown = []
    for entry in found:
        stat = entry.stat
        if stat.kind is FileKind.LINK:
            with contextlib.suppress(FileError):  # it leads nowhere
                stat = await files.stat(os.fsencode(directory) + b"/" + entry.name)
        shown.append(_shown(entry, stat))
    return {"path": path, "files": shown}


def _shown(entry: FileEntry, stat: FileStat) -> dict[str, Any]:
    return {
        "name": entry.name.decode("utf-8", "replace"),
        "type": "directory" if stat.kind is FileKind.DIRECTORY else "file",
        "size": stat.size,
        "modified": time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(stat.mtime_ns // 10**9)),
    }


def _path(path: str) -> str:
    """Relative paths begin where commands do."""
    return posixpath.join(words.WORKDIR, path)
