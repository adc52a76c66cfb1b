"""A node behind a service: the `NodeLink` that speaks HTTP.

A request is sent again only where that does nothing twice: looking, creates and commands (by
their operation ids), and what ends in the same state. Whoever waits longer than one request may
asks again, so a connection that is lost on the way costs nothing but time.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote, urlencode

from coldframe.client._calls import call, once, sent
from coldframe.client._connection import Address
from coldframe.client._http import Http, Reviver
from coldframe.client._presence import Presence
from coldframe.client._remote_execs import MARGIN_S, POLL_S, RemoteExecs, sandbox_path
from coldframe.client._remote_files import RemoteFiles
from coldframe.client._remote_sessions import RemoteSessions
from coldframe.protocol import wire
from coldframe.protocol.errors import (
    CapabilityError,
    ColdframeError,
    SandboxNotFoundError,
)
from coldframe.protocol.ids import check_operation_id, new_operation_id
from coldframe.protocol.models import (
    Capabilities,
    DiskExtension,
    EventKind,
    EventPage,
    ExecInfo,
    FileChanges,
    Fingerprint,
    GuardReport,
    GuardRequest,
    ImageInfo,
    Ledger,
    PortUrl,
    ProcessInfo,
    SandboxInfo,
    SandboxSpec,
)
from coldframe.protocol.network import EgressEvents, NetworkPolicy
from coldframe.protocol.patching import Patched, apply_patch

if TYPE_CHECKING:
    from pathlib import Path

    from coldframe.client._link import BuiltImage

_VERSION = (wire.VERSION_HEADER, ", ".join(map(str, wire.SPOKEN_VERSIONS)))
_JOIN_S = 10.0
_CREATE_S = 120.0
"""How long one request for a sandbox waits; the same is then asked again."""


@dataclass(frozen=True)
class RemoteCloseReport:
    """See `CloseReport`."""

    failures: tuple[str, ...] = ()


class RemoteNode(RemoteExecs):
    """See `NodeLink`. Every method also raises ServiceUnreachableError, and errors of keys."""

    def __init__(self, http: Http, capabilities: Capabilities) -> None:
        super().__init__(http)
        self._capabilities = capabilities
        self._made: set[str] = set()
        self._undeleted: set[str] = set()
        """Of those that were made by it, what could not be deleted."""
        self._relays: set[asyncio.Task[None]] = set()
        self._presence: Presence | None = None

    @classmethod
    async def open(cls, address: Address, api_key: str | None) -> RemoteNode:
        """Reach a service and ask what it can do.

        Raises:
            ServiceUnreachableError, NotAuthenticatedError, VersionMismatchError: it cannot be used.
        """
        headers = [_VERSION]
        if api_key is not None:
            # A line end would begin a header of its own.
            shown = "".join(one for one in api_key if one.isascii() and one.isprintable())
            headers.append(("Authorization", f"Bearer {shown}"))
        http = Http(address, headers)
        try:
            told = await call(http, "GET", "/v1/capabilities")
        except BaseException:
            http.close()
            raise
        return cls(http, wire.load(Capabilities, told.body))

    @classmethod
    async def open_once(cls, address: Address) -> RemoteNode:
        """As `open`, at once or not at all."""
        http = Http(address, [_VERSION])
        try:
            told = await http.request("GET", "/v1/capabilities", within_s=_JOIN_S)
            if told.status >= 400:
                raise wire.read_error(told.body, told.status)
        except BaseException:
            http.close()
            raise
        return cls(http, wire.load(Capabilities, told.body))

    def stay(self, revive: Reviver) -> None:
        """Be there for the node until the close: it stays, and knows when this process ends.

        `revive` is called when nobody answers any more although nobody said so.
        """
        self._http.revive = revive
        self._presence = Presence(self._http)

    def under(self, operation_id: str, /) -> RemoteNode:
        named = copy.copy(self)  # of the same connections
        named._id = operation_id
        return named

    def keep(self, sandbox_id: str, /) -> None:
        if self._presence is not None:
            self._presence.keep(sandbox_id)

    async def close(self) -> RemoteCloseReport:
        """Delete once more what could not be deleted, and close the connections."""
        failures = []
        for sandbox_id in list(self._undeleted):
            try:
                await self.delete(sandbox_id)
            except SandboxNotFoundError:
                continue
            except ColdframeError as error:
                failures.append(f"sandbox {sandbox_id!r} was not deleted: {error}")
        for task in self._relays:
            task.cancel()
        await asyncio.gather(*self._relays, return_exceptions=True)
        if self._presence is not None:
            await self._presence.close()
        self._http.close()
        return RemoteCloseReport(tuple(failures))

    def capabilities(self) -> Capabilities:
        return self._capabilities

    async def ledger(self) -> Ledger:
        return await self._get(Ledger, "/v1/ledger")

    async def events(
        self,
        cursor: str | None = None,
        limit: int = 1000,
        wait: bool = False,
        /,
        *,
        kind: EventKind = EventKind.STATE,
    ) -> EventPage:
        wait_s = POLL_S if wait else 0.0
        target = f"/v1/events?kind={kind}&limit={min(limit, 1000)}&wait_s={wait_s:g}"
        while True:
            asked = target if cursor is None else f"{target}&cursor={quote(cursor, safe='')}"
            answer = await self._call("GET", asked, within_s=wait_s + MARGIN_S)
            page = wire.load(EventPage, answer.body)
            if page.events or not wait or cursor is None:
                return page
            cursor = page.next_cursor

    # --- sandboxes --------------------------------------------------------------------

    async def create_sandbox(
        self, spec: SandboxSpec, *, operation_id: str | None = None
    ) -> SandboxInfo:
        key = new_operation_id() if operation_id is None else check_operation_id(operation_id)
        making = asyncio.ensure_future(self._create(spec, key))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            if operation_id is None:
                # Nobody knows its id, so nobody else could end it.
                await asyncio.shield(asyncio.ensure_future(self._undo(making)))
            else:
                making.cancel()
            raise

    async def _create(self, spec: SandboxSpec, key: str) -> SandboxInfo:
        headers = [("Idempotency-Key", key)]
        if self._presence is not None:
            headers.append(await self._presence.header())
        body = wire.dump(spec, secrets=True)
        answer = await self._call("POST", "/v1/sandboxes", body, headers, within_s=_CREATE_S)
        info = wire.load(SandboxInfo, answer.body)
        self._made.add(info.id)
        if self._presence is not None:
            self._presence.made(info.id)
        return info

    async def _undo(self, making: asyncio.Future[SandboxInfo]) -> None:
        with contextlib.suppress(ColdframeError):
            await self.delete((await making).id)

    async def get(self, id_or_name: str, /) -> SandboxInfo:
        return await self._get(SandboxInfo, sandbox_path(id_or_name))

    async def list(self, labels: Mapping[str, str] | None = None, /) -> tuple[SandboxInfo, ...]:
        query: list[tuple[str, str]] = [("limit", "1000")]
        query += [("label", f"{name}={value}") for name, value in (labels or {}).items()]
        found: list[SandboxInfo] = []
        cursor: str | None = None
        while True:
            asked = query if cursor is None else [*query, ("cursor", cursor)]
            answer = await self._call(
                "GET", f"/v1/sandboxes?{urlencode(asked, errors='surrogateescape')}"
            )
            page = json.loads(answer.body)
            found += wire.load_all(SandboxInfo, json.dumps(page["sandboxes"]).encode())
            cursor = page["next_cursor"]
            if cursor is None:
                return tuple(found)

    async def delete(self, sandbox_id: str, /) -> SandboxInfo:
        # A name may be another's by the time it is asked for again.
        named = self._id is not None or not sandbox_id.startswith("sb-")
        headers = once(self._id) if named else ()
        try:
            answer = await self._call("DELETE", sandbox_path(sandbox_id), headers=headers)
        except ColdframeError as error:
            if sandbox_id in self._made and not isinstance(error, SandboxNotFoundError):
                self._undeleted.add(sandbox_id)
            raise
        self._made.discard(sandbox_id)
        self._undeleted.discard(sandbox_id)
        if self._presence is not None:
            self._presence.ended(sandbox_id)
        return wire.load(SandboxInfo, answer.body)

    async def renew(self, sandbox_id: str, ttl_s: float | None, /) -> SandboxInfo:
        ttl = ttl_s if ttl_s is None or math.isfinite(ttl_s) else -1.0
        body = json.dumps({"ttl_s": ttl}).encode()
        target = f"{sandbox_path(sandbox_id)}/lease"
        answer = await self._call("PUT", target, body, once(self._id))
        return wire.load(SandboxInfo, answer.body)

    async def set_network(
        self, sandbox_id: str, policy: NetworkPolicy, /, *, expected_version: int | None = None
    ) -> SandboxInfo:
        query = "" if expected_version is None else f"?expected_version={expected_version}"
        target = f"{sandbox_path(sandbox_id)}/network{query}"
        body = wire.dump(policy, secrets=True)
        answer = await self._call("PUT", target, body, once(self._id))
        return wire.load(SandboxInfo, answer.body)

    async def egress_events(self, sandbox_id: str, cursor: int, limit: int, /) -> EgressEvents:
        target = f"{sandbox_path(sandbox_id)}/egress?cursor={cursor}&limit={min(limit, 10_000)}"
        return await self._get(EgressEvents, target)

    async def extend_disk(self, sandbox_id: str, extension: DiskExtension, /) -> None:
        target = f"{sandbox_path(sandbox_id)}/disk"
        await self._call("PUT", target, wire.dump(extension), once(self._id))

    async def guard(self, sandbox_id: str, request: GuardRequest, /) -> None:
        target = f"{sandbox_path(sandbox_id)}/guard"
        await self._call("PUT", target, wire.dump(request), once(self._id))

    async def guard_report(self, sandbox_id: str, /) -> GuardReport:
        target = f"{sandbox_path(sandbox_id)}/guard/report"
        answer = await self._call("POST", target, headers=once(self._id))
        return wire.load(GuardReport, answer.body)

    async def unguard(self, sandbox_id: str, /) -> None:
        await self._call("DELETE", f"{sandbox_path(sandbox_id)}/guard", headers=once(self._id))

    async def fingerprint(self, sandbox_id: str, /) -> Fingerprint:
        return await self._get(Fingerprint, f"{sandbox_path(sandbox_id)}/fingerprint")

    async def changes(self, sandbox_id: str, since: str | None, limit: int, /) -> FileChanges:
        query = f"limit={limit}"
        if since is not None:
            query += f"&since={quote(since, errors='surrogateescape')}"
        return await self._get(FileChanges, f"{sandbox_path(sandbox_id)}/changes?{query}")

    async def commands(self, sandbox_id: str, /) -> tuple[ExecInfo, ...]:
        answer = await self._call("GET", f"{sandbox_path(sandbox_id)}/execs")
        return wire.load_all(ExecInfo, answer.body)

    async def processes(self, sandbox_id: str, /) -> tuple[ProcessInfo, ...]:
        answer = await self._call("GET", f"{sandbox_path(sandbox_id)}/processes")
        return wire.load_all(ProcessInfo, answer.body)

    async def kill_processes(
        self, sandbox_id: str, operation_id: str | None = None, /
    ) -> tuple[ProcessInfo, ...]:
        query = "" if operation_id is None else f"?operation_id={quote(operation_id)}"
        answer = await self._call(
            "DELETE", f"{sandbox_path(sandbox_id)}/processes{query}", headers=once(self._id)
        )
        return wire.load_all(ProcessInfo, answer.body)

    async def listening_ports(self, sandbox_id: str, /) -> tuple[int, ...]:
        answer = await self._call("GET", f"{sandbox_path(sandbox_id)}/ports")
        return tuple(json.loads(answer.body))

    # --- streams ----------------------------------------------------------------------

    def sessions(self) -> RemoteSessions:
        return RemoteSessions(self._call)

    def files(self, sandbox_id: str, /) -> RemoteFiles:
        return RemoteFiles(self._http, self._call, sandbox_path(sandbox_id), self._id)

    async def apply_patch(
        self,
        sandbox_id: str,
        patch: str | bytes,
        base_sha256: Mapping[str, str] | None,
        /,
        *,
        root: str,
        strip: int,
    ) -> Patched:
        files = self.files(sandbox_id)
        if self._id is None:
            return await apply_patch(files, patch, base_sha256, root=root, strip=strip)
        return await files.patch(patch, base_sha256 or {}, root=root, strip=strip)

    async def connect(
        self, sandbox_id: str, port: int, /
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        from coldframe.client._tunnel import tunnel

        target = f"{sandbox_path(sandbox_id)}/ports/{port}/stream"
        return await tunnel(self._http, target, self._relays)

    async def port_url(self, sandbox_id: str, port: int, ttl_s: float, /) -> PortUrl:
        body = json.dumps({"ttl_s": float(ttl_s)}).encode()
        target = f"{sandbox_path(sandbox_id)}/ports/{port}/url"
        told = json.loads((await self._call("POST", target, body, once(self._id))).body)
        where = self._http.address
        origin = told["origin"] if where.unix is not None else str(where)
        if origin is None:
            raise CapabilityError(
                f"the service at {where} listens on no TCP address, so nothing of it has a URL: "
                "coldframe serve --listen 127.0.0.1:8080"
            )
        return PortUrl(url=origin + told["path"], expires_at=told["expires_at"])

    async def list_images(self) -> tuple[ImageInfo, ...]:
        answer = await self._call("GET", "/v1/images")
        return wire.load_all(ImageInfo, answer.body)

    async def build_image(
        self,
        name: str,
        context: Path,
        *,
        dockerfile: Path | None,
        build_args: Mapping[str, str] | None,
        target: str | None,
        network: NetworkPolicy,
        deadline_s: float,
        cached: bool,
    ) -> BuiltImage:
        from coldframe.client._remote_build import Built, content, parameters

        asked = parameters(name, context, dockerfile, build_args, target)
        asked += [("network", wire.dump(network, secrets=True).decode())]
        asked += [("deadline_s", repr(deadline_s)), ("cached", str(cached).lower())]
        target_path = f"/v1/images?{urlencode(asked, errors='surrogateescape')}"
        key = once(self._id)
        async with contextlib.aclosing(content(context)) as archive:
            body = await sent(self._http, "POST", target_path, archive, key, content=archive)
        return Built(json.loads(body)["digest"])
