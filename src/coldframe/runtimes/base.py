"""The seam between a node and whatever runs its sandboxes.

A runtime knows mechanisms: make, run, reach, end. It keeps no leases, names or results;
those are the node's. `self_check.py` is the contract that every runtime passes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from coldframe.images.base import Image
from coldframe.protocol.models import (
    Capabilities,
    ExecRequest,
    ExecResult,
    FileChanges,
    FileEntry,
    FileStat,
    GuardReport,
    GuardRequest,
    OutputChunk,
    ProcessInfo,
    SandboxSpec,
    SignalScope,
    Stream,
)
from coldframe.protocol.network import EgressEvent, EgressEvents, NetworkPolicy


@dataclass(frozen=True)
class Gone:
    """How a sandbox ended without being asked to."""

    cause: str
    """`oom`, `signal 9`, `exit 0`, `spawner lost`."""


class RunningExec(Protocol):
    """One command in one sandbox, running or ended."""

    @property
    def pid(self) -> int | None:
        """Its pid in the sandbox, when known."""

    async def wait(self) -> ExecResult:
        """Return when the command has ended, whoever still holds its pipes.

        Raises SpawnerLostError only when nothing at all is known of its end.
        May be awaited by several tasks; cancelling one does not end the command.
        """

    async def read(
        self, stream: Stream, cursor: int, max_bytes: int, *, wait: bool = True
    ) -> OutputChunk:
        """Return bytes from `cursor` on. With `wait`, at least one byte or eof.

        Stream `status` is that of `ExecRequest.status_pipe`: the runtime makes a pipe, gives its
        writing end to the command as descriptor 3 (STATUS_FD of docs/protocol.md), closes its own
        copy of that end at once, and keeps at least the last MiB of what arrives; it reads all
        the time, so that a flood never blocks. eof comes when every holder has closed it, or the
        exec is killed. Raises InvalidRequestError for `status` without `status_pipe`.

        Cancelling a read loses nothing: the same cursor can be asked for again.
        """

    async def write_stdin(self, data: bytes) -> None:
        """Write all of `data`, waiting while the pipe is full.

        Raises InvalidRequestError when stdin was not asked to be open, BrokenPipeError when
        nobody reads.
        """

    async def close_stdin(self) -> None:
        """Give the command end of file. Twice is fine."""

    async def signal(self, signum: int, scope: SignalScope = SignalScope.GROUP) -> int:
        """Send a signal; return how many processes it reached (0: it had ended)."""

    async def resize(self, rows: int, cols: int) -> None:
        """Set the terminal's size. Raises InvalidRequestError without a terminal."""

    async def mark(self) -> tuple[int, int]:
        """Drain what is in the pipes now and return the totals of stdout and stderr.

        Whatever was written before this call, by any process, is below these totals and can be
        read with `wait=False`. Sessions take it as the boundary between two commands.
        """

    async def forget(self) -> None:
        """Drop the kept output. What still runs goes on."""


class FileAccess(Protocol):
    """Files in the sandbox, reached without following a path of its by name.

    Paths are absolute in the sandbox, text or bytes. Links are resolved inside the root.
    Raises PathNotFoundError, PathRefusedError, PathExistsError, FileTooLargeError,
    StorageFullError, SandboxGoneError, FileError.
    """

    async def stat(self, path: str | bytes, *, follow: bool = True) -> FileStat: ...

    async def list(self, path: str | bytes) -> tuple[FileEntry, ...]: ...

    def read(
        self, path: str | bytes, *, offset: int = 0, length: int | None = None
    ) -> AsyncIterator[bytes]:
        """Yield the content in pieces of at most 1 MiB; regular files only."""

    async def write(
        self,
        path: str | bytes,
        content: AsyncIterator[bytes],
        *,
        mode: int = 0o644,
        owner: tuple[int, int] | None = None,
        parents: bool = True,
    ) -> int:
        """Write atomically (a temporary name, then rename) and return the size.

        `mode` and `owner` are those of a new file; an existing one keeps its own.
        Parents that are made belong to `owner` too (None: the sandbox's default user).
        """

    async def mkdir(
        self,
        path: str | bytes,
        *,
        mode: int = 0o755,
        owner: tuple[int, int] | None = None,
        parents: bool = True,
        exist_ok: bool = True,
    ) -> None: ...

    async def move(self, source: str | bytes, target: str | bytes) -> None: ...

    async def remove(self, path: str | bytes, *, recursive: bool = False) -> None: ...

    async def chmod(self, path: str | bytes, mode: int) -> None: ...

    async def chown(self, path: str | bytes, uid: int, gid: int) -> None: ...

    def tar_down(self, path: str | bytes) -> AsyncIterator[bytes]:
        """Yield an uncompressed pax tar of the tree below `path`, names relative to it.

        Keeps modes, ids, links, hard links and sparse files; leaves out sockets, devices and
        FIFOs.
        """

    async def tar_up(
        self,
        path: str | bytes,
        content: AsyncIterator[bytes],
        *,
        owner: tuple[int, int] | None = None,
    ) -> int:
        """Unpack a tar below `path` (made if missing); return the number of members.

        A member that would leave `path` is refused and nothing after it is written.
        `owner` overrides the ids in the archive.
        """


