"""/v1/sandboxes/ID/files: contents as raw bytes with ranges, archives, names and metadata.

Paths are parameters, percent-encoded; they may be bytes that are no UTF-8.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response, StreamingResponse

from coldframe.gateway.context import (
    RAW_BODY,
    body,
    documented,
    enter,
    json_answer,
    json_list,
    raw_query,
)
from coldframe.gateway.identity import Scope
from coldframe.gateway.models import MakeDirectory, Members, Mode, Ownership, Size
from coldframe.gateway.once import Once
from coldframe.protocol.errors import InvalidRequestError
from coldframe.protocol.models import FileEntry, FileStat

if TYPE_CHECKING:
    from coldframe.runtimes.base import FileAccess

router = APIRouter(prefix="/v1/sandboxes/{sandbox_id}", tags=["files"], route_class=Once)

_RANGE = re.compile(r"bytes=(?=.*\d)(\d{0,18})-(\d{0,18})")


def _parameter(name: str, text: str) -> dict[str, Any]:
    return {
        "name": name,
        "in": "query",
        "required": True,
        "description": text,
        "schema": {"type": "string"},
    }


_PATH = {"parameters": [_parameter("path", "Absolute path in the sandbox, percent-encoded.")]}
_MOVE = {
    "parameters": [
        _parameter("path", "What is to be moved."),
        _parameter("target", "Where it is to be."),
    ]
}
_BYTES: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/octet-stream": {}}, "description": "The content."},
    206: {"content": {"application/octet-stream": {}}, "description": "The range."},
}
_TAR: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/x-tar": {}}, "description": "A pax archive."}
}

_Uid = Annotated[int | None, Query(ge=0, le=65535, description="With `gid`: the owner.")]
_Gid = Annotated[int | None, Query(ge=0, le=65535)]


def _files(request: Request, sandbox_id: str, scope: Scope) -> FileAccess:
    tenant = enter(request, scope)
    return tenant.node.files(tenant.sandbox(sandbox_id))


def _owner(uid: int | None, gid: int | None) -> tuple[int, int] | None:
    if (uid is None) != (gid is None):
        raise InvalidRequestError("give uid and gid, or neither")
    return None if uid is None or gid is None else (uid, gid)


@router.get("/files", response_model=None, responses=_BYTES, openapi_extra=_PATH)
async def read(request: Request, sandbox_id: str) -> Response:
    """Return a file's content, or a range of it (`Range: bytes=FIRST-LAST`, `bytes=-COUNT`).

    Read only as fast as the client takes it. A file that changes meanwhile may end early.
    """
    files = _files(request, sandbox_id, Scope.READ)
    path = raw_query(request, "path")
    asked = request.headers.get("range")
    if asked is None:
        return await _streamed(files.read(path), 200, {})
    match = _RANGE.fullmatch(asked)
    if match is None:
        raise InvalidRequestError("range: write bytes=FIRST-LAST, bytes=FIRST- or bytes=-COUNT")
    size = (await files.stat(path)).size
    last = int(match[2]) if match[1] and match[2] else None
    first = int(match[1]) if match[1] else max(0, size - int(match[2]))
    end = size if last is None else min(size, last + 1)
    if first >= end:
        await anext(files.read(path, offset=first, length=1), b"")  # raises for what is no file
        return Response(status_code=416, headers={"content-range": f"bytes */{size}"})
    pieces = files.read(path, offset=first, length=None if last is None else end - first)
    headers = {"content-range": f"bytes {first}-{end - 1}/{size}"}
    return await _streamed(pieces, 206, headers)


async def _streamed(
    pieces: AsyncIterator[bytes],
    status: int,
    headers: dict[str, str],
    kind: str = "application/octet-stream",
) -> Response:
    """Answer with a stream; what its first piece raises is an answer of its own."""
    first = await anext(pieces, b"")

    async def all_pieces() -> AsyncIterator[bytes]:
        try:
            if first:
                yield first
                async for piece in pieces:
                    yield piece
        finally:
            close = getattr(pieces, "aclose", None)
            if close is not None:
                await close()

    shown = {"accept-ranges": "bytes", "x-content-type-options": "nosniff", **headers}
    return StreamingResponse(all_pieces(), status, shown, kind)


@router.put("/files", status_code=201, response_model=Size, openapi_extra={**_PATH, **RAW_BODY})
async def write(
    request: Request,
    sandbox_id: str,
    *,
    mode: Annotated[int, Query(ge=0, le=0o7777, description="Of a new file.")] = 0o644,
    uid: _Uid = None,
    gid: _Gid = None,
    parents: bool = True,
) -> Response:
    """Write a file, all of it or nothing: a body that does not come to its end changes nothing."""
    files = _files(request, sandbox_id, Scope.EXEC)
    size = await files.write(
        raw_query(request, "path"),
        request.stream(),
        mode=mode,
        owner=_owner(uid, gid),
        parents=parents,
    )
    return json_answer(Size(bytes=size), 201)


@router.delete("/files", status_code=204, response_model=None, openapi_extra=_PATH)
async def remove(request: Request, sandbox_id: str, recursive: bool = False) -> Response:
    """Remove a file, an empty directory, or with `recursive` all that is below."""
    files = _files(request, sandbox_id, Scope.EXEC)
    await files.remove(raw_query(request, "path"), recursive=recursive)
    return Response(status_code=204)


@router.get("/files/stat", response_model=FileStat, openapi_extra=_PATH)
async def stat(request: Request, sandbox_id: str, follow: bool = True) -> Response:
    """Return the metadata of a path."""
    files = _files(request, sandbox_id, Scope.READ)
    return json_answer(await files.stat(raw_query(request, "path"), follow=follow))


@router.get("/files/list", response_model=list[FileEntry], openapi_extra=_PATH)
async def list_(request: Request, sandbox_id: str) -> Response:
    """Return the names in a directory. They are hostile bytes, in base64 (URL-safe alphabet)."""
    files = _files(request, sandbox_id, Scope.READ)
    return json_list(await files.list(raw_query(request, "path")))


@router.post(
    "/files/directory",
    status_code=204,
    response_model=None,
    openapi_extra={**_PATH, **documented(MakeDirectory)},
)
async def mkdir(request: Request, sandbox_id: str) -> Response:
    """Make a directory."""
    files = _files(request, sandbox_id, Scope.EXEC)
    wanted = await body(request, MakeDirectory)
    await files.mkdir(
        raw_query(request, "path"),
        mode=wanted.mode,
        owner=_owner(wanted.uid, wanted.gid),
        parents=wanted.parents,
        exist_ok=wanted.exist_ok,
    )
    return Response(status_code=204)


@router.post("/files/move", status_code=204, response_model=None, openapi_extra=_MOVE)
async def move(request: Request, sandbox_id: str) -> Response:
    """Rename a path."""
    files = _files(request, sandbox_id, Scope.EXEC)
    await files.move(raw_query(request, "path"), raw_query(request, "target"))
    return Response(status_code=204)


@router.put(
    "/files/mode",
    status_code=204,
    response_model=None,
    openapi_extra={**_PATH, **documented(Mode)},
)
async def chmod(request: Request, sandbox_id: str) -> Response:
    """Set permission bits."""
    files = _files(request, sandbox_id, Scope.EXEC)
    wanted = await body(request, Mode)
    await files.chmod(raw_query(request, "path"), wanted.mode)
    return Response(status_code=204)


@router.put(
    "/files/owner",
    status_code=204,
    response_model=None,
    openapi_extra={**_PATH, **documented(Ownership)},
)
async def chown(request: Request, sandbox_id: str) -> Response:
    """Set a path's owner."""
    files = _files(request, sandbox_id, Scope.EXEC)
    wanted = await body(request, Ownership)
    await files.chown(raw_query(request, "path"), wanted.uid, wanted.gid)
    return Response(status_code=204)


@router.get("/archive", response_model=None, responses=_TAR, openapi_extra=_PATH)
async def tar_down(request: Request, sandbox_id: str) -> Response:
    """Return a tree as a tar. It is hostile: unpack it with care."""
    files = _files(request, sandbox_id, Scope.READ)
    return await _streamed(files.tar_down(raw_query(request, "path")), 200, {}, "application/x-tar")


@router.put("/archive", response_model=Members, openapi_extra={**_PATH, **RAW_BODY})
async def tar_up(request: Request, sandbox_id: str, uid: _Uid = None, gid: _Gid = None) -> Response:
    """Unpack a tar below a path. A member that would leave it is refused."""
    files = _files(request, sandbox_id, Scope.EXEC)
    count = await files.tar_up(raw_query(request, "path"), request.stream(), owner=_owner(uid, gid))
    return json_answer(Members(members=count))
