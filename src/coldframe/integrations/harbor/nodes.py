"""The node that the environments of one event loop share, and the images that they have built.

Harbor says neither when its first environment comes nor when its last one has gone. So the node is
opened for the first, and closed by its own task when the event loop ends and cancels it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from coldframe.client import AsyncSandboxClient
from coldframe.client._address import url_of_environment
from coldframe.rollouts.environment import ImageBuilder


@dataclass(frozen=True)
class NodeChoice:
    """Which node. Nothing said: COLDFRAME_URL, else one in this process."""

    url: str | None = None
    api_key: str | None = field(default=None, repr=False)
    home: str | None = None

    def client(self) -> AsyncSandboxClient:
        """Return a client of it."""
        local = self.home is not None or not (self.url or url_of_environment())
        return AsyncSandboxClient(
            url=self.url, api_key=self.api_key, home=self.home, in_process=local
        )


@dataclass(frozen=True)
class Place:
    """A node that is open."""

    client: AsyncSandboxClient
    images: ImageBuilder


_OPEN: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[NodeChoice, _Kept]] = WeakKeyDictionary()


class _Kept:
    """A node, and the task that holds it open."""

    def __init__(self, choice: NodeChoice) -> None:
        self.ready: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(self._keep(choice), name="coldframe node")

    async def _keep(self, choice: NodeChoice) -> None:
        try:
            async with choice.client() as client:
                images = ImageBuilder(client)
                try:
                    self.ready.set_result(Place(client, images))
                    await asyncio.Event().wait()
                finally:
                    await images.close()
        except Exception as error:
            if self.ready.done():
                raise
            self.ready.set_exception(error)


async def place(choice: NodeChoice) -> Place:
    """Return the node of this event loop; it is opened if it is not.

    Raises:
        CapabilityError, ServiceUnreachableError and others: it cannot be opened.
    """
    nodes = _OPEN.setdefault(asyncio.get_running_loop(), {})
    kept = nodes.get(choice)
    if kept is None or kept.task.done():
        kept = nodes[choice] = _Kept(choice)
    return await asyncio.shield(kept.ready)
