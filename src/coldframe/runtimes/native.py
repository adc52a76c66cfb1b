"""The native runtime: sandboxes of namespaces, made and driven by the spawner in C.

One `NativeRuntime` belongs to one event loop and owns its node's directory, cgroups, uppers and
spawner. What is left when it is killed is found and reaped by `coldframe.host.gc`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coldframe.host import census, forks, gc
from coldframe.host.blanks import Blanks
from coldframe.host.egress.resolver import Resolve
from coldframe.host.outcome import Undertaking
from coldframe.host.patience import wait_while_any_end
from coldframe.host.spawner import SandboxGone
from coldframe.host.wire import VERSION
from coldframe.images.base import Image
from coldframe.protocol.errors import (
    CapabilityError,
    ClientClosedError,
    ColdframeError,
    CreateError,
    InvalidRequestError,
)
from coldframe.protocol.models import Capabilities, SandboxSpec
from coldframe.runtimes import native_takeover
from coldframe.runtimes.native_disk import DiskWatch
from coldframe.runtimes.native_ground import Ground
from coldframe.runtimes.native_guard import GuardSlots
from coldframe.runtimes.native_keeping import Keeping
from coldframe.runtimes.native_maker import Maker
from coldframe.runtimes.native_parts import Parts
from coldframe.runtimes.native_resume import Resumption
from coldframe.runtimes.native_sandbox import NativeSandbox
from coldframe.runtimes.native_spawners import Spawners
from coldframe.runtimes.outliving import Found, Keeps, Notes

_LEAK_GRACE_S = 3.0
_LEAK_POLL_S = 0.02
_END_PATIENCE_S = 30.0
_BLANKS_PER_WORKER = 2
_SPAWNER_LOST = "spawner lost"


class NativeRuntime:
    """See `Runtime`. Needs root."""

    def __init__(
        self,
        node_id: str,
        layers: Path,
        state: Path,
        *,
        storage: str = "auto",
        workers: int = 2,
        pools: Path | None = None,
        pool_bytes: int | None = None,
        binary: Path | None = None,
        resolve: Resolve | None = None,
    ) -> None:
        """Nothing is touched before `start`.

        Args:
            node_id: names its sandboxes' ids and cgroups.
            layers: the image store's directory of layers.
            state: the node's directory, `<home>/nodes/<node id>`; its `lock` says that we live.
            storage: auto, btrfs, directory or tmpfs.
            workers: spawner processes.
            pools: where a pool of uppers takes its space; None: `<home>/pools`.
            pool_bytes: how much it may take; None: four fifths of what is free.
            binary: the native program; None: the package's own.
            resolve: how names are resolved for sandboxes; None: as the host does.
        """
        self._ground = Ground(
            node_id,
            layers,
            state,
            storage=storage,
            pools=pools,
            pool_bytes=pool_bytes,
            resolve=resolve,
        )
        self._workers, self._binary = workers, binary
        self._sandboxes: dict[str, NativeSandbox] = {}
        self._early: dict[str, str] = {}
        """Why each of those that are being made has ended, should it have."""
        self._making: set[asyncio.Future[Any]] = set()
        """Creates, and what goes on behind them: to be waited for at the end."""
        self._refilling: asyncio.Future[None] | None = None
        self._spawners: Spawners
        self._blanks: Blanks
        self._maker: Maker
        self._disk: DiskWatch
        self._guards = GuardSlots()
        self._keeping: Keeping | None = None
        self.found = Found()
        """See `Outlives.found`."""
        self._open = self._abandoned = False
        forks.own(self)
        self.leak_grace_s = _LEAK_GRACE_S
        """How long `leaks` lets the kernel take down what it is taking down."""
        self.end_patience_s = _END_PATIENCE_S
        """How long `close` waits while not one sandbox more has ended, before it kills workers."""

    @property
    def name(self) -> str:
        """`native`."""
        return "native"

    @property
    def node_id(self) -> str:
        """The node that its sandboxes' ids name."""
        return self._ground.node_id

    # --- start, close -----------------------------------------------------------------

    async def start(self) -> None:
        """See `Runtime.start`."""
        if self._open:
            return
        if os.geteuid() != 0:
            raise CapabilityError("the native runtime needs root: run it with `sudo`")
        await asyncio.to_thread(gc.reap_dead_nodes, self._ground.home)
        going_on = self._keeping is not None and self._keeping.lock is None
        self._spawners = Spawners(
            self._ground,
            self._workers,
            self._binary,
            self._keeping,
            gone=self._sandbox_gone,
            lost=self._worker_lost,
        )
        try:
            await self._begin()
        except BaseException:
            if going_on:
                # What is there is another's again: nothing of it may be taken down.
                await self._spawners.leave()
                self._ground.keep_all()
                raise
            await self._spawners.close(self.end_patience_s)
            await asyncio.to_thread(self._ground.give_back)
            raise
        self._open = True
        self._disk = DiskWatch(self._ground.storage, self._sandboxes, self._spawners.keep_anew)
        forks.own_loop(asyncio.get_running_loop())
        self._refill_spares()
        self._blanks.create_noted()

    async def _begin(self) -> None:
        ground, keeping, spawners = self._ground, self._keeping, self._spawners
        left = None
        if keeping is not None and keeping.lock is None:
            left = await spawners.take_over()
            keeping.lock = left.lock
        await ground.take(left, locked=keeping is not None)
        self._blanks = Blanks(
            ground.node_id,
            ground.ids,
            spawners.idle,
            ground.reap_cgroups,
            self._workers * _BLANKS_PER_WORKER,
        )
        self._maker = Maker(ground, spawners, self._blanks, keeping)
        if keeping is not None:
            keeping.storage = ground.storage
            ground.ids.on_block = spawners.keep_block
        if left is None or keeping is None:
            await spawners.start()
            return
        resumption = Resumption(spawners.newest, ground, self._maker, keeping, self._enter)
        self.found = await resumption.go_on(left)
        spawners.keep_node(spawners.newest)

    # --- outliving this process -------------------------------------------------------

    def outlive(self, notes: Notes, lock: int | None, grace_s: float) -> Keeps:
        """See `Outlives.outlive`."""
        self._keeping = Keeping(notes, lock, grace_s)
        return self._keeping

    def lock(self) -> int:
        """See `Outlives.lock`."""
        assert self._keeping is not None and self._keeping.lock is not None
        return self._keeping.lock

    async def leave(self) -> None:
        """See `Outlives.leave`."""
        if not self._open:
            return
        self._open = False
        self._blanks.abandon()
        await self._disk.stop()
        await wait_while_any_end(self._making, self.end_patience_s)
        await self._spawners.leave()
        for sandbox in self._sandboxes.values():
            await sandbox.parts.egress.close()
            sandbox.parts.files.close()
        self._ground.leave()

    async def close(self) -> None:
        """See `Runtime.close`."""
        if not self._open:
            return
        self._open = False
        await self.destroy_all()
        blanks = asyncio.ensure_future(self._blanks.close())
        await wait_while_any_end([blanks], self.end_patience_s)
        await self._spawners.close(self.end_patience_s)
        await wait_while_any_end([blanks], self.end_patience_s)
        await self._end_all()  # those that a worker never answered for went with it
        await self._disk.stop()
        await self._ground.storage.clear(self._maker.remove_tree)
        self._ground.network.close()
        await asyncio.to_thread(self._ground.give_back)

    def abandon(self) -> None:
        """See `forks.Owner`: the sandboxes are the parent's."""
        self._open, self._abandoned = False, True
        self._ground.release_lock()

    async def destroy_all(self) -> None:
        """End every sandbox, those that are being made too."""
        await wait_while_any_end(self._making, self.end_patience_s)
        await self._end_all()

    async def _end_all(self) -> None:
        ends = [asyncio.ensure_future(one.destroy()) for one in list(self._sandboxes.values())]
        for end in ends:
            end.add_done_callback(_note)
        await wait_while_any_end(ends, self.end_patience_s)

    def capabilities(self) -> Capabilities:
        """See `Runtime.capabilities`."""
        ground = self._ground
        disk = {"disk"} if ground.storage.enforces_disk else set()
        return Capabilities(
            runtime=self.name,
            isolation=True,
            limits=ground.cgroups.limits | disk,
            pty=True,
            ports=True,
            users=True,
            egress=ground.no_egress is None,
            guards=ground.no_guards is None,
            storage=ground.storage.name,
            details={
                "storage_fallback": ground.storage.fallback_from,
                "workers": self._workers,
                "network": ground.no_egress or "loopback, and what a policy allows",
                "spawner_protocol": VERSION,
                "injected_binary_sha256": self._spawners.newest.program_sha256,
            },
        )

    # --- create -----------------------------------------------------------------------

    def offer_id(self) -> str | None:
        """See `OffersIds.offer_id`."""
        return self._blanks.offer() if self._open else None

    def require(self, spec: SandboxSpec, image: Image) -> None:
        """See `Runtime.require`."""
        self._require_own()
        self._maker.require(spec, image)

    async def create(self, sandbox_id: str, spec: SandboxSpec, image: Image) -> NativeSandbox:
        """See `Runtime.create`."""
        self._require_own()  # first: a child of fork would be told that its parent's never began
        if not self._open:
            raise CreateError("the native runtime has not been started")
        self._maker.require(spec, image)
        if sandbox_id in self._sandboxes:
            raise InvalidRequestError(f"sandbox {sandbox_id!r} exists")
        making = Undertaking(self._create(sandbox_id, spec, image))
        self._await_at_end(making.task)
        try:
            return await making
        except asyncio.CancelledError:
            # It cannot be stopped halfway: end it as soon as it is there.
            self._await_at_end(asyncio.ensure_future(_end_unwanted(making)))
            raise

    def _await_at_end(self, making: asyncio.Future[Any]) -> None:
        self._making.add(making)
        making.add_done_callback(self._making.discard)

    async def _create(self, sandbox_id: str, spec: SandboxSpec, image: Image) -> NativeSandbox:
        self._early[sandbox_id] = _SPAWNER_LOST
        try:
            sandbox = self._enter(spec, await self._maker.make(sandbox_id, spec, image))
            if sandbox.parts.ended:
                sandbox.note_gone(self._early[sandbox_id])
        finally:
            self._early.pop(sandbox_id, None)
        self._refill_spares()
        self._blanks.create_noted()
        if not spec.network.empty:
            try:
                await sandbox.set_network(spec.network)
            except BaseException:
                await sandbox.destroy()
                raise
        return sandbox

    def _enter(self, spec: SandboxSpec, parts: Parts) -> NativeSandbox:
        sandbox = NativeSandbox(spec, parts, self._guards, self._end)
        self._sandboxes[sandbox.id] = sandbox
        return sandbox

    def _refill_spares(self) -> None:
        idle = self._refilling is None or self._refilling.done()
        if idle and self._open and self._ground.storage.low:
            refill = self._ground.in_thread(self._ground.storage.refill)
            self._refilling = asyncio.ensure_future(refill)
            self._await_at_end(self._refilling)

    # --- end --------------------------------------------------------------------------

    def _require_own(self) -> None:
        if self._abandoned:
            raise ClientClosedError(
                "this runtime is the parent's; a forked process starts one of its own"
            )

    async def _end(self, sandbox: NativeSandbox) -> None:
        self._require_own()
        await self._maker.take_down(sandbox.parts)
        self._sandboxes.pop(sandbox.id, None)
        self._ground.ids.give_back(sandbox.parts.id_base)

    def _sandbox_gone(self, event: SandboxGone) -> None:
        self._blanks.lose([event.sandbox_id])
        self._note_gone(event.sandbox_id, native_takeover.gone_cause(event.cause, event.code))

    def _worker_lost(self, sandbox_ids: Sequence[str]) -> None:
        self._blanks.lose(sandbox_ids)
        for sandbox_id in sandbox_ids:
            self._note_gone(sandbox_id, _SPAWNER_LOST)

    def _note_gone(self, sandbox_id: str, cause: str) -> None:
        sandbox = self._sandboxes.get(sandbox_id)
        if sandbox is not None:
            sandbox.note_gone(cause)
        elif sandbox_id in self._early:
            self._early[sandbox_id] = cause

    # --- leaks ------------------------------------------------------------------------

    async def leaks(self, live: Sequence[str]) -> tuple[str, ...]:
        """See `Runtime.leaks`. What the kernel is still taking down gets a grace."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.leak_grace_s
        while True:
            found = await asyncio.to_thread(census.strays, self._scope(live))
            if not found or loop.time() >= deadline:
                return found
            await asyncio.sleep(_LEAK_POLL_S)

    def _scope(self, live: Sequence[str]) -> census.Scope:
        alive = [self._sandboxes[name] for name in live if name in self._sandboxes]
        blanks = self._blanks.there
        namespaces = (number for one in alive for number in one.parts.created.namespaces.values())
        ground = self._ground
        return census.Scope(
            ground.node_id,
            ground.state,
            cgroup_bases=tuple(ground.cgroups.paths.values()),
            processes=self._spawners.pids,
            live=frozenset(live) | {blank.sandbox_id for blank in blanks},
            live_ids=frozenset(one.parts.id_base for one in alive)
            | {blank.id_base for blank in blanks},
            own_ids=ground.ids.all,
            live_namespaces=frozenset(namespaces),
            uppers=ground.storage.names() if self._open else (),
            alive=self._open,
        )


async def _end_unwanted(making: Undertaking[NativeSandbox]) -> None:
    """Destroy a sandbox whose creator was cancelled, if it comes to be at all."""
    with contextlib.suppress(ColdframeError):
        await (await making).destroy()


def _note(end: asyncio.Future[None]) -> None:
    if not end.cancelled():
        end.exception()  # what is left shows in the ledger, and is reaped by the next node
