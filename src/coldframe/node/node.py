"""The node of one machine: sandboxes with leases, commands that run once, an exact ledger.

Everything runs on one event loop and belongs to it. A node holds `nodes/<id>/lock` while it
lives; what a dead one left is found by that and reaped.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
)
from contextlib import asynccontextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from coldframe.host import forks
from coldframe.host.outcome import Outcome
from coldframe.images.base import BuildStep, Image, StepResult
from coldframe.node import fingerprints, machine, unclosed
from coldframe.node.assembly import ImageResolver
from coldframe.node.effects import Reply, lost_reply
from coldframe.node.files import GuardedFiles
from coldframe.node.life import Sandbox
from coldframe.node.presences import Presence, Presences
from coldframe.node.quotas import in_use
from coldframe.node.sandboxes import CloseReport, Load
from coldframe.node.sessions import Sessions
from coldframe.node.settings import NodeSettings
from coldframe.node.under import Under
from coldframe.node.works import Works, open_works
from coldframe.protocol.errors import (
    CapabilityError,
    ClientClosedError,
    SandboxNotFoundError,
)
from coldframe.protocol.ids import new_node_id
from coldframe.protocol.models import (
    MOST_CHANGES,
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
    Quota,
    SandboxInfo,
    SandboxSpec,
    SandboxState,
    SignalScope,
    Stream,
)
from coldframe.protocol.network import EgressEvents, NetworkPolicy
from coldframe.protocol.patching import Patched, apply_patch
from coldframe.protocol.resources import NodeResources
from coldframe.runtimes.base import FileAccess, Runtime

CHANGES_S = 10.0
"""How long one look at what changed of a sandbox's files may take."""


