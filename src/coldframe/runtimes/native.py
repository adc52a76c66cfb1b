"""The native runtime: sandboxes of namespaces, made and driven by the spawner in C.

One `NativeRuntime` belongs to one event loop and owns its node's directory, cgroups, uppers and
spawner. What is left when it is killed is found and reaped by `coldframe.host.gc`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from coldframe.host import census, forks, gc
from coldframe.host.blanks import Blanks
from coldframe.host.cgroups import NodeCgroups, make_node_cgroups
from coldframe.host.descriptors import needing_room
from coldframe.host.egress import steering
from coldframe.host.egress.resolver import Resolve
from coldframe.host.fsthreads import FileThreads
from coldframe.host.idranges import MACHINE_DIRECTORY, IdRanges
from coldframe.host.outcome import Undertaking
from coldframe.host.patience import wait_while_any_end
from coldframe.host.reaping import reap_cgroups
from coldframe.host.rootfs import RootFiles
from coldframe.host.spares import SpareUppers
from coldframe.host.spawner import (
    Created,
    CreateSpec,
    Keep,
    SandboxGone,
    Spawner,
    SpawnerConfig,
    SpawnerFault,
)
from coldframe.host.storage import Storage, adopt, open_storage, require_space_at
from coldframe.host.wire import VERSION
from coldframe.images.base import Image
from coldframe.protocol.errors import (
    CapabilityError,
    ClientClosedError,
    ColdframeError,
    CreateError,
    InvalidRequestError,
    SpawnerLostError,
)
from coldframe.protocol.models import Capabilities, SandboxSpec
from coldframe.runtimes import native_guard, native_takeover
from coldframe.runtimes.base import Found, FoundExec, FoundSandbox, Notes, NothingFoundError
from coldframe.runtimes.native_egress import NativeEgress, NodeNetwork
from coldframe.runtimes.native_exec import NativeExec
from coldframe.runtimes.native_guard import MOST_AT_ONCE
from coldframe.runtimes.native_keeping import Keeping
from coldframe.runtimes.native_request import Planner, create_error
from coldframe.runtimes.native_sandbox import NativeSandbox, Parts
from coldframe.runtimes.native_spawners import Spawners
from coldframe.runtimes.native_takeover import Left, LeftSandbox

P = ParamSpec("P")
T = TypeVar("T")

_LEAK_GRACE_S = 3.0
_LEAK_POLL_S = 0.02
_END_PATIENCE_S = 30.0
_HOSTNAME_LIMIT = 63
_FILE_THREADS = 4
_STORAGE_THREADS = 2
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
        self._node_id, self._layers, self._state = node_id, layers, state
        self._storage_kind, self._workers, self._binary = storage, workers, binary
        self._home = state.parent.parent
        self._pools, self._pool_bytes = pools or self._home / "pools", pool_bytes
        self._network = NodeNetwork(resolve)
        self._no_egress: str | None = None
        self._no_guards: str | None = None
        self._guards = asyncio.Semaphore(MOST_AT_ONCE)
        self._sandboxes: dict[str, NativeSandbox] = {}
        self._making: set[asyncio.Future[Any]] = set()
        self._refilling = False
        self._spawners = Spawners(
            workers, lambda count: self._new_spawner(count, self._cgroups.paths), self._keep_node
        )
        self._lock: int | None = None
        self._node_lock: int | None = None
        """The node's, which is not ours to close; see `Outlives`."""
        self._keeping: Keeping | None = None
        self._left: Left | None = None
        """What another process has left, while it is taken over."""
        self.found = Found()
        """See `Outlives.found`."""
        self._open = self._abandoned = False
        forks.own(self)
        self.leak_grace_s = _LEAK_GRACE_S
        """How long `leaks` lets the kernel take down what it is taking down."""
        self.end_patience_s = _END_PATIENCE_S
        """How long `close` waits while not one sandbox more has ended, before it kills workers."""
        self.inject: str | None = None
        """Step of `steps` at which the next create fails; tests only."""

    @property
    def name(self) -> str:
        """`native`."""
        return "native"

    @property
    def node_id(self) -> str:
        """The node that its sandboxes' ids name."""
        return self._node_id

    @property
    def steps(self) -> tuple[str, ...]:
        """Where `inject` can make a create fail."""
        return self._spawners.newest.steps

    @property
    def storage(self) -> Storage:
        """Where its uppers live."""
        return self._storage

    @property
    def id_ranges(self) -> frozenset[int]:
        """First host ids of all ranges that are this node's to give out."""
        return self._ids.all

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
        await asyncio.to_thread(gc.reap_dead_nodes, self._home)
        undo = contextlib.ExitStack()
        try:
            if self._taking_over:
                self._left = await self._find()
            self._acquire(undo)
            self._storage = SpareUppers(await asyncio.to_thread(self._open_storage))
            undo.callback(self._storage.close)
            self._blanks = Blanks(
                self._node_id,
                self._ids,
                self._spawners.idle,
                self._reap_cgroups,
                self._workers * _BLANKS_PER_WORKER,
            )
            if self._keeping is not None:
                self._keeping.storage = self._storage
                self._ids.on_block = self._keep_block
            if self._left is None:
                await self._spawners.start()
            else:
                await self._take_over(self._left)
        except BaseException:
            if self._taking_over:
                # What is there is another's again: nothing of it may be taken down.
                await self._spawners.leave()
                undo.pop_all()
                raise
            await self._spawners.close(self.end_patience_s)
            await asyncio.to_thread(undo.close)
            raise
        self._left = None
        self._undo = undo
        self._open = True
        forks.own_loop(asyncio.get_running_loop())
        self._refill_spares()
        self._blanks.create_noted()

    def _acquire(self, undo: contextlib.ExitStack) -> None:
        """Take what needs no waiting, and note how each is given back."""
        try:
            # A node that holds the lock itself shares its life with us.
            if self._node_lock is None:
                self._lock = gc.hold_node(self._state)
                if self._lock is not None:
                    undo.callback(self._release_lock)
                    undo.callback(self._remove_state)
            for name in ("spool", "uppers", "workers"):
                path = self._state / name
                path.mkdir(mode=0o700, exist_ok=True)
                undo.callback(_remove_empty, path)
        except OSError as error:
            raise CapabilityError(
                f"cannot keep state in {self._state}: {error.strerror}; "
                "set COLDFRAME_HOME to a directory that can be written"
            ) from error
        if not self._layers.is_dir():
            raise CapabilityError(f"{self._layers} is no directory: there is no image store")
        self._no_egress = steering.refusal()
        self._no_guards = native_guard.refusal()
        undo.callback(self._network.close)
        if self._left is None:
            self._cgroups: NodeCgroups = make_node_cgroups(self._node_id)
            undo.callback(self._cgroups.remove)
        else:
            self._cgroups = self._left.cgroups
            undo.callback(self._cgroups.remove)
        self._ids = IdRanges(MACHINE_DIRECTORY)
        undo.callback(self._ids.close)
        # Apart, so that long work on files never holds up a create.
        self._file_threads = FileThreads(_FILE_THREADS)
        undo.callback(self._file_threads.close)
        self._threads = FileThreads(_STORAGE_THREADS)
        undo.callback(self._threads.close)

    def _release_lock(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def _remove_state(self) -> None:
        with contextlib.suppress(OSError):
            (self._state / "lock").unlink()
            self._state.rmdir()

    def _open_storage(self) -> Storage:
        left = self._left
        if left is None:
            return open_storage(
                self._storage_kind,
                node_id=self._node_id,
                state=self._state,
                pools=self._pools,
                pool_bytes=self._pool_bytes,
            )
        uppers = {one.note.upper: one.held for one in left.sandboxes if one.created is not None}
        storage = adopt(left.storage, self._state, self._pools, left.storage_held, uppers)
        storage.fallback_from = left.fallback
        return storage

    def _new_spawner(self, workers: int, cgroups: Mapping[str, Path]) -> Spawner:
        keeping = self._keeping
        config = SpawnerConfig(
            self._node_id,
            self._layers,
            self._state / "spool",
            cgroups,
            workers=workers,
            sockets=None if keeping is None else self._state / "workers",
            grace_s=0.0 if keeping is None else keeping.grace_s,
            binary=self._binary,
        )
        return Spawner(config, gone=self._sandbox_gone, lost=self._worker_lost)

    def _keep_node(self, spawner: Spawner) -> None:
        if self._keeping is not None:
            self._keeping.keep_node(
                spawner, self.lock(), self._cgroups, self._ids, spawner.program_sha256
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

    @property
    def _taking_over(self) -> bool:
        return self._keeping is not None and (self._node_lock is None or self._left is not None)

    async def _find(self) -> Left:
        """Reach the workers that another process has left. Raises as `Outlives.outlive` says."""
        spawner = self._new_spawner(0, {})
        complete = await native_takeover.connect(self._state / "workers", spawner)
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

    async def _take_over(self, left: Left) -> None:
        keeping, spawner = self._keeping, self._spawners.newest
        assert keeping is not None
        alive = [one for one in left.sandboxes if one.created is not None]
        self._ids.adopt(left.blocks, {one.note.id_base for one in alive})
        await self._storage.adopt(native_takeover.uppers_of(alive), self._remove_tree_here)
        for one in left.sandboxes:
            keeping.adopt_sandbox(one.id, one.note, spawner, one.worker)
        if not left.complete:
            await self._reap_others({one.id for one in alive})
        found = [self._go_on(spawner, one) for one in left.sandboxes]
        networked = [one for one in found if one.handle is not None and not one.spec.network.empty]
        await asyncio.gather(*(self._reopen_network(one, left) for one in networked))
        execs: list[FoundExec] = []
        for command in left.execs:
            sandbox = self._sandboxes.get(command.note.sandbox_id)
            ended = self._no_end if sandbox is None else sandbox.exec_ended
            running = native_takeover.go_on(spawner, command, ended)
            keeping.started(running.operation_id, spawner, running.execution)
            if sandbox is not None:
                sandbox.go_on(running)
            execs.append(native_takeover.found(command, running))
        self._keep_node(spawner)
        self.found = Found(tuple(found), tuple(execs), left.complete)

    def _go_on(self, spawner: Spawner, left: LeftSandbox) -> FoundSandbox:
        note, handle = left.note, None
        if left.created is not None:
            egress = NativeEgress(left.id, self._network)
            planner = Planner(note.image, note.spec, fresh=False)
            layers = tuple(self._layers / layer / "root" for layer in note.image.layers)
            made = (spawner, left.created, note.id_base)
            handle = NativeSandbox(note.spec, self._parts(made, planner, layers, egress), self._end)
            self._sandboxes[left.id] = handle
        return FoundSandbox(left.id, note.spec, note.image, note.node, handle, left.gone)

    async def _reopen_network(self, found: FoundSandbox, left: Left) -> None:
        (resolv,) = [one.note.resolv for one in left.sandboxes if one.id == found.id]
        egress = self._sandboxes[found.id].parts.egress
        await egress.go_on(found.spec.network, resolv)
        if self._keeping is not None:
            self._keeping.have_network(found.id, egress.resolv_before)

    async def _reap_others(self, wanted: Collection[str]) -> None:
        """Take from the kernel what a worker that has died since has left."""
        names = {path.name for base in self._cgroups.paths.values() for path in base.iterdir()}
        for name in names - set(wanted):
            await self._reap_cgroups(name)

    @staticmethod
    def _no_end(_: NativeExec) -> None:
        """Its sandbox is no more."""

    def note_sandbox(self, sandbox_id: str) -> None:
        """See `Outlives.note_sandbox`."""
        if self._keeping is not None:
            self._keeping.note_sandbox(sandbox_id)

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
        self._network.close()
        self._storage.close()
        self._ids.close()
        self._file_threads.close()
        self._threads.close()

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
        await self._storage.clear(self._remove_tree_here)
        self._network.close()
        await asyncio.to_thread(self._undo.close)

    def abandon(self) -> None:
        """See `forks.Owner`: the sandboxes are the parent's."""
        self._open, self._abandoned = False, True
        self._release_lock()

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
        limits = set(self._cgroups.limits)
        if self._storage.enforces_disk:
            limits.add("disk")
        return Capabilities(
            runtime=self.name,
            isolation=True,
            limits=frozenset(limits),
            pty=True,
            ports=True,
            users=True,
            egress=self._no_egress is None,
            guards=self._no_guards is None,
            storage=self._storage.name,
            details={
                "storage_fallback": self._storage.fallback_from,
                "workers": self._workers,
                "network": self._no_egress or "loopback, and what a policy allows",
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
        self._require_limits(spec, image)
        planner = Planner(image, spec)
        making = Undertaking(self._create(sandbox_id, spec, image, planner))
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

    async def _create(
        self, sandbox_id: str, spec: SandboxSpec, image: Image, planner: Planner
    ) -> NativeSandbox:
        require_space_at(self._state)
        egress = NativeEgress(sandbox_id, self._network)
        made = await self._make_of_blank(sandbox_id, spec, image, egress)
        made = made or await self._make_at_once(sandbox_id, spec, image)
        layers = tuple(self._layers / layer / "root" for layer in image.layers)
        parts = self._parts(made, planner, layers, egress)
        sandbox = NativeSandbox(spec, parts, self._end)
        self._sandboxes[sandbox_id] = sandbox
        self._refill_spares()
        self._blanks.create_noted()
        if not spec.network.empty:
            try:
                await sandbox.set_network(spec.network)
            except BaseException:
                await sandbox.destroy()
                raise
        return sandbox

    def _require_limits(self, spec: SandboxSpec, image: Image) -> None:
        missing = {"cpu", "memory", "pids"} - self._cgroups.limits
        if missing:
            names = ", ".join(sorted(missing))
            raise CapabilityError(
                f"this machine's cgroups cannot limit {names}; `coldframe doctor` says what helps"
            )
        if spec.disk_bytes is not None and not self._storage.enforces_disk:
            raise CapabilityError(
                f"storage {self._storage.name!r} cannot hold disk_bytes; use storage btrfs "
                "(`apt-get install btrfs-progs`) or tmpfs"
            )
        if not spec.network.empty and self._no_egress is not None:
            raise CapabilityError(self._no_egress)
        if not image.layers:
            raise InvalidRequestError(f"image {image.name!r} has no layers")

    async def _make_of_blank(
        self, sandbox_id: str, spec: SandboxSpec, image: Image, egress: NativeEgress
    ) -> tuple[Spawner, Created, int] | None:
        """Go on with the blank of this id. None: there is none, or it was of no use and is gone."""
        blank = await self._blanks.take(sandbox_id)
        if blank is None:
            return None
        created = None
        try:
            if self.inject is None:
                if blank.place is not None and not spec.network.empty:
                    egress.begin(blank.place, spec.network)
                # To make it at once tells what is wrong.
                with contextlib.suppress(ColdframeError, OSError):
                    created = await self._make(
                        blank.spawner, sandbox_id, spec, image, blank.id_base
                    )
        finally:
            if created is None:
                await egress.withdraw()
                await self._blanks.undo(blank)
                await self._remove_upper(sandbox_id)
        return (blank.spawner, created, blank.id_base) if created else None

    async def _make_at_once(
        self, sandbox_id: str, spec: SandboxSpec, image: Image
    ) -> tuple[Spawner, Created, int]:
        spawner = await self._spawners.current()
        id_base = self._ids.take()
        try:
            with needing_room(f"sandbox {sandbox_id!r} was not made"):
                created = await self._make(spawner, sandbox_id, spec, image, id_base)
        except BaseException:
            await self._discard(sandbox_id, id_base)
            raise
        return spawner, created, id_base

    async def _make(
        self,
        spawner: Spawner,
        sandbox_id: str,
        spec: SandboxSpec,
        image: Image,
        id_base: int,
    ) -> Created:
        inject, self.inject = self.inject, None
        upper = self._storage.take(sandbox_id, spec.disk_bytes)
        if upper is None:
            upper = await self._in_thread(self._storage.make, sandbox_id, spec.disk_bytes)
        keeping: AbstractContextManager[Keep | None] = contextlib.nullcontext()
        if self._keeping is not None:
            keeping = self._keeping.creating(sandbox_id, spec, image, id_base)
        try:
            with keeping as keep:
                created = await spawner.create(
                    CreateSpec(
                        sandbox_id,
                        [f"{layer}/root" for layer in image.layers],
                        id_base,
                        (spec.name or sandbox_id)[:_HOSTNAME_LIMIT],
                        upper=upper,
                        memory_bytes=spec.memory_bytes,
                        cpu_milli=max(1, round(spec.cpu * 1000)),
                        pids=spec.pids,
                        shm_bytes=spec.shm_bytes,
                        no_new_privs=spec.no_new_privileges,
                        keep=keep,
                        inject=inject,
                    )
                )
            if self._keeping is not None:
                self._keeping.made(sandbox_id, spawner)
            return created
        except SpawnerFault as fault:
            raise create_error(fault, sandbox_id) from fault
        except SpawnerLostError as error:
            raise CreateError(f"sandbox {sandbox_id!r} was not made: {error}") from error
        except ValueError as error:
            raise InvalidRequestError(f"sandbox {sandbox_id!r} was not made: {error}") from error
        finally:
            os.close(upper)

    def _refill_spares(self) -> None:
        if self._refilling or not self._open or not self._storage.low:
            return
        self._refilling = True
        refilling = asyncio.ensure_future(self._in_thread(self._storage.refill))
        self._making.add(refilling)
        refilling.add_done_callback(self._refilled)

    def _refilled(self, refilling: asyncio.Future[None]) -> None:
        self._refilling = False
        self._making.discard(refilling)

    def _parts(
        self,
        made: tuple[Spawner, Created, int],
        planner: Planner,
        layers: tuple[Path, ...],
        egress: NativeEgress,
    ) -> Parts:
        spawner, created, id_base = made
        # Its end is told by an event; the number is checked by its namespaces when it is used.
        os.close(created.pidfd)
        files = RootFiles(created.root_fd, id_base, self._file_threads, planner.default_owner)
        egress.settle(created.place, files)
        return Parts(
            spawner,
            created,
            id_base,
            files,
            planner,
            self._storage,
            egress,
            layers,
            self._cgroups.paths,
            self._guards,
            self._blanks.command_ended,
            self._keeping,
        )

    async def _discard(self, sandbox_id: str, id_base: int) -> None:
        """Take back what a failed create took."""
        await self._reap_cgroups(sandbox_id)
        await self._remove_upper(sandbox_id)
        self._ids.give_back(id_base)

    # --- end --------------------------------------------------------------------------

    def _require_own(self) -> None:
        if self._abandoned:
            raise ClientClosedError(
                "this runtime is the parent's; a forked process starts one of its own"
            )

    async def _end(self, sandbox: NativeSandbox) -> None:
        self._require_own()
        parts = sandbox.parts
        await parts.egress.close()
        try:
            await parts.spawner.destroy(sandbox.id)
        except (SpawnerFault, SpawnerLostError):
            # It went with its worker, or is unknown: the kernel is asked instead.
            await self._reap_cgroups(sandbox.id)
        parts.files.close()
        await self._remove_upper(sandbox.id)
        self._sandboxes.pop(sandbox.id, None)
        self._ids.give_back(parts.id_base)

    async def _remove_upper(self, sandbox_id: str) -> None:
        await self._storage.remove(sandbox_id, self._remove_tree_here)

    async def _remove_tree_here(self, directory: int, name: str) -> int:
        return await self._spawners.remove_tree(self._threads, directory, name)

    async def _reap_cgroups(self, sandbox_id: str) -> None:
        left = [base / sandbox_id for base in self._cgroups.paths.values()]
        if any(path.exists() for path in left):
            await asyncio.to_thread(reap_cgroups, left)

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

    async def _in_thread(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._threads.run((0, 0), job, *args, **kwargs)

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
        return census.Scope(
            self._node_id,
            self._state,
            cgroup_bases=tuple(self._cgroups.paths.values()),
            processes=self._spawners.pids,
            live=frozenset(live) | {blank.sandbox_id for blank in blanks},
            live_ids=frozenset(one.parts.id_base for one in alive)
            | {blank.id_base for blank in blanks},
            own_ids=self._ids.all,
            live_namespaces=frozenset(namespaces),
            uppers=self._storage.names() if self._open else (),
        )


async def _end_unwanted(making: Undertaking[NativeSandbox]) -> None:
    """Destroy a sandbox whose creator was cancelled, if it comes to be at all."""
    with contextlib.suppress(ColdframeError):
        await (await making).destroy()


def _note(end: asyncio.Future[None]) -> None:
    if not end.cancelled():
        end.exception()  # what is left shows in the ledger, and is reaped by the next node


def _remove_empty(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.rmdir()
