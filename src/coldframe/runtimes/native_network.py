"""What the egress of all native sandboxes of a node shares."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from ipaddress import IPv4Address, IPv6Address

from coldframe.host.egress.annex import Annex
from coldframe.host.egress.desk import Room
from coldframe.host.egress.flows import Budget
from coldframe.host.egress.gateway import Gateway
from coldframe.host.egress.netlink import RouteSocket
from coldframe.host.egress.resolver import Resolve, SystemResolver
from coldframe.host.egress.steering import Steering
from coldframe.protocol.errors import CapabilityError

_SPARES, _SPARE_AFTER_S = 8, 0.02
_DESCRIPTORS, _KEPT_DESCRIPTORS, _LEAST_CONNECTIONS = 1 << 17, 3000, 64


class NodeNetwork:
    """Its way to resolve names, its own addresses, programs loaded ahead, and room."""

    def __init__(self, resolve: Resolve | None = None) -> None:
        """`resolve` takes the place of the host's own way."""
        self._system = SystemResolver()
        self.resolve: Resolve = resolve or self._system
        self._routes: RouteSocket | None = None
        self._room: Room | None = None
        self._steering: list[Steering] = []
        """Some that are ready, once there has been egress at all."""
        self._timer: asyncio.TimerHandle | None = None
        self._loading: asyncio.Future[None] | None = None
        self._closed = False

    def take_steering(self) -> Steering:
        """Return a loaded program, and let others be loaded in an idle moment.

        Raises CapabilityError.
        """
        if self._timer is None and self._loading is None and len(self._steering) <= _SPARES // 2:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_SPARE_AFTER_S, self._begin_loading)
        return self._steering.pop() if self._steering else Gateway.load_steering()

    def _begin_loading(self) -> None:
        self._timer = None
        self._loading = asyncio.ensure_future(asyncio.to_thread(self._load_spares))
        self._loading.add_done_callback(self._loaded)

    def _load_spares(self) -> None:
        """Runs in a thread: the kernel checks a program for as long as half a create's rest."""
        with contextlib.suppress(CapabilityError):  # whoever needs one will be told
            while len(self._steering) < _SPARES and not self._closed:
                self._steering.append(Gateway.load_steering())

    def _loaded(self, loading: asyncio.Future[None]) -> None:
        self._loading = None
        if self._closed:
            self._close_spares()

    def _close_spares(self) -> None:
        while self._steering:
            self._steering.pop().close()

    @property
    def room(self) -> Room:
        """How many connections its sandboxes may have; each costs two descriptors somewhere."""
        if self._room is None:
            limit = _raise_descriptor_limit()
            most = max(_LEAST_CONNECTIONS, (limit - _KEPT_DESCRIPTORS) // 2)
            self._room = Room(Budget(most), Annex(limit))
        return self._room

    def is_own(self, address: IPv4Address | IPv6Address) -> bool:
        """Whether packets to an address stay on this machine."""
        if self._routes is None:
            self._routes = RouteSocket()
        try:
            return self._routes.is_own(address)
        except OSError:  # no way leads there: connecting will say so
            return False

    def close(self) -> None:
        """Give everything back."""
        self._system.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._closed = True
        self._close_spares()
        if self._room is not None:
            self._room.annex.close()
        if self._routes is not None:
            self._routes.close()
            self._routes = None


def _raise_descriptor_limit() -> int:
    """Ask for enough descriptors, and return how many there may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in ((_DESCRIPTORS, max(hard, _DESCRIPTORS)), (hard, hard)):
        if soft < wanted[0]:
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, wanted)
                return wanted[0]
    return soft
