"""The seam `store`: keys and quotas, of one service or of several gateways.

What is true of sandboxes is the node's, not a store's: one that is lost or emptied loses none.
Every read sees what was written before it, by any process: a key that is revoked is refused from
the next request on. `self_check.py` checks each promise on a store of yours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from coldframe.protocol.models import Quota


@dataclass(frozen=True)
class KeyRecord:
    """What is kept of a key: not the key itself."""

    id: str
    owner: str
    scopes: tuple[str, ...]
    digest: bytes
    """SHA-256 of its secret part."""
    created_at: float
    revoked_at: float | None = None


class Store(Protocol):
    """Where keys and quotas are. Every method raises StoreUnreachableError when it cannot tell."""

    waits: bool
    """Whether calls may take more than one step, and so need a task of asyncio's."""

    async def add_key(self, record: KeyRecord) -> None:
        """Keep a key.

        Raises:
            ValueError: there is one of that id; it stays as it is.
        """

    async def find_key(self, key_id: str) -> KeyRecord | None:
        """Return a key, also a revoked one; None: there is none."""

    async def keys(self) -> tuple[KeyRecord, ...]:
        """Return all keys, revoked ones too, in order of their making."""

    async def revoke_key(self, key_id: str, at: float) -> bool:
        """Return whether there is such a key; revoking one twice keeps the first time."""

    async def keyless(self) -> bool:
        """Whether it is certain that nobody ever made a key, so that none need be asked for.

        A store that may have lost its keys says no.
        """

    async def set_quota(self, owner: str, quota: Quota) -> None:
        """Replace an owner's quota."""

    async def quota(self, owner: str) -> Quota:
        """Return an owner's quota; one that is free of any bound if none was set."""

    async def close(self) -> None:
        """Let go of files and connections. Twice is fine."""
