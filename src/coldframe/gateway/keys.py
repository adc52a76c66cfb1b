"""API keys: `cf_ID_SECRET`. The store has the digest of the secret, so it cannot give one away.

A secret has 256 random bits, which no dictionary helps against: a plain digest is enough, and a
slow one would let anybody load the service with wrong keys.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Iterable

from coldframe.gateway.identity import Identity, Scope
from coldframe.gateway.store import KeyRecord, Store
from coldframe.protocol.errors import InvalidRequestError, NotAuthenticatedError
from coldframe.protocol.models import Quota

_KEY = re.compile(r"cf_([0-9a-f]{12})_([0-9a-f]{64})")
_OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,62}")
_NO_DIGEST = bytes(32)


async def create_key(store: Store, owner: str, scopes: Iterable[Scope]) -> str:
    """Make a key, keep its digest, and return it: the only time that it can be seen.

    Raises:
        InvalidRequestError: the owner's name has other characters than it may.
    """
    _check_owner(owner)
    key_id, secret = secrets.token_hex(6), secrets.token_hex(32)
    chosen = tuple(sorted(scope.value for scope in set(scopes)))
    await store.add_key(KeyRecord(key_id, owner, chosen, _digest(secret), time.time()))
    return f"cf_{key_id}_{secret}"


async def revoke_key(store: Store, key_or_id: str) -> str:
    """Refuse a key from now on, also in services that run; return its id.

    Raises:
        InvalidRequestError: there is no such key.
    """
    match = _KEY.fullmatch(key_or_id)
    key_id = match.group(1) if match else key_or_id
    if not await store.revoke_key(key_id, time.time()):
        raise InvalidRequestError(f"there is no key {key_id!r}; see coldframe key ls")
    return key_id


async def set_quota(store: Store, owner: str, quota: Quota) -> None:
    """Set what an owner's live sandboxes may be limited to, from the next create on.

    Raises:
        InvalidRequestError: the owner's name has other characters than it may.
    """
    _check_owner(owner)
    await store.set_quota(owner, quota)


def _check_owner(owner: str) -> None:
    if _OWNER.fullmatch(owner) is None:
        raise InvalidRequestError(f"owner {owner!r}: 1 to 63 characters of [A-Za-z0-9._@-]")


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("ascii")).digest()


async def authenticate(store: Store, authorization: str | None) -> Identity:
    """Return whose key a request carries (`Authorization: Bearer KEY`).

    Raises:
        StoreUnreachableError: it cannot be told.
        NotAuthenticatedError: none, or none that is valid. Unknown and revoked keys and wrong
            secrets get the same words, and take the same time but for looking up an id.
    """
    scheme, _, key = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not key:
        raise NotAuthenticatedError(
            "a key is needed: set COLDFRAME_API_KEY, or send Authorization: Bearer KEY"
        )
    match = _KEY.fullmatch(key.strip())
    record = await store.find_key(match.group(1)) if match else None
    given = _digest(match.group(2)) if match else _NO_DIGEST
    same = hmac.compare_digest(given, record.digest if record else _NO_DIGEST)
    if not (match and record and same) or record.revoked_at is not None:
        raise NotAuthenticatedError("this key is not valid: unknown, wrong or revoked")
    scopes = frozenset(Scope(scope) for scope in record.scopes)
    owner = None if Scope.ADMIN in scopes else record.owner
    return Identity(owner, scopes, record.id, keyed=True)
