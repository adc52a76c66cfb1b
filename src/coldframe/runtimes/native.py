"""The native runtime: sandboxes of namespaces, made and driven by the spawner in C.

One `NativeRuntime` belongs to one event loop and owns its node's directory, cgroups, uppers and
spawner. What is left when it is killed is found and reaped by `coldframe.host.gc`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coldframe.host import census, forks, gc
from coldframe.host.blanks import Blanks
from coldframe.host.egress.resolver import Resolve
from coldframe.host.outcome import Undertaking
from coldframe.host.patience import wait_while_any_end
from coldframe.host.spawner import (
    SandboxGone,
    Spawner,
    SpawnerConfig,
)
from coldframe.host.storage import Storage
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
from coldframe.runtimes.native_ground import Ground
from coldframe.runtimes.native_keeping import Keeping
from coldframe.runtimes.native_maker import Maker
from coldframe.runtimes.native_resume import Resumption
from coldframe.runtimes.native_sandbox import NativeSandbox, Parts
from coldframe.runtimes.native_spawners import Spawners
from coldframe.runtimes.native_takeover import Left
from coldframe.runtimes.outliving import Found, Notes, NothingFoundError

_LEAK_GRACE_S = 3.0
_LEAK_POLL_S = 0.02
_END_PATIENCE_S = 30.0
_BLANKS_PER_WORKER = 2


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
        self._making: set[asyncio.Future[Any]] = set()
        self._refilling = False
        self._spawners = Spawners(
            workers,
            lambda count: self._new_spawner(count, self._ground.cgroups.paths),
            self._keep_node,
        )
        self._blanks: Blanks
        self._maker: Maker
        self._node_lock: int | None = None
        """The node's, which is not ours to close; see `Outlives`."""
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

    @property
    def steps(self) -> tuple[str, ...]:
        """Where `inject` can make a create fail."""
        return self._spawners.newest.steps

    @property
    def inject(self) -> str | None:
        """The step of `steps` at which the next create fails; tests only."""
        return self._maker.inject

    @inject.setter
    def inject(self, step: str | None) -> None:
        self._maker.inject = step

    @property
    def storage(self) -> Storage:
        """Where its uppers live."""
        return self._ground.storage

    @property
    def id_ranges(self) -> frozenset[int]:
        """First host ids of all ranges that are this node's to give out."""
        return self._ground.ids.all

    def lock(self) -> int:
        """See `Outlives.lock`."""
        assert self._node_lock is not None
        return self._node_lock

    @property
    def spawner(self) -> Spawner:
        """The spawner that was started last."""
        return self._spawners.newest

    # --- start, close -----------------------------------------------------------------

    async def start(self) -> None:
        """See `Runtime.start`."""
        if self._open:
            return
        if os.geteuid() != 0:
            raise CapabilityError("the native runtime needs root: run it with `sudo`")
        await asyncio.to_thread(gc.reap_dead_nodes, self._ground.home)
        going_on = self._keeping is not None and self._node_lock is None
        try:
            await self._begin(await self._find() if going_on else None)
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
        forks.own_loop(asyncio.get_running_loop())
        self._refill_spares()
        self._blanks.create_noted()

    async def _begin(self, left: Left | None) -> None:
        ground, keeping = self._ground, self._keeping
        await ground.take(left, locked=self._node_lock is not None)
        self._blanks = Blanks(
            ground.node_id,
            ground.ids,
            self._spawners.idle,
            ground.reap_cgroups,
            self._workers * _BLANKS_PER_WORKER,
        )
        self._maker = Maker(ground, self._spawners, self._blanks, keeping)
        if keeping is not None:
            keeping.storage = ground.storage
            ground.ids.on_block = self._keep_block
        if left is None:
            await self._spawners.start()
            return
        assert keeping is not None
        spawner = self._spawners.newest
        resumption = Resumption(spawner, ground, self._maker, keeping, self._enter)
        self.found = await resumption.go_on(left)
        self._keep_node(spawner)

    def _new_spawner(self, workers: int, cgroups: Mapping[str, Path]) -> Spawner:
        keeping = self._keeping
        config = SpawnerConfig(
            self._ground.node_id,
            self._ground.layers,
            self._ground.spool,
            cgroups,
            workers=workers,
            sockets=None if keeping is None else self._ground.workers,
            grace_s=0.0 if keeping is None else keeping.grace_s,
            binary=self._binary,
        )
        return Spawner(config, gone=self._sandbox_gone, lost=self._worker_lost)

    def _keep_node(self, spawner: Spawner) -> None:
        if self._keeping is not None:
            self._keeping.keep_node(
                spawner,
                self.lock(),
                self._ground.cgroups,
                self._ground.ids,
                spawner.program_sha256,
            )

    def _keep_block(self, number: int, lock: int) -> None:
        if self._keeping is not None:
            for spawner in self._spawners:
                self._keeping.keep_block(spawner, number, lock)

    # --- outliving this process -------------------------------------------------------

    def outlive(self, notes: Notes, lock: int | None, grace_s: float) -> None:
        """See `Outlives.outlive`."""
        self._keeping = Keeping(notes, grace_s)
        self._node_lock = lock

    async def _find(self) -> Left:
        """Reach the workers that another process has left. Raises as `Outlives.outlive` says."""
        spawner = self._new_spawner(0, {})
        complete = await native_takeover.connect(self._ground.workers, spawner)
        try:
            left = await native_takeover.look(spawner, complete=complete)
        except NothingFoundError:
            await spawner.close()  # they were only just being started
            raise
        except BaseException:
            await spawner.leave()
            raise
        self._spawners.adopt(spawner)
        self._node_lock = left.lock
        spawner.program_sha256 = left.program
        return left

    def note_sandbox(self, sandbox_id: str) -> None:
        """See `Outlives.note_sandbox`."""
        if self._keeping is not None:
            self._keeping.note_sandbox(sandbox_id)

    def note_exec(self, operation_id: str, more: bytes) -> None:
        """See `Outlives.note_exec`."""
        if self._keeping is not None:
            self._keeping.note_exec(operation_id, more)

    def drop_sandbox(self, sandbox_id: str) -> None:
        """See `Outlives.drop_sandbox`."""
        if self._keeping is not None:
            self._keeping.drop_sandbox(sandbox_id)

    def drop_exec(self, operation_id: str) -> None:
        """See `Outlives.drop_exec`."""
        if self._keeping is not None:
            self._keeping.drop_exec(operation_id)

    async def leave(self) -> None:
        """See `Outlives.leave`."""
        if not self._open:
            return
        self._open = False
        self._blanks.abandon()
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

    async def create(self, sandbox_id: str, spec: SandboxSpec, image: Image) -> NativeSandbox:
        """See `Runtime.create`."""
        self._require_own()
        if not self._open:
            raise CreateError("the native runtime has not been started")
        if sandbox_id in self._sandboxes:
            raise InvalidRequestError(f"sandbox {sandbox_id!r} exists")
        self._maker.require_limits(spec, image)
        making = Undertaking(self._create(sandbox_id, spec, image))
        self._making.add(making.task)
        making.task.add_done_callback(self._making.discard)
        try:
            return await making
        except asyncio.CancelledError:
            # It cannot be stopped halfway: end it as soon as it is there.
            ending = asyncio.ensure_future(_end_unwanted(making))
            self._making.add(ending)
            ending.add_done_callback(self._making.discard)
            raise

    async def _create(self, sandbox_id: str, spec: SandboxSpec, image: Image) -> NativeSandbox:
        sandbox = self._enter(spec, await self._maker.make(sandbox_id, spec, image))
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
        sandbox = NativeSandbox(spec, parts, self._end)
        self._sandboxes[sandbox.id] = sandbox
        return sandbox

    def _refill_spares(self) -> None:
        if self._refilling or not self._open or not self._ground.storage.low:
            return
        self._refilling = True
        refilling = asyncio.ensure_future(self._ground.in_thread(self._ground.storage.refill))
        self._making.add(refilling)
        refilling.add_done_callback(self._refilled)

    def _refilled(self, refilling: asyncio.Future[None]) -> None:
        self._refilling = False
        self._making.discard(refilling)

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
        sandbox = self._sandboxes.get(event.sandbox_id)
        if sandbox is not None:
            sandbox.note_gone(native_takeover.gone_cause(event.cause, event.code))

    def _worker_lost(self, sandbox_ids: Sequence[str]) -> None:
        self._blanks.lose(sandbox_ids)
        for sandbox_id in sandbox_ids:
            sandbox = self._sandboxes.get(sandbox_id)
            if sandbox is not None:
                sandbox.note_gone("spawner lost")

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
        )


async def _end_unwanted(making: Undertaking[NativeSandbox]) -> None:
    """Destroy a sandbox whose creator was cancelled, if it comes to be at all."""
    with contextlib.suppress(ColdframeError):
        await (await making).destroy()


def _note(end: asyncio.Future[None]) -> None:
    if not end.cancelled():
        end.exception()  # what is left shows in the ledger, and is reaped by the next node
