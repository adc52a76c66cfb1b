"""Clients of this machine that are there, and the sandboxes that are to end with each.

With whom a sandbox is to end is noted with it, so that it holds for the process that comes next.
A client that is not there then, or not yet, has a while to come; one whose process lives has
longer, since a busy event loop is no end.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from coldframe.host import processes
from coldframe.node.leases import Leases
from coldframe.node.legacy import Legacy
from coldframe.node.life import Sandbox
from coldframe.node.register import Register
from coldframe.protocol.models import SandboxState

CLIENT_GONE = "its client has gone"
_MOST_GONE = 10_000
"""Clients that are remembered to have gone: their creates may still come."""


@dataclass(frozen=True)
class Presence:
    """A client as its sandboxes know it."""

    name: str
    process: str | None = None
    """See `processes.identity`; None: not a process of this machine that is known."""

    @classmethod
    def of(cls, name: str, pid: int | None) -> Presence:
        """Return that of a client with this name in a process of this machine."""
        return cls(name, None if pid is None else processes.identity(pid))


class Presences:
    """All clients by the names of their presence. Belongs to the node's event loop."""

    def __init__(self, register: Register, leases: Leases, legacy: Legacy, return_s: float) -> None:
        """`return_s`: how long a client that is not there has to come."""
        self._register, self._leases, self._legacy = register, leases, legacy
        self._return_s = return_s
        self._there: Counter[str] = Counter()
        """How many connections say so."""
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._awaited: dict[str, asyncio.TimerHandle] = {}

    @contextlib.contextmanager
    def there(self, name: str) -> Iterator[None]:
        """Note that a client is there until the end of the block; then it has a while to return."""
        self._there[name] += 1
        self._gone.pop(name, None)
        if name in self._awaited:
            self._awaited.pop(name).cancel()
        try:
            yield
        finally:
            self._there[name] -= 1
            if not self._there[name]:
                del self._there[name]
                if any(self._bound(name)):
                    self._await(name)

    def lost(self, name: str) -> None:
        """It ended without a word: end the leases of what was to end with it."""
        if self._there[name] > 1:
            return
        self._gone[name] = None
        if len(self._gone) > _MOST_GONE:
            self._gone.popitem(last=False)
        for sandbox in self._bound(name):
            self._leases.lapse(sandbox, CLIENT_GONE)

    def left(self, name: str) -> None:
        """It has said goodbye: what it left ends with nobody."""
        for sandbox in self._bound(name):
            self._bind(sandbox, None)

    def bind(self, id_or_name: str, presence: Presence | None) -> None:
        """Have a sandbox end with a client, or with none.

        Raises:
            SandboxNotFoundError: there is none.
        """
        self._bind(self._register.find(id_or_name), presence)

    def begun(self, sandbox: Sandbox) -> None:
        """A sandbox is being made for a client, which may have gone already, or not yet come."""
        assert sandbox.presence is not None
        if sandbox.presence in self._gone:
            self._leases.lapse(sandbox, CLIENT_GONE)
        elif sandbox.presence not in self._there:
            self._await(sandbox.presence)

    def go_on(self) -> None:
        """Wait for the clients that were there when another process had the node."""
        for sandbox in self._register.live():
            if sandbox.presence is not None and _is_ended_by_a_lease(sandbox):
                self._await(sandbox.presence)

    def leave(self) -> None:
        """Wait for nobody any more: the node is closed, or another process has it."""
        while self._awaited:
            self._awaited.popitem()[1].cancel()

    def _bind(self, sandbox: Sandbox, presence: Presence | None) -> None:
        before = (sandbox.presence, sandbox.process)
        sandbox.presence = None if presence is None else presence.name
        sandbox.process = None if presence is None else presence.process
        if before != (sandbox.presence, sandbox.process):
            self._legacy.note(sandbox)

    def _bound(self, name: str) -> Iterator[Sandbox]:
        live = self._register.live()
        return (one for one in live if one.presence == name and _is_ended_by_a_lease(one))

    def _await(self, name: str) -> None:
        if name not in self._awaited:
            loop = asyncio.get_running_loop()
            self._awaited[name] = loop.call_later(self._return_s, self._on_late, name)

    def _on_late(self, name: str) -> None:
        del self._awaited[name]
        known = {one.process for one in self._bound(name)} - {None}
        if any(processes.is_there(process) for process in known if process is not None):
            self._await(name)
        else:
            self.lost(name)


def _is_ended_by_a_lease(sandbox: Sandbox) -> bool:
    return sandbox.ending is None and sandbox.state is not SandboxState.TERMINATING
