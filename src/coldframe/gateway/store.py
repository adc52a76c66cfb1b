"""What a service keeps on disk: keys and quotas. The seam, and SQLite behind it.

Every read sees what was written before it, by any process: a key that is revoked is refused from
the next request on.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from coldframe.protocol.errors import CapabilityError
from coldframe.protocol.models import Quota

FILE = "gateway.sqlite"
_BUSY_S = 5.0
_QUOTA = ("sandboxes", "cpu", "memory_bytes", "disk_bytes")
_SCHEMA = """
CREATE TABLE IF NOT EXISTS keys (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    scopes TEXT NOT NULL,
    digest BLOB NOT NULL,
    created_at REAL NOT NULL,
    revoked_at REAL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS quotas (
    owner TEXT PRIMARY KEY,
    sandboxes INTEGER,
    cpu REAL,
    memory_bytes INTEGER,
    disk_bytes INTEGER
) WITHOUT ROWID;
"""


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
    """Where keys and quotas are."""

    def add_key(self, record: KeyRecord) -> None: ...

    def find_key(self, key_id: str) -> KeyRecord | None: ...

    def keys(self) -> tuple[KeyRecord, ...]:
        """Return all keys, revoked ones too, in order of their making."""

    def revoke_key(self, key_id: str, at: float) -> bool:
        """Return whether there is such a key; revoking one twice keeps the first time."""

    def any_keys(self) -> bool:
        """Whether there ever was a key."""

    def set_quota(self, owner: str, quota: Quota) -> None: ...

    def quota(self, owner: str) -> Quota: ...

    def close(self) -> None: ...


class SqliteStore:
    """See `Store`. One file, readable by its owner only."""

    def __init__(self, home: Path) -> None:
        """Open or make the file in a home.

        Raises:
            CapabilityError: it cannot be written.
        """
        path = home / FILE
        try:
            home.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
            self._database = sqlite3.connect(
                path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
            )
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.executescript(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise CapabilityError(
                f"{path} cannot be written ({error}); run as the owner of COLDFRAME_HOME"
            ) from error

    def add_key(self, record: KeyRecord) -> None:
        """See `Store`."""
        self._database.execute(
            "INSERT INTO keys VALUES (?, ?, ?, ?, ?, ?)",
            (
                record.id,
                record.owner,
                " ".join(record.scopes),
                record.digest,
                record.created_at,
                record.revoked_at,
            ),
        )

    def find_key(self, key_id: str) -> KeyRecord | None:
        """See `Store`."""
        row = self._database.execute("SELECT * FROM keys WHERE id = ?", (key_id,)).fetchone()
        return None if row is None else _record(row)

    def keys(self) -> tuple[KeyRecord, ...]:
        """See `Store`."""
        rows = self._database.execute("SELECT * FROM keys ORDER BY created_at, id")
        return tuple(_record(row) for row in rows)

    def revoke_key(self, key_id: str, at: float) -> bool:
        """See `Store`."""
        done = self._database.execute(
            "UPDATE keys SET revoked_at = coalesce(revoked_at, ?) WHERE id = ?", (at, key_id)
        )
        return done.rowcount > 0

    def any_keys(self) -> bool:
        """See `Store`."""
        return self._database.execute("SELECT 1 FROM keys LIMIT 1").fetchone() is not None

    def set_quota(self, owner: str, quota: Quota) -> None:
        """See `Store`."""
        self._database.execute(
            "INSERT OR REPLACE INTO quotas VALUES (?, ?, ?, ?, ?)",
            (owner, quota.sandboxes, quota.cpu, quota.memory_bytes, quota.disk_bytes),
        )

    def quota(self, owner: str) -> Quota:
        """See `Store`."""
        row = self._database.execute("SELECT * FROM quotas WHERE owner = ?", (owner,)).fetchone()
        return Quota() if row is None else Quota(**dict(zip(_QUOTA, row[1:], strict=True)))

    def close(self) -> None:
        """See `Store`."""
        self._database.close()


@contextmanager
def open_store(home: Path) -> Iterator[Store]:
    """Open the store of a home for a block."""
    store = SqliteStore(home)
    try:
        yield store
    finally:
        store.close()


def _record(row: tuple[str, str, str, bytes, float, float | None]) -> KeyRecord:
    key_id, owner, scopes, digest, created_at, revoked_at = row
    return KeyRecord(key_id, owner, tuple(scopes.split()), digest, created_at, revoked_at)
