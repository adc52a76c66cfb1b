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
from dataclasses import dataclass, field
from ipaddress import ip_address

from coldframe.host.egress.addresses import Address, canonical

Resolve = Callable[[str], Awaitable[Sequence[str]]]
"""Gives the addresses of a name, none if it has none. Raises OSError if nobody can tell."""

PIN_S = 600.0
_NEGATIVE_S = 2.0
_REMEMBERED_S = 6 * 3600.0
"""Programs hold on to an address for longer than they should."""
_MOST_NAMES = 4096
_MOST_ADDRESSES, _MOST_TOLD = 32, 64
_MOST_PENDING, _MOST_ASKED = 64, 4
"""Names of one sandbox that wait, and that the host is asked for at once."""
_THREADS = 128
"""Each waits for one name; a name server that does not answer holds one for many seconds."""
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


@dataclass(slots=True)
class _Known:
    """What was answered for one name."""

    answer: tuple[Address, ...] = ()
    pinned_until: float = 0.0
    told: dict[Address, float] = field(default_factory=dict)
    """Addresses that it may be reached at, and until when; the latest last."""


class Names:
    """What one sandbox was told of names."""

    def __init__(self, resolve: Resolve) -> None:
        self._resolve = resolve
        self._known: OrderedDict[str, _Known] = OrderedDict()
        """The name that was asked for last is the last."""
        self._owners: dict[Address, dict[str, None]] = {}
        """The other way round: names by address, the latest last."""
        self._pending: dict[str, asyncio.Future[tuple[Address, ...]]] = {}
        self._asking = asyncio.Semaphore(_MOST_ASKED)

    def names_of(self, address: Address) -> tuple[str, ...]:
        """Return the names that were answered with an address, the latest first."""
        owners = self._owners.get(address)
        if not owners:
            return ()
        now = time.monotonic()
        return tuple(name for name in reversed(owners) if self._known[name].told[address] > now)

    def siblings(self, names: tuple[str, ...], address: Address) -> list[Address]:
        """Return the other addresses that were answered with the first of these names."""
        known = self._known.get(names[0]) if names else None
        return [other for other in known.told if other != address] if known else []

    def pin(self, name: str, address: Address) -> None:
        """Remember that an address was told as one of a name's."""
        known = self._known.setdefault(name, _Known())
        self._known.move_to_end(name)
        known.told.pop(address, None)
        known.told[address] = time.monotonic() + _REMEMBERED_S
        if len(known.told) > _MOST_TOLD:
            self._disown(name, next(iter(known.told)))
        owners = self._owners.setdefault(address, {})
        owners.pop(name, None)
        owners[name] = None
        self._forget_oldest()

    def _disown(self, name: str, address: Address) -> None:
        del self._known[name].told[address]
        owners = self._owners[address]
        del owners[name]
        if not owners:
            del self._owners[address]

    def _forget_oldest(self) -> None:
        while len(self._known) > _MOST_NAMES:
            oldest = next(iter(self._known))
            for address in tuple(self._known[oldest].told):
                self._disown(oldest, address)
            del self._known[oldest]

    async def lookup(self, name: str) -> tuple[Address, ...]:
        """Return a name's addresses; the same ones for PIN_S seconds.

        Raises:
            TooManyLookupsError: too many names at once.
            OSError: nobody can tell.
        """
        known = self._known.get(name)
        if known is not None and known.pinned_until > time.monotonic():
            return known.answer
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
        async with asyncio.timeout(_TIMEOUT_S), self._asking:
            for text in await self._resolve(name):
                with contextlib.suppress(ValueError):  # an address with a scope
                    found[canonical(ip_address(text))] = None
        known = self._known.setdefault(name, _Known())
        self._known.move_to_end(name)
        known.answer = tuple(found)[:_MOST_ADDRESSES]
        known.pinned_until = time.monotonic() + (PIN_S if known.answer else _NEGATIVE_S)
        self._forget_oldest()
        return known.answer

    def close(self) -> None:
        """Give up what is being asked."""
        for pending in list(self._pending.values()):
            pending.cancel()
