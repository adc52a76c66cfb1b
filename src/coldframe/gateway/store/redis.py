"""Keys and quotas in Redis, for several gateways.

A key is a hash, and a member of a set of all; a quota is a JSON text. What must be one step is a
script. Nothing is kept on this side: docs/adr/0055-several-gateways-over-one-node.md
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from redis import asyncio as client
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as LostError
from redis.exceptions import RedisError

from coldframe.gateway.store.base import KeyRecord
from coldframe.protocol.errors import InvalidRequestError, StoreUnreachableError
from coldframe.protocol.models import Quota

_KEY = "coldframe:key:"
_KEYS = "coldframe:keys"
_QUOTA = "coldframe:quota:"

_CONNECTIONS = 8
"""More would wait no less: a connection is held for one round trip, and costs a handshake."""
_ANSWER_S = 3.0
"""How long Redis may take, and how long a request waits for a connection to it."""
_CONNECT_S = 10.0
"""Several TLS connections at once take a loaded machine seconds."""

_ADD = """
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('HSET', KEYS[1], unpack(ARGV, 2))
redis.call('SADD', KEYS[2], ARGV[1])
return 1
"""
_REVOKE = """
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
redis.call('HSETNX', KEYS[1], 'revoked_at', ARGV[1])
return 1
"""


class RedisStore:
    """See `Store`. Connects when it is first asked; a lost connection is made anew."""

    waits = True

    def __init__(self, url: str) -> None:
        """Take `redis://HOST:PORT/DB`, `rediss://...` or `redis+unix:///PATH?db=DB`.

        Raises:
            InvalidRequestError: it is none of them.
        """
        try:
            pool = client.BlockingConnectionPool.from_url(
                url.removeprefix("redis+"),
                max_connections=_CONNECTIONS,
                timeout=_ANSWER_S,
                socket_timeout=_ANSWER_S,
                socket_connect_timeout=_CONNECT_S,
                # Once: a connection that was idle may have been lost long ago.
                retry=Retry(NoBackoff(), 1, supported_errors=(LostError,)),
            )
        except ValueError as error:
            raise InvalidRequestError(f"store: {error}") from error
        if pool.connection_class is client.SSLConnection:
            pool.connection_class = _TlsConnection
            pool.connection_kwargs["tls"] = client.SSLConnection(
                **pool.connection_kwargs
            ).ssl_context
        self._where = _shown(pool.connection_kwargs)
        self._redis: Any = client.Redis(connection_pool=pool)

    async def add_key(self, record: KeyRecord) -> None:
        """See `Store`."""
        fields = {
            "owner": record.owner,
            "scopes": " ".join(record.scopes),
            "digest": record.digest,
            "created_at": repr(record.created_at),
        }
        if record.revoked_at is not None:
            fields["revoked_at"] = repr(record.revoked_at)
        flat = [part for pair in fields.items() for part in pair]
        with self._told():
            added = await self._redis.eval(_ADD, 2, _KEY + record.id, _KEYS, record.id, *flat)
        if not added:
            raise ValueError(f"there is a key {record.id!r} already")

    async def find_key(self, key_id: str) -> KeyRecord | None:
        """See `Store`."""
        with self._told():
            return self._record(key_id, await self._redis.hgetall(_KEY + key_id))

    async def keys(self) -> tuple[KeyRecord, ...]:
        """See `Store`."""
        with self._told():
            ids = [one.decode() for one in await self._redis.smembers(_KEYS)]
            async with self._redis.pipeline(transaction=False) as pipe:
                for one in ids:
                    pipe.hgetall(_KEY + one)
                answers = await pipe.execute()
        found = map(self._record, ids, answers)
        records = [record for record in found if record is not None]
        return tuple(sorted(records, key=lambda record: (record.created_at, record.id)))

    async def revoke_key(self, key_id: str, at: float) -> bool:
        """See `Store`."""
        with self._told():
            return bool(await self._redis.eval(_REVOKE, 1, _KEY + key_id, repr(at)))

    async def keyless(self) -> bool:
        """See `Store`: without keys it may as well have been emptied."""
        return False

    async def set_quota(self, owner: str, quota: Quota) -> None:
        """See `Store`."""
        with self._told():
            await self._redis.set(_QUOTA + owner, quota.model_dump_json())

    async def quota(self, owner: str) -> Quota:
        """See `Store`."""
        with self._told():
            text = await self._redis.get(_QUOTA + owner)
        try:
            return Quota() if text is None else Quota.model_validate_json(text)
        except ValueError as error:
            raise self._nonsense(f"the quota of {owner!r}") from error

    async def close(self) -> None:
        """See `Store`."""
        with self._told():
            await self._redis.aclose(close_connection_pool=True)

    def _record(self, key_id: str, fields: dict[bytes, bytes]) -> KeyRecord | None:
        if not fields:
            return None
        try:
            revoked_at = fields.get(b"revoked_at")
            return KeyRecord(
                key_id,
                fields[b"owner"].decode(),
                tuple(fields[b"scopes"].decode().split()),
                fields[b"digest"],
                float(fields[b"created_at"]),
                None if revoked_at is None else float(revoked_at),
            )
        except (KeyError, ValueError) as error:
            raise self._nonsense(f"key {key_id!r}") from error

    def _nonsense(self, what: str) -> StoreUnreachableError:
        return StoreUnreachableError(
            f"{what} in Redis at {self._where} is not as Coldframe writes it: use a database that "
            "nothing else writes to"
        )

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except (RedisError, OSError, TimeoutError) as error:
            raise StoreUnreachableError(
                f"keys cannot be checked: Redis at {self._where} does not answer "
                f"({type(error).__name__}); what runs goes on, try again when it is back"
            ) from error


class _TlsConnection(client.SSLConnection):
    """One by TLS with the context of its store.

    A context reads every authority of the machine, which keeps the event loop for 60 ms: when each
    connection had its own, several at once were late for one another.
    """

    def __init__(self, *, tls: Any, **options: Any) -> None:
        super().__init__(**options)
        self.ssl_context = tls


def _shown(parts: dict[str, Any]) -> str:
    """Where it is, without the password that its URL may have."""
    place = parts.get("path") or f"{parts.get('host', 'localhost')}:{parts.get('port', 6379)}"
    return f"{place}/{parts.get('db', 0)}"
