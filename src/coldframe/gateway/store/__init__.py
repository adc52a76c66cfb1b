"""Where a service keeps keys and quotas: a seam with one file per backend.

A backend is one module and one line of `STORES`; others' come by the entry point group
`coldframe.stores`. Nothing is imported before it is asked for.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from coldframe.gateway.store.base import KeyRecord, Store
from coldframe.protocol.errors import CapabilityError, InvalidRequestError
from coldframe.protocol.text import lacking

__all__ = ["ENTRY_POINTS", "STORES", "KeyRecord", "Store", "names", "open_store"]

ENTRY_POINTS = "coldframe.stores"
STORES = {
    "fake": "coldframe.gateway.store.fake:FakeStore",
    "redis": "coldframe.gateway.store.redis:RedisStore",
    "rediss": "coldframe.gateway.store.redis:RedisStore",
    "redis+unix": "coldframe.gateway.store.redis:RedisStore",
    "sqlite": "coldframe.gateway.store.sqlite:SqliteStore",
}
"""By the scheme of their URL."""

DEFAULT_FILE = "gateway.sqlite"


def names() -> tuple[str, ...]:
    """Every scheme that can be asked for."""
    found = {point.name for point in entry_points(group=ENTRY_POINTS)}
    return tuple(sorted(found | STORES.keys()))


@asynccontextmanager
async def open_store(url: str | None, home: Path) -> AsyncIterator[Store]:
    """Open the store of a URL for a block; None: a SQLite file in a service's home.

    Raises:
        InvalidRequestError: there is no store of that kind, or its URL is not one of its own.
        CapabilityError: its library is not there, or it cannot be opened.
    """
    chosen = url or f"sqlite:{home / DEFAULT_FILE}"
    store: Store = _load(chosen.partition(":")[0])(chosen)
    try:
        yield store
    finally:
        await store.close()


def _load(scheme: str) -> Any:
    target = STORES.get(scheme)
    if target is None:
        for point in entry_points(group=ENTRY_POINTS, name=scheme):
            target = point.value
    if target is None:
        raise InvalidRequestError(
            f"store {scheme[:40]!r} is not known: sqlite:PATH or redis://HOST:PORT ("
            f"{', '.join(names())})"
        )
    module, _, attribute = target.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise CapabilityError(lacking(f"store {scheme!r}", error, scheme[:5])) from error
