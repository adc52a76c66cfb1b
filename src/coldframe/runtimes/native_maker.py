"""How native sandboxes are made, of a blank or at once, and taken down: nothing is left halfway."""

from __future__ import annotations

import contextlib
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass

from coldframe.host.blanks import Blanks
from coldframe.host.descriptors import needing_room
from coldframe.host.processes import has_exited
from coldframe.host.rootfs import RootFiles
from coldframe.host.space import require_space_at
from coldframe.host.spawner import Created, CreateSpec, Keep, Spawner, SpawnerFault
from coldframe.host.storage import disk_refusal
from coldframe.images.base import Image
from coldframe.protocol.errors import (
    CapabilityError,
    ColdframeError,
    CreateError,
    InvalidRequestError,
    SpawnerLostError,
)
from coldframe.protocol.models import SandboxSpec
from coldframe.runtimes.native_egress import NativeEgress, require_whole
from coldframe.runtimes.native_faults import create_error
from coldframe.runtimes.native_ground import Ground
from coldframe.runtimes.native_keeping import Keeping
from coldframe.runtimes.native_parts import Parts
from coldframe.runtimes.native_request import Planner
from coldframe.runtimes.native_spawners import Spawners

_HOSTNAME_LIMIT = 63
_LIMITS = {"cpu", "memory", "pids"}
_MOST_LAYERS = 128
"""LAYERS_MAX of the native program."""
Made = tuple[Spawner, Created, int]
"""Who made it, what, and the first host id of its range."""


@dataclass(frozen=True)
class _Order:
    """What is to be made."""

    sandbox_id: str
    spec: SandboxSpec
    image: Image

    def at(self, id_base: int, upper: int, keep: Keep | None, inject: str | None) -> CreateSpec:
        """Say it to a spawner."""
        return CreateSpec(
            self.sandbox_id,
            [f"{layer}/root" for layer in self.image.layers],
            id_base,
            (self.spec.name or self.sandbox_id)[:_HOSTNAME_LIMIT],
            upper=upper,
            memory_bytes=self.spec.memory_bytes,
            cpu_milli=max(1, round(self.spec.cpu * 1000)),
            pids=self.spec.pids,
            shm_bytes=self.spec.shm_bytes,
            no_new_privs=self.spec.no_new_privileges,
            keep=keep,
            inject=inject,
        )


