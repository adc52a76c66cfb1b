"""Files of a sandbox behind a service: contents stream both ways as they are."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import quote, urlencode

from coldframe.client._calls import once, sent
from coldframe.client._connection import Answer
from coldframe.client._content import Pieces
from coldframe.client._http import Http
from coldframe.protocol import wire
from coldframe.protocol.models import FileEntry, FileStat
from coldframe.protocol.patching import Patched
from coldframe.protocol.text import encoded, excerpt

Path = str | bytes
Owner = tuple[int, int] | None
Call = Callable[..., Awaitable[Answer]]


class RemoteFiles:
    """See `FileAccess`. Contents that cannot be read again are not sent again."""

    def __init__(self, http: Http, call: Call, sandbox: str, operation_id: str | None) -> None:
        self._http, self._call, self._sandbox, self._id = http, call, sandbox, operation_id

    def _target(self, route: str, path: Path, **more: Any) -> str:
        query = "".join(f"&{name}={_text(value)}" for name, value in more.items())
        return f"{self._sandbox}/{route}?path={_quoted(path)}{query}"

    async def stat(self, path: Path, *, follow: bool = True) -> FileStat:
        answer = await self._call("GET", self._target("files/stat", path, follow=follow))
        return wire.load(FileStat, answer.body)

    async def list(self, path: Path) -> tuple[FileEntry, ...]:
        answer = await self._call("GET", self._target("files/list", path))
        return wire.load_all(FileEntry, answer.body)

    async def read(
        self, path: Path, *, offset: int = 0, length: int | None = None
    ) -> AsyncIterator[bytes]:
        if length == 0:
            await self.stat(path)
            return
        last = "" if length is None else str(offset + length - 1)
        whole = offset == 0 and length is None
        headers = [] if whole else [("Range", f"bytes={offset}-{last}")]
        target = self._target("files", path)
        async with self._http.stream("GET", target, headers=headers) as (head, pieces):
            if head.status == 416:
                return
            if head.status >= 400:
                raise wire.read_error(await _whole(pieces), head.status)
            async for piece in pieces:
                yield piece

    async def write(
        self,
        path: Path,
        content: AsyncIterator[bytes],
        *,
        mode: int = 0o644,
        owner: Owner = None,
        parents: bool = True,
    ) -> int:
        target = self._target("files", path, mode=mode, parents=parents, **_owner(owner))
        return int((await self._send("PUT", target, content))["bytes"])

    async def mkdir(
        self,
        path: Path,
        *,
        mode: int = 0o755,
        owner: Owner = None,
        parents: bool = True,
        exist_ok: bool = True,
    ) -> None:
        wanted = {"mode": mode, "parents": parents, "exist_ok": exist_ok, **_owner(owner)}
        target = self._target("files/directory", path)
        await self._call("POST", target, json.dumps(wanted).encode(), once(self._id))

    async def move(self, source: Path, target: Path) -> None:
        await self._call(
            "POST",
            f"{self._target('files/move', source)}&target={_quoted(target)}",
            headers=once(self._id),
        )

    async def remove(self, path: Path, *, recursive: bool = False) -> None:
        target = self._target("files", path, recursive=recursive)
        await self._call("DELETE", target, headers=once(self._id))

    async def chmod(self, path: Path, mode: int) -> None:
        await self._put("files/mode", path, {"mode": mode})

    async def chown(self, path: Path, uid: int, gid: int) -> None:
        await self._put("files/owner", path, {"uid": uid, "gid": gid})

    async def tar_down(self, path: Path) -> AsyncIterator[bytes]:
        async with self._http.stream("GET", self._target("archive", path)) as (head, pieces):
            if head.status >= 400:
                raise wire.read_error(await _whole(pieces), head.status)
            async for piece in pieces:
                yield piece

    async def tar_up(
        self, path: Path, content: AsyncIterator[bytes], *, owner: Owner = None
    ) -> int:
        target = self._target("archive", path, **_owner(owner))
        return int((await self._send("PUT", target, content))["members"])

    async def patch(
        self, patch: str | bytes, base_sha256: Mapping[str, str], *, root: str, strip: int
    ) -> Patched:
        """Let the service apply a patch, all of it or nothing, under one id."""
        asked = [("root", root), ("strip", str(strip))]
        asked += [("base_sha256", f"{path}={digest}") for path, digest in base_sha256.items()]
        target = f"{self._sandbox}/patch?{urlencode(asked, errors='surrogateescape')}"
        answer = await self._call("POST", target, encoded(patch, "the patch"), once(self._id))
        told = json.loads(answer.body)
        return Patched(tuple(told["written"]), tuple(told["removed"]), told["sha256"])

    # --- requests ---------------------------------------------------------------------

    async def _send(
        self, method: str, target: str, content: AsyncIterator[bytes]
    ) -> dict[str, Any]:
        first, second = await anext(content, b""), await anext(content, None)
        if second is None:  # all of it is here
            body = (await self._call(method, target, first, once(self._id))).body
        else:
            whole = _joined(first, second, content)
            # By its id the service takes a digest of it, which is for those that come again.
            again = self._id is not None or (isinstance(content, Pieces) and content.repeats)
            headers = once(self._id) if again else ()
            body = await sent(self._http, method, target, whole, headers, content=content)
        told: dict[str, Any] = json.loads(body)
        return told

    async def _put(self, route: str, path: Path, body: dict[str, Any]) -> None:
        await self._call(
            "PUT", self._target(route, path), json.dumps(body).encode(), once(self._id)
        )


async def _joined(first: bytes, second: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    yield second
    async for piece in rest:
        yield piece


async def _whole(pieces: AsyncIterator[bytes]) -> bytes:
    return b"".join([piece async for piece in pieces])


def _quoted(path: Path) -> str:
    return quote(encoded(path, f"path {excerpt(path)}"), safe="/")


def _owner(owner: Owner) -> dict[str, int]:
    return {} if owner is None else {"uid": owner[0], "gid": owner[1]}


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
