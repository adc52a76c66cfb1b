"""One sandbox of the native runtime."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

from coldframe.host import cgroups, forks, processes
from coldframe.host.egress.listeners import LISTENERS
from coldframe.protocol.errors import (
    InvalidRequestError,
    PortUnreachableError,
    SandboxGoneError,
)
from coldframe.protocol.models import (
    ExecRequest,
    FileChanges,
    GuardReport,
    GuardRequest,
    ProcessInfo,
    SandboxSpec,
)
from coldframe.protocol.network import EgressEvent, EgressEvents, NetworkPolicy
from coldframe.runtimes.base import FileAccess, Gone, SandboxHandle
from coldframe.runtimes.native_commands import NativeCommands
from coldframe.runtimes.native_exec import NativeExec
from coldframe.runtimes.native_faults import typed_question
from coldframe.runtimes.native_guard import GuardSlots, NativeGuard
from coldframe.runtimes.native_parts import Parts
from coldframe.runtimes.native_upper import NativeUpper

_CONNECT_TIMEOUT_S = 10.0
_NOBODY = {errno.ECONNREFUSED, errno.EADDRNOTAVAIL, errno.ENETUNREACH}
"""What an address says on which nobody listens, or that is not there at all."""
_LOOPBACKS = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))


class NativeSandbox:
    """See `SandboxHandle`."""

    def __init__(
        self,
        spec: SandboxSpec,
        parts: Parts,
        guards: GuardSlots,
        end: Callable[[NativeSandbox], Awaitable[None]],
    ) -> None:
        """`end` takes everything of it from the kernel and the disk."""
        self.parts = parts
        self._id = parts.created.sandbox_id
        self._guard = NativeGuard(parts, guards, spec.owner)
        self.commands = NativeCommands(parts, self._guard)
        self.upper = NativeUpper(self._id, parts.storage, parts.layers)
        self._looking = asyncio.Lock()
        """One at a time: each look keeps a mark for the next."""
        self._disk_bytes = spec.disk_bytes
        self._why_read_only = ""
        self._tell_storage: Callable[[str], None] = lambda _: None
        self._spec = spec
        self._end = end
        self._ending: asyncio.Task[None] | None = None
        self.gone: asyncio.Future[Gone] = asyncio.get_running_loop().create_future()

    @property
    def id(self) -> str:
        """Its id."""
        return self._id

    @property
    def files(self) -> FileAccess:
        """See `SandboxHandle.files`."""
        return self.parts.files

    # --- commands, ports --------------------------------------------------------------

    async def start_exec(self, request: ExecRequest, operation_id: str) -> NativeExec:
        """See `SandboxHandle.start_exec`."""
        self._require_alive()
        return await self.commands.start(request, operation_id)

    async def processes(self) -> tuple[ProcessInfo, ...]:
        """See `SandboxHandle.processes`."""
        self._require_alive()
        return tuple(map(self.commands.info, await self.commands.processes()))

    async def kill_processes(self, operation_id: str | None = None) -> tuple[ProcessInfo, ...]:
        """See `SandboxHandle.kill_processes`."""
        self._require_alive()
        if operation_id is None:
            return await self.commands.kill_all()
        return await self.commands.kill(operation_id)

    def oom_kills(self) -> int:
        """See `CountsOoms`."""
        return cgroups.oom_kills(self.parts.cgroups, self._id)

    async def listening_ports(self) -> tuple[int, ...]:
        """See `SandboxHandle.listening_ports`."""
        self._require_alive()
        created = self.parts.created
        try:
            besides = LISTENERS if self.parts.egress.active else ()
            return processes.listening_ports(created.pid, created.namespaces["net"], besides)
        except ProcessLookupError as error:
            raise SandboxGoneError(f"sandbox {self._id!r} has ended") from error

    async def connect(self, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """See `SandboxHandle.connect`."""
        if not 1 <= port <= 65535:
            raise InvalidRequestError(f"port {port} is not in 1..65535")
        self._require_alive()
        reason: str | None = None
        for family, address in _LOOPBACKS:
            with typed_question(self._id, "no socket can be made in it"):
                made = forks.own_socket(await self.parts.spawner.make_socket(self._id, family))
            try:
                loop = asyncio.get_running_loop()
                await asyncio.wait_for(loop.sock_connect(made, (address, port)), _CONNECT_TIMEOUT_S)
                return await asyncio.open_connection(sock=made)
            except (OSError, TimeoutError) as error:
                made.close()
                if error.errno not in _NOBODY:
                    reason = reason or (os.strerror(error.errno) if error.errno else "timed out")
            except BaseException:
                made.close()
                raise
        raise PortUnreachableError(
            f"port {port} of sandbox {self._id!r}: {reason or 'nothing listens on it'}; "
            "see listening_ports()"
        )

    # --- network ----------------------------------------------------------------------

    async def set_network(self, policy: NetworkPolicy) -> None:
        """See `SandboxHandle.set_network`."""
        self._require_alive()
        await self.parts.egress.set_policy(policy)
        self._spec = self._spec.model_copy(update={"network": policy})
        if self.parts.keeping is not None:
            self.parts.keeping.note_network(self._id, self._spec, self.parts.egress.resolv_before)

    def egress_events(self, cursor: int, limit: int) -> EgressEvents:
        """See `SandboxHandle.egress_events`."""
        return self.parts.egress.events(cursor, limit)

    def tell_egress(self, told: Callable[[EgressEvent], None]) -> None:
        """See `TellsEgress`."""
        self.parts.egress.tell(told)

    # --- what it has written ----------------------------------------------------------

    def tell_storage(self, told: Callable[[str], None]) -> None:
        """See `TellsStorage`."""
        self._tell_storage = told

    def note_storage(self, why_read_only: str) -> None:
        """Its upper takes no writes, or takes them again if that is empty."""
        if why_read_only != self._why_read_only:
            self._why_read_only = why_read_only
            self._tell_storage(why_read_only)

    async def extend_disk(self, extra_bytes: int) -> None:
        """See `SandboxHandle.extend_disk`."""
        self._require_alive()
        if self._disk_bytes is not None:
            await self.upper.widen(self._disk_bytes + extra_bytes)

    async def export_upper(self, target: Path) -> None:
        """See `SandboxHandle.export_upper`, `NativeUpper.export`. Raises SandboxGoneError too."""
        await self.kill_processes()
        await self.upper.export(target)

    async def digest_changes(self, seed: bytes, limit_s: float) -> str:
        """See `KnowsChanges.digest_changes`."""
        self._require_alive()
        return await self.upper.digest(seed, limit_s)

    async def changes(self, since: str | None, most: int, limit_s: float) -> FileChanges:
        """See `SandboxHandle.changes`."""
        async with self._looking:
            self._require_alive()
            return await self.upper.changes(since, most, limit_s)

    # --- guards -----------------------------------------------------------------------

    async def guard(self, request: GuardRequest) -> None:
        """See `SandboxHandle.guard`."""
        self._require_alive()
        others = [found.host_pid for found in await self.commands.processes()]
        await self._guard.begin(request, others)

    async def guard_report(self) -> GuardReport:
        """See `SandboxHandle.guard_report`."""
        self._require_alive()
        return await self._guard.report()

    async def unguard(self) -> None:
        """See `SandboxHandle.unguard`."""
        await self._guard.end(unmount=True)

    # --- ending -----------------------------------------------------------------------

    async def destroy(self) -> None:
        """See `SandboxHandle.destroy`."""
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._destroy())
        await asyncio.shield(self._ending)
        self.commands.forget_all()

    async def _destroy(self) -> None:
        await self._guard.end(unmount=False)
        await self._end(self)

    @property
    def ended(self) -> bool:
        """Whether it was destroyed, or is being so."""
        return self._ending is not None

    def note_gone(self, cause: str) -> None:
        """It ended without being asked to."""
        if not self.gone.done() and self._ending is None:
            self.gone.set_result(Gone(cause))

    def _require_alive(self) -> None:
        if self._ending is not None or self.gone.done():
            raise SandboxGoneError(f"sandbox {self._id!r} has ended")


async def kill_init(sandbox: SandboxHandle) -> None:
    """Kill a native sandbox's pid 1, as the OOM killer might; for checks."""
    assert isinstance(sandbox, NativeSandbox)
    os.kill(sandbox.parts.created.pid, signal.SIGKILL)
