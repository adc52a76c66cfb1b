"""Clients of this machine by the names of their presence, and what is to end with each.

A client names its presence in its creates too: one that is killed before it hears what was made
for it leaves nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Header

from coldframe.gateway.tenants import Tenant
from coldframe.protocol.errors import ColdframeError
from coldframe.protocol.ids import OPERATION_PATTERN, new_operation_id

_MOST_ABSENT = 10_000
"""Clients that are remembered although they are not there: not yet, or not any more."""

PresenceName = Annotated[
    str | None,
    Header(
        alias="Coldframe-Presence",
        pattern=OPERATION_PATTERN,
        description="What the caller calls its presence on this machine.",
    ),
]


@dataclass
class Client:
    """One client, there or not."""

    sandboxes: dict[str, None] = field(default_factory=dict)
    """What is to end with it."""
    is_there: bool = False
    has_gone: bool = False

    async def lost(self, tenant: Tenant) -> None:
        """End the leases of what was to end with it."""
        self.has_gone = True
        for sandbox_id in self.sandboxes:
            await _lapse(tenant, sandbox_id)
        self.sandboxes.clear()


class Clients:
    """All clients whose presence was heard of."""

    def __init__(self) -> None:
        self._known: dict[str, Client] = {}

    @contextlib.contextmanager
    def there(self, tenant: Tenant, name: str | None) -> Iterator[Client]:
        """Note that a client is there until the end of the block."""
        client = self._client(tenant, name or new_operation_id())
        client.is_there, client.has_gone = True, False
        try:
            yield client
        finally:
            client.is_there = False

    async def made(self, tenant: Tenant, name: str, sandbox_id: str) -> None:
        """Have a sandbox end with the client that asked for it; at once if that has gone."""
        client = self._client(tenant, name)
        if client.has_gone:
            await _lapse(tenant, sandbox_id)
        else:
            client.sandboxes[sandbox_id] = None

    def _client(self, tenant: Tenant, name: str) -> Client:
        key = tenant.operation(name)
        known = self._known.pop(key, None)
        client = self._known[key] = known or Client()
        if len(self._known) > _MOST_ABSENT:
            absent = [one for one, other in self._known.items() if not other.is_there]
            for oldest in absent[:-_MOST_ABSENT]:
                del self._known[oldest]
        return client


async def _lapse(tenant: Tenant, sandbox_id: str) -> None:
    with contextlib.suppress(ColdframeError):  # it has ended, or the node has
        await tenant.node.lapse(tenant.sandbox(sandbox_id), "its client has gone")
