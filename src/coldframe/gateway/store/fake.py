"""A store in memory, which ends with its process. For tests, and to see what the seam asks."""

from __future__ import annotations

import dataclasses

from coldframe.gateway.store.base import KeyRecord
from coldframe.protocol.models import Quota


class FakeStore:
    """See `Store`. Stores of the same URL share what they hold."""

    waits = False

    _shared: dict[str, tuple[dict[str, KeyRecord], dict[str, Quota]]] = {}  # noqa: RUF012

    def __init__(self, url: str) -> None:
        self._keys, self._quotas = self._shared.setdefault(url, ({}, {}))

    async def add_key(self, record: KeyRecord) -> None:
        """See `Store`."""
        if record.id in self._keys:
            raise ValueError(f"there is a key {record.id!r} already")
        self._keys[record.id] = record

    async def find_key(self, key_id: str) -> KeyRecord | None:
        """See `Store`."""
        return self._keys.get(key_id)

    async def keys(self) -> tuple[KeyRecord, ...]:
        """See `Store`."""
        return tuple(sorted(self._keys.values(), key=lambda one: (one.created_at, one.id)))

    async def revoke_key(self, key_id: str, at: float) -> bool:
        """See `Store`."""
        record = self._keys.get(key_id)
        if record is not None and record.revoked_at is None:
            self._keys[key_id] = dataclasses.replace(record, revoked_at=at)
        return record is not None

    async def keyless(self) -> bool:
        """See `Store`."""
        return False

    async def set_quota(self, owner: str, quota: Quota) -> None:
        """See `Store`."""
        self._quotas[owner] = quota

    async def quota(self, owner: str) -> Quota:
        """See `Store`."""
        return self._quotas.get(owner, Quota())

    async def close(self) -> None:
        """See `Store`."""
