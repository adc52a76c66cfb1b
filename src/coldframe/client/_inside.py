"""What both SDKs ask of one sandbox and its commands, on the event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING

from coldframe.client._core import kill_quietly
from coldframe.protocol.errors import InvalidRequestError
from coldframe.protocol.following import merged
from coldframe.protocol.models import (
    MOST_CHANGES,
    DiskExtension,
    ExecInfo,
    ExecRequest,
    ExecResult,
    FileChanges,
    Fingerprint,
    GuardReport,
    GuardRequest,
    OutputChunk,
    PortUrl,
    ProcessInfo,
    SandboxInfo,
    SessionInfo,
    SignalScope,
    Stream,
)
from coldframe.protocol.text import encoded

if TYPE_CHECKING:
    import asyncio

    from coldframe.client._core import ClientCore
    from coldframe.protocol.network import EgressEvents, NetworkPolicy
    from coldframe.protocol.patching import Patched
    from coldframe.runtimes.base import FileAccess


class SandboxCore:
    """One sandbox of a client. Every method raises what the node's of the same name does."""

    def __init__(self, client: ClientCore, sandbox_id: str) -> None:
        self._client, self.id = client, sandbox_id

    async def files(self, operation_id: str | None = None) -> FileAccess:
        return (await self._client.changes(operation_id)).files(self.id)

    async def apply_patch(
        self,
        patch: str | bytes,
        base_sha256: Mapping[str, str] | None,
        *,
        root: str,
        strip: int,
        operation_id: str | None,
    ) -> Patched:
        changes = await self._client.changes(operation_id)
        return await changes.apply_patch(self.id, patch, base_sha256, root=root, strip=strip)

    async def info(self) -> SandboxInfo:
        return await self._client.get(self.id)

    async def renew(self, ttl_s: float | None, operation_id: str | None) -> SandboxInfo:
        return await (await self._client.changes(operation_id)).renew(self.id, ttl_s)

    async def fingerprint(self) -> Fingerprint:
        return await (await self._client.link()).fingerprint(self.id)

    async def changes(self, since: str | None, limit: int) -> FileChanges:
        if limit < 1:
            raise InvalidRequestError(f"limit {limit}: it is at least 1")
        if since is not None:
            encoded(since, "the mark")
        link = await self._client.link()
        return await link.changes(self.id, since, min(limit, MOST_CHANGES))

    async def commands(self) -> tuple[ExecInfo, ...]:
        return await (await self._client.link()).commands(self.id)

    async def processes(self) -> tuple[ProcessInfo, ...]:
        return await (await self._client.link()).processes(self.id)

    async def kill_processes(self, of: str | None, key: str | None) -> tuple[ProcessInfo, ...]:
        return await (await self._client.changes(key)).kill_processes(self.id, of)

    async def listening_ports(self) -> tuple[int, ...]:
        return await (await self._client.link()).listening_ports(self.id)

    async def port_url(self, port: int, ttl_s: float, operation_id: str | None) -> PortUrl:
        return await (await self._client.changes(operation_id)).port_url(self.id, port, ttl_s)

    async def set_network(
        self, policy: NetworkPolicy, expected_version: int | None, operation_id: str | None
    ) -> SandboxInfo:
        changes = await self._client.changes(operation_id)
        return await changes.set_network(self.id, policy, expected_version=expected_version)

    async def egress_events(self, cursor: int, limit: int) -> EgressEvents:
        return await (await self._client.link()).egress_events(self.id, cursor, limit)

    async def extend_disk(self, extension: DiskExtension, operation_id: str | None) -> None:
        await (await self._client.changes(operation_id)).extend_disk(self.id, extension)

    async def guard(self, request: GuardRequest, key: str | None) -> None:
        await (await self._client.changes(key)).guard(self.id, request)

    async def guard_report(self) -> GuardReport:
        return await (await self._client.link()).guard_report(self.id)

    async def unguard(self) -> None:
        await (await self._client.link()).unguard(self.id)

    async def connect(self, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await (await self._client.link()).connect(self.id, port)

    async def sessions(self) -> tuple[SessionInfo, ...]:
        return await (await self._client.link()).sessions().list(self.id)

    # --- commands in the background ---------------------------------------------------

    async def start(self, request: ExecRequest) -> str:
        return await self._client.start(self.id, request)

    async def wait(self, operation_id: str) -> ExecResult:
        return await (await self._client.link()).wait_exec(operation_id)

    async def poll(self, operation_id: str) -> ExecResult | None:
        """Return the result if the command has ended, else None."""
        return await (await self._client.link()).poll_exec(operation_id)

    async def read(
        self, operation_id: str, stream: Stream, cursor: int, max_bytes: int, wait: bool
    ) -> OutputChunk:
        link = await self._client.link()
        return await link.read_output(operation_id, stream, cursor, max_bytes, wait)

    async def output(
        self, operation_id: str, cursors: Mapping[Stream, int] | None
    ) -> AsyncIterator[OutputChunk]:
        link = await self._client.link()
        async with aclosing(merged(link, operation_id, cursors)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def write_stdin(self, of: str, data: bytes, operation_id: str | None) -> None:
        await (await self._client.changes(operation_id)).write_stdin(of, data)

    async def close_stdin(self, of: str, operation_id: str | None) -> None:
        await (await self._client.changes(operation_id)).close_stdin(of)

    async def signal(
        self, of: str, signum: int, scope: SignalScope, operation_id: str | None
    ) -> int:
        return await (await self._client.changes(operation_id)).signal(of, signum, scope)

    async def kill(self, operation_id: str) -> ExecResult:
        await kill_quietly(await self._client.link(), self.id, operation_id)
        return await self.wait(operation_id)

    async def resize(self, of: str, rows: int, cols: int, operation_id: str | None) -> None:
        await (await self._client.changes(operation_id)).resize(of, rows, cols)

    async def forget(self, operation_id: str) -> None:
        await (await self._client.link()).forget(operation_id)
