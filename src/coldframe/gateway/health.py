"""Whether a sandbox can be made: one is made and ended."""

from __future__ import annotations

import asyncio
import time

from coldframe.gateway.models import Health
from coldframe.node.node import Node
from coldframe.protocol.errors import CapacityError, ColdframeError, CreateError
from coldframe.protocol.models import MIB, SandboxSpec

_PROBE_MEMORY = 64 * MIB


class HealthCheck:
    """Makes a sandbox now and then, however many ask."""

    def __init__(self, node: Node, good_for_s: float) -> None:
        self._node, self._good_for_s = node, good_for_s
        self._lock = asyncio.Lock()
        self._asked_at = float("-inf")
        self._health: Health | ColdframeError | None = None

    async def latest(self) -> Health:
        """Return how it went last, or raise why it did not."""
        async with self._lock:
            now = time.monotonic()
            if self._health is None or now - self._asked_at > self._good_for_s:
                try:
                    self._health = await self._make_one()
                except ColdframeError as error:
                    self._health = error
                self._asked_at = time.monotonic()
        if isinstance(self._health, ColdframeError):
            raise self._health
        return self._health

    async def _make_one(self) -> Health:
        full = self._node.load().full
        if full is not None:
            raise CapacityError(full)
        spec = SandboxSpec(image=await self._image(), memory_bytes=_PROBE_MEMORY, ttl_s=60.0)
        began = time.perf_counter()
        async with self._node.sandbox(spec):
            return Health(boot_s=time.perf_counter() - began)

    async def _image(self) -> str:
        known = await self._node.list_images()
        if known is None:
            return "any"
        if not known:
            raise CreateError(
                "the store has no image, so no sandbox can be made; make one: "
                "coldframe image bootstrap debian:bookworm"
            )
        return min(known, key=lambda image: image.size_bytes).name