class SandboxHandle(Protocol):
    """One live sandbox of a runtime."""

    @property
    def id(self) -> str: ...

    @property
    def files(self) -> FileAccess: ...

    @property
    def gone(self) -> asyncio.Future[Gone]:
        """Resolves when the sandbox ends without having been destroyed."""

    async def start_exec(self, request: ExecRequest, operation_id: str) -> RunningExec:
        """Start a command; return once it has been started.

        The implementation may return before the program was executed if `wait` then
        raises the same errors. Raises NotExecutedError and its kin, SandboxGoneError.
        """

    async def connect(self, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to a TCP port from within the namespace. Raises PortUnreachableError."""

    async def processes(self) -> tuple[ProcessInfo, ...]:
        """All processes but pid 1. What `start_exec` has returned is among them until it ends."""

    async def listening_ports(self) -> tuple[int, ...]:
        """TCP ports that something in the sandbox listens on."""

    async def kill_processes(self, operation_id: str | None = None) -> tuple[ProcessInfo, ...]:
        """Kill all of one exec, or everything but pid 1; return what was killed once it is dead."""

    async def set_network(self, policy: NetworkPolicy) -> None:
        """Put a network policy in force, for open connections too, before this returns.

        The empty policy leaves loopback only, and nothing of ours inside. Raises CapabilityError
        for any other without the capability `egress`, InvalidRequestError, SandboxGoneError.
        """

    def egress_events(self, cursor: int, limit: int) -> EgressEvents:
        """Return at most `limit` decisions about the network, from a cursor on (0: the first)."""

    async def extend_disk(self, extra_bytes: int) -> None:
        """Let it hold so much more than its disk limit says; without a limit nothing changes."""

    async def guard(self, request: GuardRequest) -> None:
        """Mount an empty directory that one command alone may write, until `unguard`.

        Raises CapabilityError without the capability `guards`, ConflictError if one is guarded,
        FileError (the path), SandboxGoneError.
        """

    async def guard_report(self) -> GuardReport:
        """End all writing in the guarded directory, and tell what is in it.

        Raises ConflictError if none is guarded.
        """

    async def unguard(self) -> None:
        """Take the guarded directory away; that none is guarded is fine."""

    async def changes(self, since: str | None, most: int, limit_s: float) -> FileChanges:
        """Return what became of its files since a mark (None: what differs from the image).

        At most `most` of them are told, all are counted. What of them is whose is not known, and
        a change that falls under the look may be told by the next one. Costs what was written over
        the image, whatever it is. Raises CapabilityError if the runtime cannot tell,
        SandboxGoneError, NotKnownError (after `limit_s`, too much to index, or a mark that is not
        kept), FileTooLargeError, FileError.
        """

    async def export_upper(self, target: Path) -> None:
        """Kill what runs, then copy what was written, in layer form, into the empty `target`."""

    async def destroy(self) -> None:
        """End everything; return when the kernel has nothing of it. Twice is fine."""


@runtime_checkable
class KnowsChanges(Protocol):
    """What a `SandboxHandle` may offer besides: its difference from the image, cheaply."""

    async def digest_changes(self, seed: bytes, limit_s: float) -> str:
        """Return a digest of `seed` and of what differs from the image.

        State, not history: what was written back as it was does not count. Raises
        SandboxGoneError, NotKnownError (after `limit_s`), FileTooLargeError, FileError.
        """


@runtime_checkable
class CountsOoms(Protocol):
    """What a `SandboxHandle` may offer besides: what the OOM killer did in it."""

    def oom_kills(self) -> int:
        """Return how many of its processes it has ended so far; 0 once the sandbox has ended."""


@runtime_checkable
class TellsEgress(Protocol):
    """What a `SandboxHandle` may offer besides: decisions about the network as they are made."""

    def tell_egress(self, told: Callable[[EgressEvent], None]) -> None:
        """Call `told` with each that there was, and with each that comes."""


@runtime_checkable
class TellsStorage(Protocol):
    """What a `SandboxHandle` may offer besides: whether the sandbox can write."""

    def tell_storage(self, told: Callable[[str], None]) -> None:
        """Call `told` at each change with why it cannot, empty when it can again."""


class Runtime(Protocol):
    """Makes sandboxes on one machine."""

    @property
    def name(self) -> str: ...

    async def start(self) -> None:
        """Acquire what is needed. Raises CapabilityError with the remedy."""

    async def close(self) -> None:
        """End every sandbox and give everything back. Twice is fine."""

    def capabilities(self) -> Capabilities:
        """What was probed by `start`."""

    def require(self, spec: SandboxSpec, image: Image) -> None:
        """Refuse what cannot be made as things are, before anything is. Takes no time.

        So a node counts no sandbox that was only asked for. Raises InvalidRequestError,
        CapabilityError, StorageFullError.
        """

    async def create(self, sandbox_id: str, spec: SandboxSpec, image: Image) -> SandboxHandle:
        """Make a sandbox that is ready for exec.

        Raises CreateError (nothing is left), and what `require` raises.
        """

    async def leaks(self, live: Sequence[str]) -> tuple[str, ...]:
        """Compare the kernel with the ids that should be alive; describe each stray."""


@runtime_checkable
class OffersIds(Protocol):
    """What a `Runtime` may offer besides: sandboxes half made before anybody asks."""

    def offer_id(self) -> str | None:
        """Return an id under which one is half made; None: there is none just now.

        `create` with this id is faster than with another. Whoever never creates it owes nothing.
        """
