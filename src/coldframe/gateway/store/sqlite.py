"""Keys and quotas in one SQLite file, readable by its owner only. The default.

Write-ahead logging, so that a read never waits; a call takes some 10 µs and is made on the event
loop.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

from coldframe.gateway.store.base import KeyRecord
from coldframe.protocol.errors import (
    CapabilityError,
    InvalidRequestError,
    StoreUnreachableError,
)
from coldframe.protocol.models import Quota

_BUSY_S = 5.0
_MAPPED_BYTES = 64 << 10
"""More than the files that write-ahead logging begins with."""
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


class SqliteStore:
    """See `Store`."""

    waits = False

    def __init__(self, url: str) -> None:
        """Open or make the file of `sqlite:PATH`.

        Raises:
            InvalidRequestError: there is no path in it.
            CapabilityError: it cannot be written.
        """
        path = Path(url.removeprefix("sqlite:"))
        if not path.name or "//" in url or path.is_dir():
            raise InvalidRequestError(f"store {url!r}: write sqlite:PATH, the path of a file")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
            _require_room(path.parent)
            self._database = sqlite3.connect(
                path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
            )
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.executescript(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise CapabilityError(
                f"{path} cannot be written ({error}); run as its owner, make room there, or name "
                "another file by COLDFRAME_HOME or --store"
            ) from error

    async def add_key(self, record: KeyRecord) -> None:
        """See `Store`."""
        row = (
            *(record.id, record.owner, " ".join(record.scopes)),
            *(record.digest, record.created_at, record.revoked_at),
        )
        with self._told() as database:
            try:
                database.execute("INSERT INTO keys VALUES (?, ?, ?, ?, ?, ?)", row)
            except sqlite3.IntegrityError as error:
                raise ValueError(f"there is a key {record.id!r} already") from error

    async def find_key(self, key_id: str) -> KeyRecord | None:
        """See `Store`."""
        with self._told() as database:
            found = database.execute("SELECT * FROM keys WHERE id = ?", (key_id,)).fetchone()
        return None if found is None else _record(found)

    async def keys(self) -> tuple[KeyRecord, ...]:
        """See `Store`."""
        with self._told() as database:
            rows = database.execute("SELECT * FROM keys ORDER BY created_at, id").fetchall()
        return tuple(_record(row) for row in rows)

    async def revoke_key(self, key_id: str, at: float) -> bool:
        """See `Store`."""
        with self._told() as database:
            done = database.execute(
                "UPDATE keys SET revoked_at = coalesce(revoked_at, ?) WHERE id = ?", (at, key_id)
            )
        return done.rowcount > 0

    async def keyless(self) -> bool:
        """See `Store`."""
        with self._told() as database:
            return database.execute("SELECT 1 FROM keys LIMIT 1").fetchone() is None

    async def set_quota(self, owner: str, quota: Quota) -> None:
        """See `Store`."""
        amounts = (getattr(quota, name) for name in _QUOTA)
        with self._told() as database:
            database.execute(
                "INSERT OR REPLACE INTO quotas VALUES (?, ?, ?, ?, ?)", (owner, *amounts)
            )

    async def quota(self, owner: str) -> Quota:
        """See `Store`."""
        with self._told() as database:
            row = database.execute("SELECT * FROM quotas WHERE owner = ?", (owner,)).fetchone()
        return Quota() if row is None else Quota(**dict(zip(_QUOTA, row[1:], strict=True)))

    async def close(self) -> None:
        """See `Store`."""
        self._database.close()

    @contextmanager
    def _told(self) -> Iterator[sqlite3.Connection]:
        try:
            yield self._database
        except sqlite3.Error as error:
            raise StoreUnreachableError(
                f"the file of keys cannot be read or written: {error}"
            ) from error


def _require_room(directory: Path) -> None:
    """Raise OSError where SQLite would be killed: it maps a file beside its own.

    Blocks of less than a page leave holes in it, and to write in one on a full disk is SIGBUS.
    """
    with TemporaryFile(dir=directory) as trial:
        os.posix_fallocate(trial.fileno(), 0, _MAPPED_BYTES)


def _record(row: tuple[str, str, str, bytes, float, float | None]) -> KeyRecord:
    key_id, owner, scopes, digest, created_at, revoked_at = row
    return KeyRecord(key_id, owner, tuple(scopes.split()), digest, created_at, revoked_at)
