"""What the SDK needs of a node: the one place where another way to reach one plugs in.

The node in this process (`_open.py`) is the first; a node behind a socket or a URL is another
object with these methods and nothing else in this room changes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    import asyncio
    from pathlib import Path

    from coldframe.protocol.models import (
        Capabilities,
        DiskExtension,
        EventKind,
        EventPage,
        ExecInfo,
        ExecRequest,
        ExecResult,
        FileChanges,
        Fingerprint,
        GuardReport,
        GuardRequest,
        ImageInfo,
        Ledger,
        OutputChunk,
        PortUrl,
        ProcessInfo,
        SandboxInfo,
        SandboxSpec,
        SessionExecRequest,
        SessionInfo,
        SessionRequest,
        SessionResult,
        SignalScope,
        Stream,
    )
    from coldframe.protocol.network import EgressEvents, NetworkPolicy
    from coldframe.protocol.patching import Patched
    from coldframe.runtimes.base import FileAccess


class CloseReport(Protocol):
    """How closing a node went."""

    @property
    def failures(self) -> tuple[str, ...]:
        """What could not be ended or given back, one sentence each."""


class BuiltImage(Protocol):
    """An image that was built."""

    @property
    def digest(self) -> str: ...


class SessionAccess(Protocol):
    """Sessions of a node. What each method promises stands in `coldframe.node.sessions`."""

    async def create(self, sandbox_id: str, request: SessionRequest, /) -> SessionInfo: ...

    async def list(self, sandbox_id: str, /) -> tuple[SessionInfo, ...]: ...

    async def get(self, session_id: str, /) -> SessionInfo: ...

    async def exec(self, session_id: str, asked: SessionExecRequest, /) -> SessionResult: ...

    async def close(self, session_id: str, /, *, kill: bool = False) -> SessionInfo: ...


class Changes(Protocol):
    """What changes something. What each method promises stands in `coldframe.node.node.Node`."""

    async def delete(self, sandbox_id: str, /) -> SandboxInfo: ...

    async def renew(self, sandbox_id: str, ttl_s: float | None, /) -> SandboxInfo: ...

    async def write_stdin(self, operation_id: str, data: bytes, /) -> None: ...

    async def close_stdin(self, operation_id: str, /) -> None: ...

    async def signal(self, operation_id: str, signum: int, scope: SignalScope, /) -> int: ...

    async def resize(self, operation_id: str, rows: int, cols: int, /) -> None: ...

    async def forget(self, operation_id: str, /) -> None: ...

    def files(self, sandbox_id: str, /) -> FileAccess: ...

    async def apply_patch(
        self,
        sandbox_id: str,
        patch: str | bytes,
        base_sha256: Mapping[str, str] | None,
        /,
        *,
        root: str,
        strip: int,
    ) -> Patched: ...

    async def port_url(self, sandbox_id: str, port: int, ttl_s: float, /) -> PortUrl: ...

    async def kill_processes(
        self, sandbox_id: str, operation_id: str | None = None, /
    ) -> tuple[ProcessInfo, ...]: ...

    async def set_network(
        self, sandbox_id: str, policy: NetworkPolicy, /, *, expected_version: int | None = None
    ) -> SandboxInfo: ...

    async def extend_disk(self, sandbox_id: str, extension: DiskExtension, /) -> None: ...

    async def guard(self, sandbox_id: str, request: GuardRequest, /) -> None: ...

    async def guard_report(self, sandbox_id: str, /) -> GuardReport: ...

    async def unguard(self, sandbox_id: str, /) -> None: ...

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
    ) -> BuiltImage: ...


class NodeLink(Changes, Protocol):
    """A node that is open. What each method promises stands in `coldframe.node.node.Node`."""

    def under(self, operation_id: str, /) -> Changes:
        """Return what makes changes under an id: asked for again it gives the first answer.

        Raises OperationMismatchError (the id stands for something else), OperationExpiredError.
        """

    async def close(self) -> CloseReport: ...

    def capabilities(self) -> Capabilities: ...

    def keep(self, sandbox_id: str, /) -> None:
        """A sandbox is not to end with this client, as far as it can. From any thread."""

    async def ledger(self) -> Ledger: ...

    async def events(
        self,
        cursor: str | None = None,
        limit: int = 1000,
        wait: bool = False,
        /,
        *,
        kind: EventKind = ...,
    ) -> EventPage: ...

    async def create_sandbox(
        self, spec: SandboxSpec, *, operation_id: str | None = None
    ) -> SandboxInfo: ...

    async def get(self, id_or_name: str, /) -> SandboxInfo: ...

    async def list(self, labels: Mapping[str, str] | None = None, /) -> tuple[SandboxInfo, ...]: ...

    async def exec(self, sandbox_id: str, request: ExecRequest, /) -> ExecResult: ...

    async def start_exec(self, sandbox_id: str, request: ExecRequest, /) -> str: ...

    async def wait_exec(self, operation_id: str, /) -> ExecResult: ...

    async def poll_exec(self, operation_id: str, /) -> ExecResult | None: ...

    async def read_output(
        self, operation_id: str, stream: Stream, cursor: int, max_bytes: int, wait: bool, /
    ) -> OutputChunk: ...

    async def cancel_exec(self, operation_id: str, /) -> None: ...

    async def mark(self, operation_id: str, /) -> tuple[int, int]: ...

    def sessions(self) -> SessionAccess: ...

    async def connect(
        self, sandbox_id: str, port: int, /
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]: ...

    async def commands(self, sandbox_id: str, /) -> tuple[ExecInfo, ...]: ...

    async def processes(self, sandbox_id: str, /) -> tuple[ProcessInfo, ...]: ...

    async def listening_ports(self, sandbox_id: str, /) -> tuple[int, ...]: ...

    async def fingerprint(self, sandbox_id: str, /) -> Fingerprint: ...

    async def changes(self, sandbox_id: str, since: str | None, limit: int, /) -> FileChanges: ...

    async def egress_events(self, sandbox_id: str, cursor: int, limit: int, /) -> EgressEvents: ...

    async def list_images(self) -> tuple[ImageInfo, ...] | None: ...


NodeOpener: TypeAlias = Callable[[], Awaitable[NodeLink]]
"""Opens a node on the running event loop; called once per client, on the first use."""