class Maker:
    """Makes the parts of sandboxes on a node's ground, and takes them down."""

    def __init__(
        self, ground: Ground, spawners: Spawners, blanks: Blanks, keeping: Keeping | None
    ) -> None:
        """With `keeping` sandboxes outlive this process."""
        self._ground, self._spawners, self._blanks = ground, spawners, blanks
        self._keeping = keeping
        self.inject: str | None = None
        """Step of `coldframe-native --steps` at which the next create fails; tests only."""

    async def make(self, sandbox_id: str, spec: SandboxSpec, image: Image) -> Parts:
        """Make a sandbox; after a failure nothing of it is left.

        Raises:
            InvalidRequestError, CreateError, StorageFullError: see `Runtime`.
        """
        planner = Planner(image, spec)
        egress = NativeEgress(sandbox_id, self._ground.network)
        order = _Order(sandbox_id, spec, image)
        made = await self._of_blank(order, egress) or await self._at_once(order)
        return self.parts(made, planner, image, egress)

    def require(self, spec: SandboxSpec, image: Image) -> None:
        """See `Runtime.require`."""
        ground = self._ground
        missing = _LIMITS - ground.cgroups.limits
        if missing:
            names = ", ".join(sorted(missing))
            raise CapabilityError(
                f"this machine's cgroups cannot limit {names}; `coldframe doctor` says what helps"
            )
        if spec.disk_bytes is not None and not ground.storage.enforces_disk:
            raise disk_refusal(ground.storage)
        require_whole(spec.network)
        if not spec.network.empty and ground.no_egress is not None:
            raise CapabilityError(ground.no_egress)
        if not 0 < len(image.layers) <= _MOST_LAYERS:
            raise InvalidRequestError(
                f"image {image.name!r} has {len(image.layers)} layers; from 1 to {_MOST_LAYERS} "
                "can be mounted"
            )
        Planner(image, spec)
        require_space_at(ground.state)
        ground.storage.require_disk()

    def parts(self, made: Made, planner: Planner, image: Image, egress: NativeEgress) -> Parts:
        """Put together what was made, or found."""
        spawner, created, id_base = made
        ground = self._ground
        # A later end is told by an event; the number is checked by its namespaces when it is used.
        ended = has_exited(created.pidfd)
        os.close(created.pidfd)
        files = RootFiles(created.root_fd, id_base, ground.file_threads, planner.default_owner)
        egress.settle(created.place, files)
        return Parts(
            spawner=spawner,
            created=created,
            id_base=id_base,
            files=files,
            planner=planner,
            storage=ground.storage,
            egress=egress,
            layers=tuple(ground.layers / layer / "root" for layer in image.layers),
            cgroups=ground.cgroups.paths,
            command_ended=self._blanks.command_ended,
            ended=ended,
            keeping=self._keeping,
        )

    async def take_down(self, parts: Parts) -> None:
        """Take everything of a sandbox from the kernel and the disk."""
        sandbox_id = parts.created.sandbox_id
        await parts.egress.close()
        try:
            await parts.spawner.destroy(sandbox_id)
        except (SpawnerFault, SpawnerLostError):
            # It went with its worker, or is unknown: the kernel is asked instead.
            await self._ground.reap_cgroups(sandbox_id)
        parts.files.close()
        await self._remove_upper(sandbox_id)

    async def _of_blank(self, order: _Order, egress: NativeEgress) -> Made | None:
        """Go on with the blank of this id. None: there is none, or it was of no use and is gone."""
        blank = await self._blanks.take(order.sandbox_id)
        if blank is None:
            return None
        created = None
        try:
            if self.inject is None:
                if blank.place is not None and not order.spec.network.empty:
                    egress.begin(blank.place, order.spec.network)
                # To make it at once tells what is wrong.
                with contextlib.suppress(ColdframeError, OSError):
                    created = await self._create(order, blank.spawner, blank.id_base)
        finally:
            if created is None:
                await egress.withdraw()
                await self._blanks.undo(blank)
                await self._remove_upper(order.sandbox_id)
        return (blank.spawner, created, blank.id_base) if created else None

    async def _at_once(self, order: _Order) -> Made:
        spawner = await self._spawners.current()
        id_base = self._ground.ids.take()
        try:
            with needing_room(f"sandbox {order.sandbox_id!r} was not made"):
                created = await self._create(order, spawner, id_base)
        except BaseException:
            await self._ground.reap_cgroups(order.sandbox_id)
            await self._remove_upper(order.sandbox_id)
            self._ground.ids.give_back(id_base)
            raise
        return spawner, created, id_base

    async def _create(self, order: _Order, spawner: Spawner, id_base: int) -> Created:
        inject, self.inject = self.inject, None
        sandbox_id, disk_bytes = order.sandbox_id, order.spec.disk_bytes
        storage = self._ground.storage
        upper = storage.take(sandbox_id, disk_bytes)
        if upper is None:
            upper = await self._ground.in_thread(storage.make, sandbox_id, disk_bytes)
        keeping: AbstractContextManager[Keep | None] = contextlib.nullcontext()
        if self._keeping is not None:
            keeping = self._keeping.creating(sandbox_id, order.spec, order.image, id_base)
        try:
            with keeping as keep:
                created = await spawner.create(order.at(id_base, upper, keep, inject))
            if self._keeping is not None:
                self._keeping.made(sandbox_id, spawner.worker_of(sandbox_id))
            return created
        except SpawnerFault as fault:
            raise create_error(fault, sandbox_id) from fault
        except SpawnerLostError as error:
            raise CreateError(f"sandbox {sandbox_id!r} was not made: {error}") from error
        except ValueError as error:
            raise InvalidRequestError(f"sandbox {sandbox_id!r} was not made: {error}") from error
        finally:
            os.close(upper)

    async def _remove_upper(self, sandbox_id: str) -> None:
        await self._ground.storage.remove(sandbox_id, self.remove_tree)

    async def remove_tree(self, directory: int, name: str) -> int:
        """See `RemoveTree`."""
        return await self._spawners.remove_tree(self._ground.threads, directory, name)
