"""One sandbox from its creation to its end, on a short lease that somebody must go on renewing.

Whoever made it may be killed at any moment. Then nobody renews, and the node ends the sandbox.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from coldframe.client import AsyncSandbox
from coldframe.protocol.errors import ColdframeError, SandboxGoneError, SandboxStateError

STOP_S = 60.0
"""For ending one, the wait for its creation included."""
_RENEWALS = 3
"""In the time of one lease: two may fail."""


class Life:
    """Holds a sandbox. `sandbox` is None until it is made."""

    def __init__(self, lease_s: float, logger: logging.Logger) -> None:
        self._lease_s, self._logger = lease_s, logger
        self._creation: asyncio.Task[AsyncSandbox] | None = None
        self._renewal: asyncio.Task[None] | None = None
        self.sandbox: AsyncSandbox | None = None

    async def begin(self, creation: Coroutine[Any, Any, AsyncSandbox]) -> AsyncSandbox:
        """Make the sandbox and keep its lease. Cancelled, `end` still knows what was begun.

        Raises:
            What the creation raises.
        """
        self._creation = asyncio.create_task(creation)
        self.sandbox = await asyncio.shield(self._creation)
        self._renewal = asyncio.create_task(self._renew(self.sandbox))
        return self.sandbox

    async def _renew(self, sandbox: AsyncSandbox) -> None:
        while True:
            await asyncio.sleep(self._lease_s / _RENEWALS)
            try:
                await sandbox.renew(self._lease_s)
            except (SandboxGoneError, SandboxStateError):
                return
            except ColdframeError as error:
                self._logger.warning("the lease of %s was not renewed: %s", sandbox.id, error)

    async def end(self, *, delete: bool) -> None:
        """Delete the sandbox, or leave it to its lease; takes STOP_S at most and raises nothing."""
        if self._renewal is not None:
            self._renewal.cancel()
        if self._creation is None:
            return
        ending = asyncio.create_task(self._end(self._creation, delete=delete))
        try:
            async with asyncio.timeout(STOP_S):
                await asyncio.shield(ending)
        except TimeoutError:
            self._logger.warning("a sandbox was not deleted within %g s; its lease ends it", STOP_S)
        except ColdframeError as error:
            self._logger.warning("a sandbox was not deleted; its lease ends it: %s", error)

    async def _end(self, creation: asyncio.Task[AsyncSandbox], *, delete: bool) -> None:
        try:
            sandbox = await creation
        except ColdframeError:
            return  # `begin` has told
        if delete:
            await sandbox.delete()
        else:
            sandbox.keep()
            self._logger.info("sandbox %s is left until its lease ends", sandbox.id)
