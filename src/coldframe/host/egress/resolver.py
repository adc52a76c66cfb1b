"""Resolve allowed names as the host does, and remember what was answered.

An answer is pinned: a name keeps its addresses for a while whatever the world says meanwhile, and
only an address that was answered can later be reached by that name.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address

from coldframe.host.egress.addresses import Address, canonical

Resolve = Callable[[str], Awaitable[Sequence[str]]]
"""Gives the addresses of a name, none if it has none. Raises OSError if nobody can tell."""

PIN_S = 600.0
_NEGATIVE_S = 2.0
_REMEMBERED_S = 6 * 3600.0
"""Programs hold on to an address for longer than they should."""
_MOST_NAMES = 4096
_MOST_ADDRESSES = 32
_MOST_PENDING = 64
_THREADS = 8
_TIMEOUT_S = 20.0


class SystemResolver:
    """The host's own way to resolve names: its files, its servers. Threads wait for it."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None

    async def __call__(self, name: str) -> Sequence[str]:
        """See `Resolve`."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_THREADS, "coldframe-resolve")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, _getaddrinfo, name)

    def close(self) -> None:
        """Let the threads end."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


def _getaddrinfo(name: str) -> Sequence[str]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
    except socket.gaierror as error:
        if error.errno in (socket.EAI_NONAME, socket.EAI_NODATA):
            return ()
        raise
    return [str(entry[4][0]) for entry in found]


class TooManyLookupsError(OSError):
    """The sandbox asks for more names at once than it may."""


class Names:
    """What one sandbox was told of names."""

    def __init__(self, resolve: Resolve) -> None:
        self._resolve = resolve
        self._pins: OrderedDict[str, tuple[float, tuple[Address, ...]]] = OrderedDict()
        self._owners: OrderedDict[Address, dict[str, float]] = OrderedDict()
        self._pending: dict[str, asyncio.Future[tuple[Address, ...]]] = {}

    def names_of(self, address: Address) -> tuple[str, ...]:
        """Return the names that were answered with an address, the latest first."""
        owners = self._owners.get(address)
        if not owners:
            return ()
        now = time.monotonic()
        return tuple(name for name, until in reversed(owners.items()) if until > now)

    def siblings(self, names: tuple[str, ...], address: Address) -> list[Address]:
        """Return the other addresses that were answered with one of these names."""
        if not names:
            return []
        found = (other for other, owners in self._owners.items() if names[0] in owners)
        return [other for other in found if other != address]

    def pin(self, name: str, address: Address) -> None:
        """Remember that an address was told as one of a name's."""
        owners = self._owners.setdefault(address, {})
        self._owners.move_to_end(address)
        owners.pop(name, None)
        owners[name] = time.monotonic() + _REMEMBERED_S
        if len(owners) > _MOST_NAMES:
            del owners[next(iter(owners))]
        if len(self._owners) > _MOST_NAMES:
            self._owners.popitem(last=False)

    async def lookup(self, name: str) -> tuple[Address, ...]:
        """Return a name's addresses; the same ones for PIN_S seconds.

        Raises:
            TooManyLookupsError: too many names at once.
            OSError: nobody can tell.
        """
        kept = self._pins.get(name)
        if kept is not None and kept[0] > time.monotonic():
            return kept[1]
        pending = self._pending.get(name)
        if pending is None:
            if len(self._pending) >= _MOST_PENDING:
                raise TooManyLookupsError("too many names are being resolved at once")
            pending = asyncio.ensure_future(self._ask(name))
            self._pending[name] = pending
            pending.add_done_callback(lambda _: self._pending.pop(name, None))
            # Whoever asked may have gone when it fails.
            pending.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(pending)

    async def _ask(self, name: str) -> tuple[Address, ...]:
        found: dict[Address, None] = {}
        async with asyncio.timeout(_TIMEOUT_S):
            for text in await self._resolve(name):
                with contextlib.suppress(ValueError):  # an address with a scope
                    found[canonical(ip_address(text))] = None
        addresses = tuple(found)[:_MOST_ADDRESSES]
        self._pins.pop(name, None)
        kept_s = PIN_S if addresses else _NEGATIVE_S
        self._pins[name] = (time.monotonic() + kept_s, addresses)
        if len(self._pins) > _MOST_NAMES:
            self._pins.popitem(last=False)
        return addresses

    def close(self) -> None:
        """Give up what is being asked."""
        for pending in list(self._pending.values()):
            pending.cancel()
