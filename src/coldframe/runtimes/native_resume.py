"""Go on with all sandboxes and commands that another process has left with its workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from coldframe.host.spawner import Spawner
from coldframe.protocol.models import SandboxSpec
from coldframe.runtimes import native_takeover
from coldframe.runtimes.native_egress import NativeEgress
from coldframe.runtimes.native_exec import NativeExec
from coldframe.runtimes.native_ground import Ground
from coldframe.runtimes.native_keeping import Keeping
from coldframe.runtimes.native_maker import Maker
from coldframe.runtimes.native_parts import Parts
from coldframe.runtimes.native_request import Planner
from coldframe.runtimes.native_sandbox import NativeSandbox
from coldframe.runtimes.native_takeover import Left, LeftExec, LeftSandbox
from coldframe.runtimes.outliving import Found, FoundExec, FoundSandbox


class Resumption:
    """One process going on where another has stopped."""

    def __init__(
        self,
        spawner: Spawner,
        ground: Ground,
        maker: Maker,
        keeping: Keeping,
        enter: Callable[[SandboxSpec, Parts], NativeSandbox],
    ) -> None:
        """`spawner` has taken the workers over; `enter` is told of each sandbox that lives."""
        self._spawner, self._ground, self._maker = spawner, ground, maker
        self._keeping, self._enter = keeping, enter
        self._sandboxes: dict[str, NativeSandbox] = {}

    async def go_on(self, left: Left) -> Found:
        """Have everything again, and take from the kernel what is nobody's."""
        ground, keeping = self._ground, self._keeping
        alive = [one for one in left.sandboxes if one.created is not None]
        ground.ids.adopt(left.blocks, {one.note.id_base for one in alive})
        await ground.storage.adopt(native_takeover.uppers_of(alive), self._maker.remove_tree)
        for one in left.sandboxes:
            keeping.adopt_sandbox(one.id, one.note, one.worker)
        if not left.complete:  # what a worker that has died since has left
            await ground.reap_others({one.id for one in alive})
        found = tuple(self._sandbox(one) for one in left.sandboxes)
        await self._reopen_networks(alive)
        return Found(found, tuple(self._command(one) for one in left.execs), left.complete)

    def _sandbox(self, left: LeftSandbox) -> FoundSandbox:
        note, handle = left.note, None
        if left.created is not None:
            egress = NativeEgress(left.id, self._ground.network)
            planner = Planner(note.image, note.spec, fresh=False)
            made = (self._spawner, left.created, note.id_base)
            parts = self._maker.parts(made, planner, note.image, egress)
            handle = self._sandboxes[left.id] = self._enter(note.spec, parts)
        return FoundSandbox(left.id, note.spec, note.image, note.node, handle, left.gone)

    async def _reopen_networks(self, alive: Iterable[LeftSandbox]) -> None:
        networked = (one for one in alive if not one.note.spec.network.empty)
        await asyncio.gather(*(self._reopen_network(one) for one in networked))

    async def _reopen_network(self, left: LeftSandbox) -> None:
        egress = self._sandboxes[left.id].parts.egress
        await egress.go_on(left.note.spec.network, left.note.resolv)
        self._keeping.have_network(left.id, egress.resolv_before)

    def _command(self, left: LeftExec) -> FoundExec:
        sandbox = self._sandboxes.get(left.note.sandbox_id)
        ended = _no_end if sandbox is None else sandbox.commands.ended
        running = native_takeover.go_on(left, ended)
        self._keeping.started(running.operation_id, running.execution, left.more)
        if sandbox is not None:
            sandbox.commands.add(running)
        return native_takeover.found(left, running)


def _no_end(_: NativeExec) -> None:
    """Its sandbox is no more."""
