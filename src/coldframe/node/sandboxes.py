"""All sandboxes of a node: made in turn, leased, ended once, counted exactly."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial

from coldframe.host.outcome import Outcome, Undertaking
from coldframe.host.patience import wait_while_any_end
from coldframe.images.base import Image
from coldframe.node.background import Background
from coldframe.node.durations import Durations
from coldframe.node.execs import Execs
from coldframe.node.leases import Leases
from coldframe.node.legacy import Legacy
from coldframe.node.life import LEASE_ENDED, Sandbox
from coldframe.node.presences import Presence, Presences
from coldframe.node.queueing import FairQueue
from coldframe.node.register import Register
from coldframe.node.settings import NodeSettings
from coldframe.protocol.errors import (
    CapacityError,
    ColdframeError,
    CreateError,
    SandboxGoneError,
    SandboxStateError,
)
from coldframe.protocol.ids import new_sandbox_id
from coldframe.protocol.models import (
    SandboxInfo,
    SandboxSpec,
    SandboxState,
)
from coldframe.runtimes.base import (
    Gone,
    OffersIds,
    Runtime,
    SandboxHandle,
    TellsEgress,
    TellsStorage,
)
from coldframe.runtimes.outliving import Found

_NEVER_REFUSE = 1 << 62
DESTROY_HOLD_S = 1.0
"""How long an end holds its slot at most: what a sandbox makes the kernel undo may take minutes."""
END_PATIENCE_S = 30.0
"""How long the close of a node waits while not one sandbox more has ended."""


@dataclass(frozen=True)
class CloseReport:
    """What closing a node came to."""

    ended: int = 0
    """Sandboxes that were live and have been ended."""
    failures: tuple[str, ...] = ()
    """What could not be ended or given back, one sentence each."""


@dataclass(frozen=True)
class Load:
    """How much a node has of what."""

    live: Mapping[tuple[str, SandboxState], int]
    """Sandboxes that have not ended, by the image that they were asked for with, and state."""
    counts: Mapping[str, int]
    """As in the ledger: created, deleted, expired, failed, lost."""
    running: int
    """Commands that have not ended, those that wait included."""
    waiting: Mapping[str, int]
    """Depth of each queue: creates, destroys, commands."""
    full: str | None
    """Why no sandbox could be made now; None: nothing is in the way."""
    spool_bytes: int
    """What the kept output of commands counts for, while they run as much as they may keep."""
    took: Durations
    """Of commands that have ended, waited for or not, their wait included."""


def _no_offer() -> None:
    """A runtime that makes nothing ahead."""


class Sandboxes:
    """The records of all sandboxes, and every way in which one begins or ends."""

    def __init__(
        self,
        settings: NodeSettings,
        node_id: str,
        runtime: Runtime,
        execs: Execs,
        counts: MutableMapping[str, int],
        *,
        legacy: Legacy,
    ) -> None:
        """Count in `counts`; see `Register`."""
        self._settings = settings
        self._node_id = node_id
        self._runtime = runtime
        self._offer_id = runtime.offer_id if isinstance(runtime, OffersIds) else _no_offer
        self._execs, self._legacy = execs, legacy
        self._creates = FairQueue("creates", settings.create_slots, settings.queue_limit)
        self._destroys = FairQueue("destroys", settings.create_slots, _NEVER_REFUSE)
        self._background = Background()
        self.register = Register(settings, node_id, runtime.name, counts, legacy)
        self.leases = Leases(
            settings.quarantine_s, execs, legacy, self._background, partial(self.end, expired=True)
        )
        self.presences = Presences(self.register, self.leases, legacy, settings.return_s)

    def load(self) -> Load:
        """How much there is of what."""
        full = self._full()
        return Load(
            live=self.register.census(),
            counts=self.register.counts,
            running=self._execs.running,
            waiting={
                "creates": self._creates.depth,
                "destroys": self._destroys.depth,
                "commands": self._execs.waiting,
            },
            full=None if full is None else str(full),
            spool_bytes=sum(sandbox.spool_bytes for sandbox in self.register.known()),
            took=self._execs.took,
        )

    def _full(self) -> CapacityError | None:
        live = len(self.register)
        if live >= self._settings.max_sandboxes:
            return CapacityError(f"{live} sandboxes are alive on this node already")
        if self._creates.depth >= self._settings.queue_limit:
            return CapacityError(f"{self._creates.depth} creates are waiting on this node already")
        return None

    # --- beginning --------------------------------------------------------------------

    def begin(
        self,
        spec: SandboxSpec,
        image: Image,
        *,
        operation_id: str | None = None,
        presence: Presence | None = None,
    ) -> Sandbox:
        """Record a sandbox and start making it in its turn.

        Without an operation id it is nobody's until `claim`: another process would end it.

        Raises:
            NameInUseError, CapacityError, and what `Runtime.require` raises: it was refused, and
                counts for nothing.
        """
        self._runtime.require(spec, image)
        self.register.require_free(spec.name)
        full = self._full()
        if full is not None:
            self.leases.expire_one_kept(self.register.live())
            raise full
        sandbox_id = self._offer_id() or new_sandbox_id(self._node_id)
        sandbox = self.register.record(sandbox_id, spec, image)
        sandbox.operation_id, sandbox.claimed = operation_id, operation_id is not None
        if presence is not None:
            sandbox.presence, sandbox.process = presence.name, presence.process
        if spec.ttl_s is not None:
            sandbox.expires_at = sandbox.created_at + spec.ttl_s
        self.register.open(sandbox)
        if presence is not None:
            self.presences.begun(sandbox)
        # At once: so the queue's depth, which refuses, is exact however many ask in one moment.
        creating = self._background.undertake(self._provision(sandbox, image), at_once=True)
        sandbox.creating = creating
        creating.then(partial(_made, sandbox))
        return sandbox

    def claim(self, sandbox: Sandbox) -> None:
        """Somebody is told of it."""
        if not sandbox.claimed and not sandbox.ended:
            sandbox.claimed = True
            self._legacy.note(sandbox)

    async def made_or_undone(self, sandbox: Sandbox) -> SandboxInfo:
        """Wait for a sandbox; if the waiting is cancelled, nothing of it stays."""
        creating = sandbox.creating
        assert creating is not None
        try:
            return await creating
        except asyncio.CancelledError:
            if not creating.cancelled():
                # Nobody knows its id, so nobody else could end it.
                await asyncio.shield(self._background.spawn(self.end(sandbox, expired=False)))
            raise

    async def _provision(self, sandbox: Sandbox, image: Image) -> SandboxInfo:
        making: Undertaking[SandboxHandle] | None = None
        try:
            sandbox.queued_s = await self._creates.acquire(sandbox.owner or "")
            try:
                sandbox.move(SandboxState.PROVISIONING)
                making = self._background.undertake(
                    self._runtime.create(sandbox.id, sandbox.spec, image)
                )
                handle = await making
            finally:
                self._creates.release()
        except asyncio.CancelledError:
            await self._undo(sandbox, making)
            raise SandboxGoneError(
                f"sandbox {sandbox.id!r} was deleted before it was ready"
            ) from None
        except ColdframeError as error:
            self.register.finish(sandbox, SandboxState.FAILED, str(error))
            raise
        except Exception as error:
            self.register.finish(sandbox, SandboxState.FAILED, str(error))
            raise CreateError(f"sandbox {sandbox.id!r} could not be made: {error}") from error
        self._admit(sandbox, handle)
        return sandbox.info()

    def _admit(self, sandbox: Sandbox, handle: SandboxHandle) -> None:
        sandbox.handle = handle
        if sandbox.state is not SandboxState.READY:
            sandbox.move(SandboxState.READY)
            self._legacy.note(sandbox)
        handle.gone.add_done_callback(partial(self._on_gone, sandbox))
        if isinstance(handle, TellsEgress):
            handle.tell_egress(partial(self.register.tell_egress, sandbox))
        if isinstance(handle, TellsStorage):
            handle.tell_storage(partial(self.register.tell_storage, sandbox))
        self.leases.watch(sandbox)

    async def _undo(self, sandbox: Sandbox, making: Undertaking[SandboxHandle] | None) -> None:
        """Take back a create that nobody wants any more."""
        self.register.clean(sandbox)
        self.register.finish(sandbox, SandboxState.FAILED, "cancelled before it was ready")
        if making is not None:
            await self._background.spawn(self._give_back_unborn(sandbox, making))
        else:
            self.register.cleaned(sandbox)

    async def _give_back_unborn(self, sandbox: Sandbox, making: Undertaking[SandboxHandle]) -> None:
        await asyncio.wait([making.task])
        if making.exception() is not None:
            self.register.cleaned(sandbox)
        else:
            await self._give_back(sandbox, making.result())

    # --- ending -----------------------------------------------------------------------

    async def end(self, sandbox: Sandbox, *, expired: bool) -> None:
        """End a sandbox and return when nothing of it is left. Any number of callers.

        Raises:
            ColdframeError: the runtime could not; it can be tried again.
        """
        while not sandbox.ended:
            if sandbox.ending is None:
                self._begin_end(sandbox, expired=expired)
                sandbox.ending = self._background.spawn(self._end(sandbox))
            await asyncio.shield(sandbox.ending)
        if sandbox.ending is not None:
            await asyncio.shield(sandbox.ending)

    def _begin_end(self, sandbox: Sandbox, *, expired: bool) -> None:
        """In the moment that it is asked for: what is told after that it goes on is wrong."""
        if sandbox.running:
            reason = (sandbox.reason or LEASE_ENDED) if expired else None
            sandbox.move(SandboxState.TERMINATING, reason)
            sandbox.expired = expired
            self._legacy.note(sandbox)

    async def _end(self, sandbox: Sandbox) -> None:
        try:
            if sandbox.handle is None:
                await self._end_unborn(sandbox)
                return
            self.leases.let_be(sandbox)
            self._execs.refuse_waiting(sandbox)
            await self._destroy(sandbox, sandbox.handle)
            await self._execs.settle(sandbox)
            self.register.finish(sandbox, SandboxState.DELETED)
            self._background.mended(sandbox.id)
        finally:
            sandbox.ending = None

    async def _end_unborn(self, sandbox: Sandbox) -> None:
        creating = sandbox.creating
        if creating is not None:
            creating.task.cancel()
            await asyncio.wait([creating.task])

    async def _destroy(self, sandbox: Sandbox, handle: SandboxHandle) -> None:
        await self._destroys.acquire(sandbox.owner or "")
        loop = asyncio.get_running_loop()
        giving_back = loop.call_later(DESTROY_HOLD_S, self._destroys.release)
        try:
            await handle.destroy()
        except ColdframeError:
            raise
        except Exception as error:
            raise SandboxStateError(
                f"sandbox {sandbox.id!r} could not be ended: {error}"
            ) from error
        finally:
            if loop.time() < giving_back.when():  # else it has been done, or is about to be
                giving_back.cancel()
                self._destroys.release()

    def _on_gone(self, sandbox: Sandbox, gone: asyncio.Future[Gone]) -> None:
        if gone.cancelled():
            return
        if sandbox.kept_until is not None:
            self.leases.expire(sandbox)  # what could be read is gone
            return
        if not sandbox.running:
            return
        self.register.clean(sandbox)
        self.leases.let_be(sandbox)
        handle = sandbox.handle
        self.register.finish(sandbox, SandboxState.LOST, gone.result().cause)
        self._execs.refuse_waiting(sandbox)
        assert handle is not None
        sandbox.ending = self._background.spawn(self._give_back(sandbox, handle))

    async def _give_back(self, sandbox: Sandbox, handle: SandboxHandle) -> None:
        """Return what the kernel still has of a sandbox that is already counted as ended."""
        try:
            await self._destroy(sandbox, handle)
        except ColdframeError as error:
            self._background.note_fault(sandbox.id, error)  # the ledger shows what stayed
        await self._execs.settle(sandbox)
        self.register.cleaned(sandbox)
        sandbox.ending = None

    # --- from and to another process --------------------------------------------------

    def go_on(self, found: Found) -> None:
        """Have the sandboxes that another process has left."""
        for sandbox, handle in self.register.go_on(found):
            self._go_on_with(sandbox, handle)
        self.presences.go_on()

    def _go_on_with(self, sandbox: Sandbox, handle: SandboxHandle) -> None:
        if sandbox.state is SandboxState.TERMINATING:
            sandbox.handle = handle
            if sandbox.kept_until is None:
                self._background.spawn(self._end_found(sandbox, expired=sandbox.expired))
            else:
                handle.gone.add_done_callback(partial(self._on_gone, sandbox))
                self.leases.watch(sandbox)
            return
        self._admit(sandbox, handle)
        if not sandbox.claimed:  # nobody knows its id
            self._background.spawn(self._end_found(sandbox, expired=False))

    async def _end_found(self, sandbox: Sandbox, *, expired: bool) -> None:
        try:
            await self.end(sandbox, expired=expired)
        except ColdframeError as error:
            self._background.note_fault(sandbox.id, error)

    def leave(self) -> None:
        """Let nothing more happen by itself: another process goes on."""
        self.presences.leave()
        for sandbox in self.register.live():
            self.leases.let_be(sandbox)

    # --- the end of all ---------------------------------------------------------------

    async def close(self) -> CloseReport:
        """End every sandbox and the runtime, whatever fails meanwhile, and report."""
        background, before = self._background, self.register.live()
        ends = {background.spawn(self.end(one, expired=False)): one for one in before}
        left = await wait_while_any_end(ends, END_PATIENCE_S)
        failures = [
            f"sandbox {sandbox.id!r} did not end within {END_PATIENCE_S:g} s"
            if end in left
            else str(end.exception())
            for end, sandbox in ends.items()
            if end in left or end.exception() is not None
        ]
        self.leave()
        await background.settle(END_PATIENCE_S)
        await self._execs.close()
        try:
            await self._runtime.close()
        except Exception as error:  # noqa: BLE001 (reported; the rest must still be given back)
            failures.append(f"runtime {self._runtime.name!r} could not be closed: {error}")
        # The runtime has let go of what it could not end before.
        await background.settle(END_PATIENCE_S)
        ended = len(before) - len(self.register)
        return CloseReport(ended, (*background.faults.values(), *failures))


def _made(sandbox: Sandbox, _: Outcome[SandboxInfo]) -> None:
    """What led to a sandbox is not kept with it."""
    sandbox.creating = None
