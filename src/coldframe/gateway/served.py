"""What stands behind the doors: a node of this process."""

from __future__ import annotations

from typing import Protocol

from starlette.types import ASGIApp

from coldframe.gateway.app import make_app
from coldframe.gateway.context import Service
from coldframe.gateway.express import Door, Express
from coldframe.gateway.meters import Meters
from coldframe.gateway.protocol import Shortcut
from coldframe.gateway.proxy import PortProxy
from coldframe.gateway.settings import GatewaySettings
from coldframe.gateway.tenants import Quotas
from coldframe.node.node import Node
from coldframe.node.sandboxes import CloseReport


class Served(Protocol):
    """An application, and what the doors need to know to close."""

    by_url: ASGIApp
    """What is below `/p/`, for whoever has a URL: not asked who that is."""
    meters: Meters

    @property
    def app(self) -> ASGIApp:
        """Answers what is not below that."""

    def express(self, door: Door) -> Shortcut | None:
        """Return what answers past the application by a door; None: nothing does."""

    def reached_at(self, origin: str) -> None:
        """Note where it is served on TCP, such as `http://127.0.0.1:8080`."""

    @property
    def spawner_protocol(self) -> int | None:
        """What keeps the sandboxes speaks it; None: there is none to go on with."""

    def running(self) -> int:
        """How many commands would be cut short by a stop."""

    def live(self) -> bool:
        """Whether there are sandboxes that a stop would end."""

    def answer_now(self) -> None:
        """Let those that wait for something be answered at once."""

    async def close(self) -> CloseReport:
        """End everything that ends with this process. Twice is fine."""

    async def leave(self) -> int | None:
        """Leave everything to another process, if it can be; else as `close`.

        Returns a lock that is still held, so that nobody else goes on with it.
        """


class ServedNode:
    """A node that is started, served by the routes of `app`."""

    def __init__(self, node: Node, quotas: Quotas, settings: GatewaySettings) -> None:
        self._node = node
        self.service = Service(node, quotas, settings)
        self.app = make_app(self.service)
        self.by_url: ASGIApp = PortProxy(self.service)
        self.meters = self.service.meters

    def express(self, door: Door) -> Shortcut | None:
        """See `Served`."""
        return Express(self.app, door)

    def reached_at(self, origin: str) -> None:
        """See `Served`."""
        self.service.origin = origin

    @property
    def spawner_protocol(self) -> int | None:
        """See `Served`."""
        told = self._node.capabilities().details.get("spawner_protocol")
        return told if isinstance(told, int) else None

    def running(self) -> int:
        """See `Served`."""
        return self._node.load().running

    def live(self) -> bool:
        """See `Served`."""
        return bool(self._node.load().live)

    def answer_now(self) -> None:
        """See `Served`."""
        self.service.polls.stop()

    async def close(self) -> CloseReport:
        """See `Served`."""
        return await self._node.close()

    async def leave(self) -> int | None:
        """See `Served`."""
        return await self._node.leave()
