"""The node of one machine: sandboxes with leases, commands that run once, an exact ledger.

Everything runs on one event loop and belongs to it. A node holds `nodes/<id>/lock` while it
lives; what a dead one left is found by that and reaped.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from coldframe.images.base import BuildStep, Image, StepResult
from coldframe.node import machine
from coldframe.node.command_calls import CommandCalls
from coldframe.node.effects import Reply, lost_reply
from coldframe.node.inside_calls import InsideCalls
from coldframe.node.quotas import in_use
from coldframe.node.sandbox_calls import SandboxCalls
from coldframe.node.sandboxes import Load
from coldframe.node.under import Under
from coldframe.protocol.models import (
    Capabilities,
    EventKind,
    EventPage,
    ImageInfo,
    Ledger,
)
from coldframe.protocol.resources import NodeResources


class Node(SandboxCalls, CommandCalls, InsideCalls):
    """Sandboxes of one machine, by id or name.

    Every method that takes an operation id or names a sandbox may raise SandboxNotFoundError,
    SandboxStateError (in a state that takes no operation), SandboxGoneError (it has ended);
    those that take `expected_version` also ConflictError.
    """

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
