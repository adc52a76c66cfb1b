"""What an open node consists of: begun or gone on with, then closed or left to the next."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from coldframe.node.assembly import ImageResolver, assemble
from coldframe.node.build import Builder, SandboxSteps
from coldframe.node.creates import Creates
from coldframe.node.effects import Effects
from coldframe.node.execs import Execs
from coldframe.node.expired import ExpiredIds
from coldframe.node.home import NodeHome
from coldframe.node.legacy import Legacy
from coldframe.node.operations import Operations
from coldframe.node.register import Register
from coldframe.node.sandboxes import CloseReport, Sandboxes
from coldframe.node.sessions import Sessions
from coldframe.node.settings import NodeSettings
from coldframe.protocol.errors import SandboxNotFoundError
from coldframe.protocol.models import Ledger
from coldframe.runtimes.base import Runtime
from coldframe.runtimes.outliving import Found, NothingFoundError, Outlives

_LEDGER_SCANS = 2
Given = tuple[Runtime | None, ImageResolver | None]
"""What a node need not make itself."""


@dataclass(frozen=True)
class Works:
    """The parts of one open node."""

    home: NodeHome
    legacy: Legacy
    runtime: Runtime
    images: ImageResolver
    stores: ExitStack
    outlives: Outlives | None
    """The runtime, where what it holds does not end with this process."""
    expired: ExpiredIds
    operations: Operations
    execs: Execs
    sandboxes: Sandboxes
    sessions: Sessions
    creates: Creates
    effects: Effects
    builder: Builder

    @property
    def register(self) -> Register:
        """Which sandboxes there are."""
        return self.sandboxes.register

    @property
    def idle(self) -> bool:
        """Whether no sandbox and no operation is known, not even one that has ended."""
        return not any(self.register.known()) and not len(self.operations)

    async def ledger(self) -> Ledger:
        """See `Node.ledger`."""
        register = self.register
        for _ in range(_LEDGER_SCANS):
            changes = register.changes
            leaks = await self.runtime.leaks(register.in_kernel)
            if not leaks or changes == register.changes:
                break
        else:
            # Sandboxes never stopped coming and going: what names one of them is no stray.
            names = {sandbox.id for sandbox in register.known()}
            leaks = tuple(leak for leak in leaks if not any(name in leak for name in names))
        return register.ledger(leaks)

    async def close(self) -> CloseReport:
        """End every sandbox, whatever fails meanwhile, and give all back."""
        try:
            return await self.sandboxes.close()
        finally:
            self._close_stores()
            self.home.release()

    async def leave(self) -> int | None:
        """End nothing; return the lock that says that a process serves the node. See `Node`."""
        if self.outlives is None or self.idle:
            await self.close()
            return None
        self.sandboxes.leave()
        try:
            await self.outlives.leave()
        finally:
            self._close_stores()
            daemon = self.home.leave()
        return daemon

    def _close_stores(self) -> None:
        self.stores.close()
        self.expired.close()
        self.effects.close()

    def go_on(self, found: Found) -> None:
        """Have the records again that another process had."""
        self.sandboxes.go_on(found)
        for one in found.sandboxes:
            sandbox = self.register.find(one.id)
            if one.handle is not None and not one.spec.network.empty:
                self.legacy.note(sandbox)
            if sandbox.operation_id is not None and not self.operations.is_over(
                sandbox.operation_id
            ):
                self.operations.go_on_create(sandbox)
        for command in found.execs:
            try:
                sandbox = self.register.find(command.sandbox_id)
            except SandboxNotFoundError:
                self.operations.refuse(command.operation_id, None)
            if self.operations.is_over(command.operation_id):
                self.legacy.drop_exec(command.operation_id)
            else:
                self.execs.go_on(command, sandbox)
                if command.more is not None:
                    self.sessions.go_on(command.operation_id, command.more)


async def open_works(
    settings: NodeSettings, given: Given, node_id: str, *, outlive: bool, daemon: int | None
) -> Works:
    """Go on with the node that another process has left, or begin the one of this id.

    Args:
        settings: of the node.
        given: what is not to be made.
        node_id: for a new node.
        outlive: whether sandboxes live on after this process; only then is looked for others'.
        daemon: what `Works.leave` returned to the process before.
    Raises:
        CapabilityError: the machine cannot run the runtime, or the home cannot be written.
        VersionMismatchError: what another process has left cannot be gone on with.
    """
    if outlive:
        for home in NodeHome.left(settings.home, daemon):
            with contextlib.suppress(NothingFoundError):
                return await _start(settings, given, home, outlive=True, left=True)
    home = NodeHome(settings.home, node_id, daemon=outlive)
    return await _start(settings, given, home, outlive=outlive, left=False)


async def _start(
    settings: NodeSettings, given: Given, home: NodeHome, *, outlive: bool, left: bool
) -> Works:
    legacy = Legacy()
    with _held(home, left=left), ExitStack() as undo:
        runtime, images = assemble(settings, home.node_id, *given, undo)
        outlives = runtime if outlive and isinstance(runtime, Outlives) else None
        if outlives is not None:
            lock = None if left else home.lock
            legacy.keeps = outlives.outlive(legacy, lock, settings.grace_s)
        elif left:
            raise NothingFoundError
        await runtime.start()
        stores = undo.pop_all()
    found = Found() if outlives is None else outlives.found
    if left and outlives is not None:
        home.go_on(outlives.lock())
    expired = home.open_expired(settings.expired_ids)
    operations = Operations(settings, expired, legacy)
    execs = Execs(settings, operations)
    sandboxes = Sandboxes(settings, home.node_id, runtime, execs, home.counts, legacy=legacy)
    sessions = Sessions(sandboxes.register.find, execs, operations, legacy)
    steps = SandboxSteps(
        begin=sandboxes.begin,
        ready=sandboxes.made_or_undone,
        run=lambda sandbox, request: execs.begin(sandbox, request).ended,
        end=partial(sandboxes.end, expired=False),
    )
    works = Works(
        *(home, legacy, runtime, images, stores, outlives),
        *(expired, operations, execs, sandboxes, sessions),
        Creates(images, sandboxes, operations),
        Effects(operations, home.effects),
        Builder(images, runtime.name, steps),
    )
    works.go_on(found)
    return works


@contextlib.contextmanager
def _held(home: NodeHome, *, left: bool) -> Iterator[None]:
    """Hold a home from now on, unless what is done with it fails."""
    if not left:
        home.acquire()
    try:
        yield
    except BaseException:
        if left:
            home.let_go()
        else:
            home.release()
        raise