class Node:
    """Sandboxes of one machine, by id or name.

    Every method that takes an operation id or names a sandbox may raise SandboxNotFoundError,
    SandboxStateError (in a state that takes no operation), SandboxGoneError (it has ended);
    those that take `expected_version` also ConflictError.
    """

    def __init__(
        self,
        settings: NodeSettings | None = None,
        runtime: Runtime | None = None,
        images: ImageResolver | None = None,
        *,
        outlive: bool = False,
        daemon: int | None = None,
    ) -> None:
        """Take a runtime and images, or make those that the settings name.

        With `outlive`, and a runtime that can do it, the sandboxes do not end with this process:
        `start` goes on with what the process before has left, if there is anything; `daemon` is
        what its `leave` returned.
        """
        self._daemon = daemon
        self.settings = settings or NodeSettings.from_environment()
        self.id = new_node_id()
        self._outlive = outlive
        self._given = (runtime, images)
        self._opened: Works | None = None
        self._process = os.getpid()
        forks.own(self)

    # --- start, close -----------------------------------------------------------------

    async def start(self) -> None:
        """Take the lock, reap what dead nodes left, start the runtime.

        Raises:
            CapabilityError: the machine cannot run the runtime, or the home cannot be written.
            VersionMismatchError: what another process has left cannot be gone on with.
        """
        if self._opened is not None:
            return
        works = await open_works(
            self.settings, self._given, self.id, outlive=self._outlive, daemon=self._daemon
        )
        self.id = works.home.node_id
        self.runtime, self.images = works.runtime, works.images
        self._opened = works
        unclosed.opened(self, self.settings.home)

    async def leave(self) -> int | None:
        """Close and end nothing: another process goes on. Twice is fine.

        Where nothing can outlive this process, or there is nothing to be left, everything ends as
        by `close`. Else the lock that says that a process serves the node is returned, still held.
        """
        works = self._shut()
        return None if works is None else await works.leave()

    def _shut(self) -> Works | None:
        """Take no more calls; return what was open."""
        works, self._opened = self._opened, None
        unclosed.closed(self)
        return works

    def abandon(self) -> None:
        """See `forks.Owner`."""
        self._shut()

    async def close(self) -> CloseReport:
        """End every sandbox, whatever fails meanwhile, and say what could not be ended.

        Twice is fine.
        """
        works = self._shut()
        return CloseReport() if works is None else await works.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await (self.leave() if self._outlive else self.close())

    @property
    def _works(self) -> Works:
        """The parts. Raises ClientClosedError unless it is open, and this process's."""
        if self._opened is not None:  # a forked child has abandoned it
            return self._opened
        if self._process != os.getpid():
            raise ClientClosedError(
                f"this node belongs to process {self._process}; a forked process starts one of its "
                "own"
            )
        raise ClientClosedError("the node is closed, or was never started")

    # --- sandboxes --------------------------------------------------------------------

    async def create_sandbox(
        self,
        spec: SandboxSpec,
        *,
        operation_id: str | None = None,
        quota: Quota | None = None,
        presence: Presence | None = None,
    ) -> SandboxInfo:
        """Make a sandbox; return once it is ready.

        With an operation id the create goes on when the caller is cancelled, and asking again
        gives its answer. Without one nobody could ask, so it is undone. The label `owner` names
        whose turn it takes in the queue, and whose live sandboxes count for `quota`. Which is
        looked at in the moment before a new sandbox is recorded, so that it is exact however many
        ask at once; it refuses no answer that is there already. It ends with the client that
        `presence` names.

        Raises:
            ImageNotFoundError, NameInUseError, CapacityError, QuotaError, InvalidRequestError,
                CapabilityError, StorageFullError: refused; nothing was begun, nor counted.
            CreateError, StorageFullError: it failed and nothing of it is left.
            OperationMismatchError, OperationExpiredError: see `Operations`.
        """
        creates = self._works.creates
        if operation_id is None:
            return await creates.undone_with_its_caller(spec, quota, presence)
        return await creates.once(operation_id, spec, quota, presence)

    async def get(self, id_or_name: str) -> SandboxInfo:
        """Return what is known of a sandbox: by id also when it has ended, by name while live."""
        return self._find(id_or_name).info()

    async def list(
        self,
        labels: Mapping[str, str] | None = None,
        *,
        after: tuple[float, str] | None = None,
        limit: int | None = None,
    ) -> tuple[SandboxInfo, ...]:
        """Return the sandboxes that have not ended and carry all these labels, oldest first.

        Of those that were created after a moment and id, at most `limit`.
        """
        found: Iterable[Sandbox] = self._works.register.live(labels)
        if after is not None:
            found = (one for one in found if (one.created_at, one.id) > after)
        return tuple(one.info() for one in islice(found, limit))

    def specs(self, labels: Mapping[str, str]) -> Iterator[SandboxSpec]:
        """Yield what those were asked for that have not ended and carry all these labels."""
        return (one.spec for one in self._works.register.live(labels))

    def spec_of(self, id_or_name: str) -> SandboxSpec | None:
        """Return what was asked for under an id or name; None: it is not known."""
        try:
            return self._find(id_or_name).spec
        except SandboxNotFoundError:
            return None

    async def wait_for_state(
        self, id_or_name: str, states: Collection[SandboxState], timeout_s: float
    ) -> SandboxInfo:
        """Return once it is in one of these states, has ended, or after `timeout_s`."""
        sandbox = self._find(id_or_name)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while sandbox.state not in states and not sandbox.ended:
                    await sandbox.moved()
        return sandbox.info()

    async def delete(self, id_or_name: str, *, expected_version: int | None = None) -> SandboxInfo:
        """End a sandbox; return when nothing of it is left. One that has ended already is fine."""
        sandbox = self._find(id_or_name)
        if not sandbox.ended:
            sandbox.require_version(expected_version)
        await self._works.sandboxes.end(sandbox, expired=False)
        return sandbox.info()

    async def renew(
        self, id_or_name: str, ttl_s: float | None, *, expected_version: int | None = None
    ) -> SandboxInfo:
        """Let the lease end `ttl_s` from now; None: never.

        Raises:
            InvalidRequestError: `ttl_s` is not a positive number of seconds.
        """
        sandbox = self._find(id_or_name)
        sandbox.require_ready(expected_version)
        self._works.sandboxes.leases.renew(sandbox, ttl_s)
        return sandbox.info()

    def presences(self) -> Presences:
        """Return the clients that are there, and what ends with each."""
        return self._works.sandboxes.presences

    def _find(self, id_or_name: str) -> Sandbox:
        return self._works.register.find(id_or_name)

    # --- commands ---------------------------------------------------------------------

    async def exec(self, id_or_name: str, request: ExecRequest) -> ExecResult:
        """Run a command and return how it ended.

        It goes on when the caller is cancelled: ask again with the same operation id, or delete
        the sandbox.

        Raises:
            NotExecutedError and its kin: it was not started.
            CapacityError: too much is running or waiting.
            OperationMismatchError, OperationExpiredError: see `Operations`.
        """
        return await self._works.execs.begin(self._find(id_or_name), request).ended

    def begin_exec(
        self,
        id_or_name: str,
        request: ExecRequest,
        told: Callable[[ExecResult | BaseException], None],
    ) -> Callable[[], None]:
        """As `exec`; `told` gets how it ended, or what it failed with, as soon as it is known.

        Returns what to call when nobody wants to be told any more.
        """
        ended = self._works.execs.begin(self._find(id_or_name), request).ended

        def tell(known: Outcome[ExecResult]) -> None:
            told(known.exception() or known.result())

        ended.then(tell)
        return partial(ended.forget, tell)

    async def start_exec(self, id_or_name: str, request: ExecRequest) -> str:
        """Start a command; return its operation id once it runs. Raises as `exec`."""
        operation = self._works.execs.begin(self._find(id_or_name), request)
        await self._works.execs.until_started(operation)
        return operation.id

    async def wait_exec(self, operation_id: str) -> ExecResult:
        """Return how a command ended, once it has.

        Raises:
            OperationNotFoundError, OperationExpiredError: see `Operations`.
        """
        return await self._works.operations.get(operation_id).ended

    async def poll_exec(self, operation_id: str) -> ExecResult | None:
        """Return how a command ended, None while it runs. Raises as `wait_exec`."""
        ended = self._works.operations.get(operation_id).ended
        return ended.result() if ended.done() else None

    def exec_started(self, operation_id: str) -> bool:
        """Whether a command is known to run, or to have ended. Raises as `wait_exec`."""
        return self._works.operations.get(operation_id).started.done()

    async def read_output(
        self,
        operation_id: str,
        stream: Stream = "stdout",
        cursor: int = 0,
        max_bytes: int = 1 << 20,
        wait: bool = True,
    ) -> OutputChunk:
        """Return bytes of a stream from a cursor on; with `wait`, at least one byte or eof."""
        return await self._works.execs.read(operation_id, stream, cursor, max_bytes, wait)

    async def once(
        self, operation_id: str, asked: str, owner: str | None, act: Callable[[], Awaitable[Reply]]
    ) -> Reply:
        """Return the first answer to a change of this id. Raises as `Effects.once`."""
        effects = self._works.effects
        return await effects.once(operation_id, asked, owner, act, lost_reply())

    def under(self, operation_id: str) -> Any:
        """Return an `Under`: what makes changes for a caller in this process, once under an id.

        Asked for again it gives the first answer, error or not; `Effects.once` says what else.
        """
        return Under(self, self._works.effects, operation_id)

    async def write_stdin(self, operation_id: str, data: bytes) -> None:
        """Write to a command's stdin. Raises as `RunningExec.write_stdin`."""
        await self._works.execs.write_stdin(operation_id, data)

    async def close_stdin(self, operation_id: str) -> None:
        """Give a command end of file. Twice, or after its end, is fine."""
        await self._works.execs.close_stdin(operation_id)

    async def signal(
        self, operation_id: str, signum: int, scope: SignalScope = SignalScope.GROUP
    ) -> int:
        """Send a signal; return how many processes it reached (0: it had ended)."""
        return await self._works.execs.signal(operation_id, signum, scope)

    async def cancel_exec(self, operation_id: str) -> None:
        """Kill a command and all that it started; twice, or after its end, is fine.

        One that waits for its turn never runs.

        Raises:
            OperationNotFoundError, OperationExpiredError: see `Operations`.
            NotExecutedError and its kin: it was never started.
        """
        await self._works.execs.cancel(operation_id)

    async def resize(self, operation_id: str, rows: int, cols: int) -> None:
        """Set the size of a command's terminal."""
        await self._works.execs.resize(operation_id, rows, cols)

    async def mark(self, operation_id: str) -> tuple[int, int]:
        """Drain what is in the pipes now; return the totals of stdout and stderr."""
        return await self._works.execs.mark(operation_id)

    async def forget(self, operation_id: str) -> None:
        """Drop an ended command's kept output. Its result stays, what it left running goes on."""
        await self._works.execs.forget(operation_id)

    def sessions(self) -> Sessions:
        """Return the sessions of all sandboxes."""
        return self._works.sessions

    # --- what is inside ---------------------------------------------------------------

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

    # --- the node ---------------------------------------------------------------------

    def capabilities(self) -> Capabilities:
        """What the runtime has probed on this machine."""
        return self._works.runtime.capabilities()

    def keep(self, sandbox_id: str, /) -> None:
        """Nothing to do: what is on a node in the client's process ends with it all the same."""

    def load(self) -> Load:
        """How much there is of what, at this moment."""
        return self._works.sandboxes.load()

    async def resources(self) -> NodeResources:
        """What there is of everything, what sandboxes are limited to, and what is free."""
        load = self.load()
        return await asyncio.to_thread(
            machine.resources,
            self.settings.home,
            in_use(self.specs({})),
            most=self.settings.max_sandboxes,
            running=load.running,
            waiting=load.waiting,
        )

    async def ledger(self) -> Ledger:
        """Count every sandbox there ever was, and compare the kernel with those that live."""
        return await self._works.ledger()

    async def events(
        self,
        cursor: str | None = None,
        limit: int = 1000,
        wait: bool = False,
        *,
        owner: str | None = None,
        kind: EventKind = EventKind.STATE,
    ) -> EventPage:
        """Return events of a kind after a cursor, of all sandboxes or of those of one owner.

        None: where to begin, the cursor of this moment; `oldest`: all that is kept. With `wait`,
        once there is one.

        Raises:
            CursorExpiredError: what followed the cursor is kept no longer in whole.
        """
        return await self._works.register.events[kind].read(cursor, limit, owner=owner, wait=wait)

    async def list_images(self) -> tuple[ImageInfo, ...] | None:
        """Return the named images of the store; None: there is none, and any name will do."""
        return self._works.builder.list()

    async def build_image(self, name: str, context: Path, **options: Any) -> Image:
        """Build a Dockerfile into the node's store.

        Options: `dockerfile` (a path), `build_args`, `target`, and those of `images.build.build`,
        as are the errors.

        Raises:
            CapabilityError: the node's images are no store that can be built into.
        """
        return await self._works.builder.build(name, context, **options)

    async def build_image_from(
        self, name: str, archive: AsyncIterator[bytes], *, dockerfile: str, **options: Any
    ) -> Image:
        """As `build_image`; the context is a tar that is not trusted, `dockerfile` a name in it."""
        return await self._works.builder.build_from(name, archive, dockerfile=dockerfile, **options)

    async def run_step(self, step: BuildStep) -> StepResult:
        """See `RunStep`: run one build step in a sandbox of this node."""
        return await self._works.builder.run_step(step)

    @asynccontextmanager
    async def sandbox(self, spec: SandboxSpec) -> AsyncIterator[SandboxInfo]:
        """Make a sandbox for a block and delete it at the end."""
        info = await self.create_sandbox(spec)
        try:
            yield info
        finally:
            await self.delete(info.id)
