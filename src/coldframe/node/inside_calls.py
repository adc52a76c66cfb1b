"""What a node is asked about the inside of a sandbox: files, processes, ports, network, guards."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from coldframe.node import fingerprints
from coldframe.node.files import GuardedFiles
from coldframe.node.opening import OpenNode
from coldframe.protocol.errors import CapabilityError
from coldframe.protocol.models import (
    MOST_CHANGES,
    DiskExtension,
    ExecInfo,
    FileChanges,
    Fingerprint,
    GuardReport,
    GuardRequest,
    PortUrl,
    ProcessInfo,
    SandboxInfo,
)
from coldframe.protocol.network import EgressEvents, NetworkPolicy
from coldframe.protocol.patching import Patched, apply_patch
from coldframe.runtimes.base import FileAccess

CHANGES_S = 10.0
"""How long one look at what changed of a sandbox's files may take."""


class InsideCalls(OpenNode):
    """See `Node`."""

    def files(self, id_or_name: str) -> FileAccess:
        """Return the sandbox's files; every call on them checks the sandbox's state."""
        return GuardedFiles(self._find(id_or_name))

    async def apply_patch(
        self,
        id_or_name: str,
        patch: str | bytes,
        base_sha256: Mapping[str, str] | None,
        *,
        root: str,
        strip: int,
    ) -> Patched:
        """Apply a patch to the sandbox's files, all of it or nothing. Raises as `apply_patch`."""
        return await apply_patch(self.files(id_or_name), patch, base_sha256, root=root, strip=strip)

    async def connect(
        self, id_or_name: str, port: int
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to a TCP port from within the sandbox. Raises PortUnreachableError."""
        return await self._find(id_or_name).require_ready().connect(port)

    async def port_url(self, id_or_name: str, port: int, ttl_s: float) -> PortUrl:
        """Refuse: only a service has URLs.

        Raises:
            CapabilityError: always.
        """
        del port, ttl_s
        self._find(id_or_name).require_ready()
        raise CapabilityError(
            "a node in this process serves no URLs: use connect(), or a service "
            "(coldframe serve --listen 127.0.0.1:8080)"
        )

    async def commands(self, id_or_name: str) -> tuple[ExecInfo, ...]:
        """Return the newest 1,000 commands of a sandbox whose results are kept, oldest first."""
        sandbox = self._find(id_or_name)
        return tuple(one.info() for one in self._works.operations.of_sandbox(sandbox))

    async def processes(self, id_or_name: str) -> tuple[ProcessInfo, ...]:
        """Return all processes of a sandbox but its pid 1."""
        return await self._find(id_or_name).require_ready().processes()

    async def listening_ports(self, id_or_name: str) -> tuple[int, ...]:
        """Return the TCP ports that something in the sandbox listens on."""
        return await self._find(id_or_name).require_ready().listening_ports()

    async def kill_processes(
        self, id_or_name: str, operation_id: str | None = None
    ) -> tuple[ProcessInfo, ...]:
        """Kill all of one command, or everything but pid 1; return what was killed, once dead."""
        return await self._find(id_or_name).require_ready().kill_processes(operation_id)

    async def set_network(
        self, id_or_name: str, policy: NetworkPolicy, *, expected_version: int | None = None
    ) -> SandboxInfo:
        """Put a network policy in force, for open connections too, before this returns.

        Raises:
            CapabilityError: the runtime cannot enforce it.
            InvalidRequestError: it was read from a record, without its secrets.
        """
        sandbox = self._find(id_or_name)
        await sandbox.require_ready(expected_version).set_network(policy)
        sandbox.asked = sandbox.asked or sandbox.spec
        sandbox.spec = sandbox.spec.model_copy(update={"network": policy})
        self._works.legacy.note(sandbox)
        return sandbox.info()

    async def egress_events(
        self, id_or_name: str, cursor: int = 0, limit: int = 1000
    ) -> EgressEvents:
        """Return decisions about the network from a cursor on (0: the first), at most `limit`."""
        return self._find(id_or_name).require_readable().egress_events(cursor, limit)

    async def extend_disk(self, id_or_name: str, extension: DiskExtension) -> None:
        """Let a sandbox hold so much more than its disk limit says."""
        await self._find(id_or_name).require_ready().extend_disk(extension.extra_bytes)

    async def guard(self, id_or_name: str, request: GuardRequest) -> None:
        """Guard a directory for one command. Raises as `SandboxHandle.guard`."""
        sandbox = self._find(id_or_name)
        await sandbox.require_ready().guard(request)
        sandbox.tampering_told = 0

    async def guard_report(self, id_or_name: str) -> GuardReport:
        """End writing in the guarded directory and tell of it. Raises ConflictError: none is."""
        sandbox = self._find(id_or_name)
        report = await sandbox.require_ready().guard_report()
        self._works.register.tell_tampering(sandbox, report)
        return report

    async def unguard(self, id_or_name: str) -> None:
        """Take the guarded directory away."""
        await self._find(id_or_name).require_ready().unguard()

    async def fingerprint(self, id_or_name: str) -> Fingerprint:
        """Return digests of the sandbox's state; see `fingerprints.EXCLUDED` for what is not."""
        sandbox = self._find(id_or_name)
        return await fingerprints.take(sandbox, sandbox.require_readable())

    async def changes(
        self, id_or_name: str, since: str | None = None, limit: int = MOST_CHANGES
    ) -> FileChanges:
        """Return what became of a sandbox's files since a mark (None: over its image).

        Raises as `SandboxHandle.changes`.
        """
        handle = self._find(id_or_name).require_readable()
        return await handle.changes(since, limit, CHANGES_S)
