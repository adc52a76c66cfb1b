"""All sandboxes of a node: made in turn, leased, ended once, counted exactly."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Coroutine, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, overload

from coldframe.host.outcome import Undertaking
from coldframe.host.patience import wait_while_any_end
from coldframe.images.base import Image, ImageConfig
from coldframe.node.events import Events
from coldframe.node.execs import Execs
from coldframe.node.legacy import Legacy, read_sandbox
from coldframe.node.life import Sandbox
from coldframe.node.queueing import FairQueue
from coldframe.node.settings import NodeSettings
from coldframe.protocol.errors import (
    CapacityError,
    ColdframeError,
    CreateError,
    InvalidRequestError,
    NameInUseError,
    SandboxGoneError,
    SandboxNotFoundError,
    SandboxStateError,
)
from coldframe.protocol.ids import new_sandbox_id
from coldframe.protocol.models import (
    ImageHealthcheck,
    ImageStart,
    Ledger,
    SandboxInfo,
    SandboxSpec,
    SandboxState,
)
from coldframe.runtimes.base import Found, Gone, OffersIds, Runtime, SandboxHandle

T = TypeVar("T")
_RUNNING = frozenset({SandboxState.READY, SandboxState.PAUSED})
_NEVER_REFUSE = 1 << 62
_ENDS = ("deleted", "expired", "failed", "lost")
_EXPIRY_RETRY_S = 5.0
END_PATIENCE_S = 30.0
"""How long the close of a node waits while not one sandbox more has ended."""
_LONGEST_TTL_S = 10 * 365 * 86400.0


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

    states: Mapping[SandboxState, int]
    """Sandboxes that have not ended."""
    images: Mapping[str, int]
    """The same, by the image that they were asked for with."""
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


class _Ids(Sequence[str]):
    """The keys of some mappings, read anew whenever they are looked at."""

    def __init__(self, *sources: Mapping[str, Sandbox]) -> None:
        self._sources = sources

    def _now(self) -> list[str]:
        return [name for source in self._sources for name in source]

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        return self._now()[index]

    def __len__(self) -> int:
        return sum(len(source) for source in self._sources)


def _start(config: ImageConfig) -> ImageStart:
    check = config.healthcheck
    return ImageStart(
        entrypoint=config.entrypoint,
        cmd=config.cmd,
        healthcheck=None if check is None else ImageHealthcheck(**vars(check)),
    )


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
        """Count in `counts`: created, deleted, expired, failed, lost."""
        self._legacy = legacy
        legacy.find = self.find
        self._settings = settings
        self._node_id = node_id
        self._runtime = runtime
        self._offer_id = runtime.offer_id if isinstance(runtime, OffersIds) else _no_offer
        self._execs = execs
        self._creates = FairQueue("creates", settings.create_slots, settings.queue_limit)
        self._destroys = FairQueue("destroys", settings.create_slots, _NEVER_REFUSE)
        self._live: dict[str, Sandbox] = {}
        self._names: dict[str, Sandbox] = {}
        self._ended: OrderedDict[str, Sandbox] = OrderedDict()
        self._cleaning: dict[str, Sandbox] = {}
        """Lost or failed sandboxes that the runtime is still giving back."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._faults: list[str] = []
        self._counts = counts
        self.in_kernel: Sequence[str] = _Ids(self._live, self._cleaning)
        """Ids of which the kernel may rightly hold something, as they are at each look."""
        self.changes = 0
        """Raised whenever the set of what the kernel may hold changes."""
        self.events = Events(settings.event_count)
        """Every transition."""

    # --- looking up -------------------------------------------------------------------

    def find(self, id_or_name: str) -> Sandbox:
        """Return a sandbox by its id or the name of a live one.

        Raises:
            SandboxNotFoundError: none is known.
        """
        sandbox = (
            self._live.get(id_or_name) or self._names.get(id_or_name) or self._ended.get(id_or_name)
        )
        if sandbox is None:
            raise SandboxNotFoundError(f"no sandbox {id_or_name!r} on node {self._node_id!r}")
        return sandbox

    def live(self) -> list[Sandbox]:
        """All that have not ended, oldest first."""
        return list(self._live.values())

    @property
    def empty(self) -> bool:
        """Whether no sandbox is known, not even one that has ended."""
        return not (self._live or self._ended)

    def recent_ids(self) -> set[str]:
        """Ids of all sandboxes that are remembered."""
        return {*self._live, *self._ended}

    def count(self, leaks: tuple[str, ...]) -> Ledger:
        """The ledger at this moment."""
        return Ledger(**self._counts, live=len(self._live), leaked=len(leaks), leaks=leaks)

    def load(self) -> Load:
        """How much there is of what."""
        states = Counter(sandbox.state for sandbox in self._live.values())
        waiting = {
            "creates": self._creates.depth,
            "destroys": self._destroys.depth,
            "commands": self._execs.waiting,
        }
        full = self._full()
        reason = None if full is None else str(full)
        images = Counter(sandbox.spec.image for sandbox in self._live.values())
        known = itertools.chain(self._live.values(), self._ended.values())
        spools = sum(sandbox.spool_bytes for sandbox in known)
        running = self._execs.running
        return Load(states, images, dict(self._counts), running, waiting, reason, spools)

    def _full(self) -> CapacityError | None:
        if len(self._live) >= self._settings.max_sandboxes:
            return CapacityError(f"{len(self._live)} sandboxes are alive on this node already")
        if self._creates.depth >= self._settings.queue_limit:
            return CapacityError(f"{self._creates.depth} creates are waiting on this node already")
        return None

    # --- beginning --------------------------------------------------------------------

    def begin(self, spec: SandboxSpec, image: Image, *, operation_id: str | None = None) -> Sandbox:
        """Record a sandbox and start making it in its turn.

        Without an operation id it is nobody's until `claim`: another process would end it.

        Raises:
            NameInUseError, CapacityError: nothing was recorded.
        """
        if spec.name is not None and spec.name in self._names:
            raise NameInUseError(f"the name {spec.name!r} belongs to a live sandbox")
        full = self._full()
        if full is not None:
            self._let_go_of_one_kept()
            raise full
        sandbox = self._record(self._offer_id() or new_sandbox_id(self._node_id), spec, image)
        sandbox.operation_id, sandbox.claimed = operation_id, operation_id is not None
        if spec.ttl_s is not None:
            sandbox.expires_at = sandbox.created_at + spec.ttl_s
        self._live[sandbox.id] = sandbox
        if spec.name is not None:
            self._names[spec.name] = sandbox
        self._counts["created"] += 1
        self.changes += 1
        self._tell(sandbox)
        sandbox.creating = self._undertake(self._provision(sandbox, image))
        return sandbox

    def _tell(self, sandbox: Sandbox) -> None:
        self.events.add(
            sandbox.id,
            sandbox.state,
            sandbox.version,
            owner=sandbox.spec.labels.get("owner"),
            reason=sandbox.reason,
            trace_id=sandbox.trace_id,
        )

    def _record(self, sandbox_id: str, spec: SandboxSpec, image: Image) -> Sandbox:
        return Sandbox(
            id=sandbox_id,
            node_id=self._node_id,
            runtime=self._runtime.name,
            spec=spec,
            image_digest=image.digest,
            layer_digests=image.layers,
            image_start=_start(image.config),
            workdir=spec.workdir or image.config.workdir,
            tell=self._tell,
        )

    def claim(self, sandbox: Sandbox) -> None:
        """Somebody is told of it."""
        if not sandbox.claimed and not sandbox.ended:
            sandbox.claimed = True
            self._legacy.note(sandbox)

    async def made_or_undone(self, sandbox: Sandbox) -> SandboxInfo:
        """Wait for a sandbox; if the waiting is cancelled, nothing of it stays."""
        assert sandbox.creating is not None
        try:
            return await sandbox.creating
        except asyncio.CancelledError:
            if not sandbox.creating.cancelled():
                # Nobody knows its id, so nobody else could end it.
                await asyncio.shield(self._spawn(self.end(sandbox, expired=False)))
            raise

    async def _provision(self, sandbox: Sandbox, image: Image) -> SandboxInfo:
        making: Undertaking[SandboxHandle] | None = None
        sandbox.begun = True
        try:
            if sandbox.unwanted:
                raise asyncio.CancelledError
            sandbox.queued_s = await self._creates.acquire(sandbox.spec.labels.get("owner", ""))
            try:
                sandbox.move(SandboxState.PROVISIONING)
                making = self._undertake(self._runtime.create(sandbox.id, sandbox.spec, image))
                handle = await making
            finally:
                self._creates.release()
        except asyncio.CancelledError:
            await self._undo(sandbox, making)
            raise SandboxGoneError(
                f"sandbox {sandbox.id!r} was deleted before it was ready"
            ) from None
        except ColdframeError as error:
            self._finish(sandbox, SandboxState.FAILED, "failed", str(error))
            raise
        except Exception as error:
            self._finish(sandbox, SandboxState.FAILED, "failed", str(error))
            raise CreateError(f"sandbox {sandbox.id!r} could not be made: {error}") from error
        self._admit(sandbox, handle)
        return sandbox.info()

    def _admit(self, sandbox: Sandbox, handle: SandboxHandle) -> None:
        sandbox.handle = handle
        if sandbox.state is not SandboxState.READY:
            sandbox.move(SandboxState.READY)
            self._legacy.note(sandbox)
        handle.gone.add_done_callback(partial(self._on_gone, sandbox))
        self._arm(sandbox)

    async def _undo(self, sandbox: Sandbox, making: Undertaking[SandboxHandle] | None) -> None:
        """Take back a create that nobody wants any more."""
        self._cleaning[sandbox.id] = sandbox
        self._finish(sandbox, SandboxState.FAILED, "failed", "cancelled before it was ready")
        if making is not None:
            await self._spawn(self._give_back_unborn(sandbox, making))
        else:
            self._cleaned(sandbox)

    async def _give_back_unborn(self, sandbox: Sandbox, making: Undertaking[SandboxHandle]) -> None:
        await asyncio.wait([making.task])
        if making.exception() is not None:
            self._cleaned(sandbox)
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
                sandbox.ending = self._spawn(self._end(sandbox, expired))
            await asyncio.shield(sandbox.ending)
        if sandbox.ending is not None:
            await asyncio.shield(sandbox.ending)

    async def _end(self, sandbox: Sandbox, expired: bool) -> None:
        try:
            if sandbox.handle is None:
                await self._end_unborn(sandbox)
                return
            if sandbox.state is not SandboxState.TERMINATING:
                sandbox.move(SandboxState.TERMINATING)
                sandbox.expired = expired
                self._legacy.note(sandbox)
            self._disarm(sandbox)
            self._execs.refuse_waiting(sandbox)
            await self._destroy(sandbox, sandbox.handle)
            await self._execs.settle(sandbox)
            count = "expired" if sandbox.expired else "deleted"
            self._finish(sandbox, SandboxState.DELETED, count)
        finally:
            if not sandbox.ended:
                sandbox.ending = None

    async def _end_unborn(self, sandbox: Sandbox) -> None:
        creating = sandbox.creating
        if creating is not None:
            sandbox.unwanted = True
            if sandbox.begun:  # else it will see for itself: to cancel it now skips its body
                creating.task.cancel()
            await asyncio.wait([creating.task])

    async def _destroy(self, sandbox: Sandbox, handle: SandboxHandle) -> None:
        await self._destroys.acquire(sandbox.spec.labels.get("owner", ""))
        try:
            await handle.destroy()
        except ColdframeError:
            raise
        except Exception as error:
            raise SandboxStateError(
                f"sandbox {sandbox.id!r} could not be ended: {error}"
            ) from error
        finally:
            self._destroys.release()

    def _on_gone(self, sandbox: Sandbox, gone: asyncio.Future[Gone]) -> None:
        if gone.cancelled():
            return
        if sandbox.kept_until is not None:
            self._expire(sandbox)  # what could be read is gone
            return
        if sandbox.state not in _RUNNING:
            return
        self._cleaning[sandbox.id] = sandbox
        self._disarm(sandbox)
        handle = sandbox.handle
        self._finish(sandbox, SandboxState.LOST, "lost", gone.result().cause)
        self._execs.refuse_waiting(sandbox)
        assert handle is not None
        sandbox.ending = self._spawn(self._give_back(sandbox, handle))

    async def _give_back(self, sandbox: Sandbox, handle: SandboxHandle) -> None:
        """Return what the kernel still has of a sandbox that is already counted as ended."""
        try:
            await self._destroy(sandbox, handle)
        except ColdframeError as error:
            self._faults.append(str(error))  # the ledger shows what stayed
        await self._execs.settle(sandbox)
        self._cleaned(sandbox)

    def _cleaned(self, sandbox: Sandbox) -> None:
        self._cleaning.pop(sandbox.id, None)
        self.changes += 1

    def _finish(
        self, sandbox: Sandbox, state: SandboxState, count: str, reason: str | None = None
    ) -> None:
        """Move a sandbox to a final state and from the live to the ended."""
        sandbox.move(state, reason)
        sandbox.handle = None
        self._counts[count] += 1
        self.changes += 1
        del self._live[sandbox.id]
        if sandbox.spec.name is not None and self._names.get(sandbox.spec.name) is sandbox:
            del self._names[sandbox.spec.name]
        self._remember(sandbox)
        self._legacy.note(sandbox)

    def _remember(self, sandbox: Sandbox) -> None:
        self._ended[sandbox.id] = sandbox
        if len(self._ended) > self._settings.ended_count:
            self._legacy.drop_sandbox(self._ended.popitem(last=False)[1])

    # --- leases -----------------------------------------------------------------------

    def renew(self, sandbox: Sandbox, ttl_s: float | None) -> None:
        """Let the lease end `ttl_s` from now; None: never.

        Raises:
            InvalidRequestError: not a positive number, or more than ten years.
        """
        if ttl_s is not None and not (math.isfinite(ttl_s) and 0 < ttl_s <= _LONGEST_TTL_S):
            raise InvalidRequestError(f"ttl_s={ttl_s!r} is not above 0 and at most ten years")
        sandbox.expires_at = None if ttl_s is None else time.time() + ttl_s
        self._arm(sandbox)
        self._legacy.note(sandbox)

    def _arm(self, sandbox: Sandbox) -> None:
        self._disarm(sandbox)
        if sandbox.expires_at is not None:
            self._expire_at(sandbox, sandbox.expires_at)

    def _expire_at(self, sandbox: Sandbox, unix: float) -> None:
        loop = asyncio.get_running_loop()
        sandbox.lease = loop.call_later(max(0.0, unix - time.time()), self._expire, sandbox)

    def _disarm(self, sandbox: Sandbox) -> None:
        if sandbox.lease is not None:
            sandbox.lease.cancel()
            sandbox.lease = None

    def _expire(self, sandbox: Sandbox) -> None:
        if not sandbox.ended:
            self._spawn(self._end_expired(sandbox))

    async def _end_expired(self, sandbox: Sandbox) -> None:
        try:
            if self._settings.quarantine_s > 0 and sandbox.state in _RUNNING:
                await self._keep(sandbox)
            else:
                await self.end(sandbox, expired=True)
        except ColdframeError as error:
            self._faults.append(str(error))
            self._disarm(sandbox)
            loop = asyncio.get_running_loop()
            sandbox.lease = loop.call_later(_EXPIRY_RETRY_S, self._expire, sandbox)

    async def _keep(self, sandbox: Sandbox) -> None:
        """Stop what runs in a sandbox whose lease ended, and let it be read for a while."""
        window_s, handle = self._settings.quarantine_s, sandbox.handle
        assert handle is not None
        sandbox.expired = True
        sandbox.kept_until = time.time() + window_s
        sandbox.move(
            SandboxState.TERMINATING, f"its lease ended; it can be read for {window_s:g} s"
        )
        self._legacy.note(sandbox)
        self._execs.refuse_waiting(sandbox)
        self._expire_at(sandbox, sandbox.kept_until)
        with contextlib.suppress(SandboxGoneError):  # deleted meanwhile: nothing of it runs
            await handle.kill_processes(None)

    def _let_go_of_one_kept(self) -> None:
        """Those that are only there to be read make room, the oldest first."""
        kept = [s for s in self._live.values() if s.kept_until is not None and s.ending is None]
        if kept:
            self._expire(min(kept, key=lambda sandbox: sandbox.kept_until or 0.0))

    # --- from and to another process --------------------------------------------------

    def go_on(self, found: Found) -> None:
        """Have the sandboxes that another process has left.

        What it had begun and nothing is found of was never made, or was lost with what kept it.
        """
        counted = self._counts["created"] - sum(self._counts[name] for name in _ENDS)
        records = [
            (one, read_sandbox(one, self._record(one.id, one.spec, one.image)))
            for one in found.sandboxes
        ]
        unended = [(one, sandbox) for one, sandbox in records if not sandbox.ended]
        for sandbox in (sandbox for _, sandbox in records if sandbox.ended):
            self._remember(sandbox)
        surplus = len(unended) - counted
        for one, sandbox in unended:
            self._live[sandbox.id] = sandbox
            sandbox.tell = self._tell
            self._tell(sandbox)
            if sandbox.spec.name is not None:
                self._names[sandbox.spec.name] = sandbox
            if one.handle is not None:
                self._go_on_with(sandbox, one.handle)
                continue
            count = self._finish_found(sandbox, one.gone)
            if surplus > 0:  # it had counted the end already, and was killed in that moment
                self._counts[count] -= 1
                surplus -= 1
        if surplus < 0:
            self._counts["failed" if found.complete else "lost"] -= surplus

    def _go_on_with(self, sandbox: Sandbox, handle: SandboxHandle) -> None:
        if sandbox.state is SandboxState.TERMINATING:
            sandbox.handle = handle
            if sandbox.kept_until is None:
                self._spawn(self._end_found(sandbox, expired=sandbox.expired))
            else:
                handle.gone.add_done_callback(partial(self._on_gone, sandbox))
                self._expire_at(sandbox, sandbox.kept_until)
            return
        self._admit(sandbox, handle)
        if not sandbox.claimed:  # nobody knows its id
            self._spawn(self._end_found(sandbox, expired=False))

    async def _end_found(self, sandbox: Sandbox, *, expired: bool) -> None:
        try:
            await self.end(sandbox, expired=expired)
        except ColdframeError as error:
            self._faults.append(str(error))

    def _finish_found(self, sandbox: Sandbox, gone: Gone | None) -> str:
        """End the record of one that ended while there was no process; return what it counts as."""
        if sandbox.state is SandboxState.PROVISIONING:
            sandbox.move(SandboxState.READY)
        if sandbox.state is SandboxState.TERMINATING:
            count = "expired" if sandbox.expired else "deleted"
            self._finish(sandbox, SandboxState.DELETED, count)
            return count
        self._finish(sandbox, SandboxState.LOST, "lost", None if gone is None else gone.cause)
        return "lost"

    def leave(self) -> None:
        """Let nothing more happen by itself: another process goes on."""
        for sandbox in self._live.values():
            self._disarm(sandbox)

    # --- the end of all ---------------------------------------------------------------

    async def close(self) -> CloseReport:
        """End every sandbox and the runtime, whatever fails meanwhile, and report."""
        sandboxes = self.live()
        ends = {self._spawn(self.end(sandbox, expired=False)): sandbox for sandbox in sandboxes}
        left = await wait_while_any_end(ends, END_PATIENCE_S)
        failures = [
            f"sandbox {sandbox.id!r} did not end within {END_PATIENCE_S:g} s"
            if end in left
            else str(end.exception())
            for end, sandbox in ends.items()
            if end in left or end.exception() is not None
        ]
        for sandbox in self.live():
            self._disarm(sandbox)
        await self._settle()
        await self._execs.close()
        try:
            await self._runtime.close()
        except Exception as error:  # noqa: BLE001 (reported; the rest must still be given back)
            failures.append(f"runtime {self._runtime.name!r} could not be closed: {error}")
        await self._settle()  # the runtime has let go of what it could not end before
        return CloseReport(len(sandboxes) - len(self._live), (*self._faults, *failures))

    async def _settle(self) -> None:
        while self._tasks and not await wait_while_any_end(self._tasks, END_PATIENCE_S):
            pass

    def _spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run something that must come to its end whoever stops waiting for it."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_end)
        return task

    def _undertake(self, coroutine: Coroutine[Any, Any, T]) -> Undertaking[T]:
        """As `_spawn`, for what tasks wait for that may be cancelled."""
        undertaking = Undertaking(coroutine)
        self._tasks.add(undertaking.task)
        undertaking.task.add_done_callback(self._tasks.discard)
        return undertaking

    def _on_task_end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waits gets it; nobody need wait
