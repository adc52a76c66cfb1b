"""A node behind a service, dressed as a runtime: the runtimes' own contract can be run on it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from coldframe.client._link import NodeLink
from coldframe.images.base import Image
from coldframe.protocol.models import (
    Capabilities,
    DiskExtension,
    ExecRequest,
    ExecResult,
    FileChanges,
    GuardReport,
    GuardRequest,
    OutputChunk,
    ProcessInfo,
    SandboxSpec,
    SignalScope,
    Stream,
)
from coldframe.protocol.network import EgressEvents, NetworkPolicy
from coldframe.runtimes.base import FileAccess, Gone


class ServedExec:
    """See `RunningExec`."""

    pid = None

    def __init__(self, link: NodeLink, operation_id: str, own_id: str) -> None:
        self._link, self._id, self._own_id = link, operation_id, own_id

    async def wait(self) -> ExecResult:
        result = await self._link.wait_exec(self._id)
        request = result.request.model_copy(update={"operation_id": self._own_id})
        return result.model_copy(update={"operation_id": self._own_id, "request": request})

    async def read(
        self, stream: Stream, cursor: int, max_bytes: int, *, wait: bool = True
    ) -> OutputChunk:
        return await self._link.read_output(self._id, stream, cursor, max_bytes, wait)

    async def write_stdin(self, data: bytes) -> None:
        await self._link.write_stdin(self._id, data)

    async def close_stdin(self) -> None:
        await self._link.close_stdin(self._id)

    async def signal(self, signum: int, scope: SignalScope = SignalScope.GROUP) -> int:
        return await self._link.signal(self._id, signum, scope)

    async def resize(self, rows: int, cols: int) -> None:
        await self._link.resize(self._id, rows, cols)

    async def mark(self) -> tuple[int, int]:
        return await self._link.mark(self._id)

    async def forget(self) -> None:
        await self._link.forget(self._id)


class ServedSandbox:
    """See `SandboxHandle`."""

    def __init__(self, link: NodeLink, sandbox_id: str) -> None:
        self._link, self.id = link, sandbox_id
        self.gone: asyncio.Future[Gone] = asyncio.get_running_loop().create_future()

    @property
    def files(self) -> FileAccess:
        return self._link.files(self.id)

    async def start_exec(self, request: ExecRequest, operation_id: str) -> ServedExec:
        named = request.model_copy(update={"operation_id": self._own(operation_id)})
        return ServedExec(self._link, await self._link.start_exec(self.id, named), operation_id)

    async def connect(self, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await self._link.connect(self.id, port)

    def _own(self, operation_id: str) -> str:
        """Checks use the same ids again, in other sandboxes; a node must not."""
        return f"{operation_id}.{self.id}"

    def _theirs(self, found: tuple[ProcessInfo, ...]) -> tuple[ProcessInfo, ...]:
        suffix = f".{self.id}"
        return tuple(
            one.model_copy(
                update={"operation_id": one.operation_id and one.operation_id.removesuffix(suffix)}
            )
            for one in found
        )

    async def processes(self) -> tuple[ProcessInfo, ...]:
        return self._theirs(await self._link.processes(self.id))

    async def listening_ports(self) -> tuple[int, ...]:
        return await self._link.listening_ports(self.id)

    async def kill_processes(self, operation_id: str | None = None) -> tuple[ProcessInfo, ...]:
        inner = None if operation_id is None else self._own(operation_id)
        return self._theirs(await self._link.kill_processes(self.id, inner))

    async def changes(self, since: str | None, most: int, limit_s: float) -> FileChanges:
        return await self._link.changes(self.id, since, most)

    async def extend_disk(self, extra_bytes: int) -> None:
        await self._link.extend_disk(self.id, DiskExtension(extra_bytes=extra_bytes))

    async def guard(self, request: GuardRequest) -> None:
        own = self._own(request.operation_id)
        await self._link.guard(self.id, request.model_copy(update={"operation_id": own}))

    async def guard_report(self) -> GuardReport:
        return await self._link.guard_report(self.id)

    async def unguard(self) -> None:
        await self._link.unguard(self.id)

    async def set_network(self, policy: NetworkPolicy) -> None:
        await self._link.set_network(self.id, policy)

    def egress_events(self, cursor: int, limit: int) -> EgressEvents:
        raise NotImplementedError("a service is asked with await")

    async def destroy(self) -> None:
        await self._link.delete(self.id)


class ServedRuntime:
    """See `Runtime`."""

    name = "served"

    def __init__(self, link: NodeLink) -> None:
        self._link = link

    def capabilities(self) -> Capabilities:
        # Events are asked for without await in the contract; the service's own tests have them.
        return self._link.capabilities().model_copy(update={"egress": False})

    def require(self, spec: SandboxSpec, image: Image) -> None:
        """A service refuses when it is asked to create."""

    async def create(self, sandbox_id: str, spec: SandboxSpec, image: Image) -> ServedSandbox:
        info = await self._link.create_sandbox(spec)
        return ServedSandbox(self._link, info.id)

    async def leaks(self, live: Sequence[str]) -> tuple[str, ...]:
        return (await self._link.ledger()).leaks
