"""Who is being answered, how often, and how long ago somebody was."""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Receive, Scope, Send

from coldframe.gateway.meters import Meters


class Activity:
    """Whether anybody is being answered, and when somebody was."""

    def __init__(self) -> None:
        self.requests = 0
        self._latest = time.monotonic()

    def begin(self) -> None:
        """A request has come."""
        self.requests += 1

    def end(self) -> None:
        """It has been answered."""
        self.requests -= 1
        self._latest = time.monotonic()

    def touch(self) -> None:
        """Something else shows that the node is in use."""
        self._latest = time.monotonic()

    def idle_s(self) -> float:
        """For how long nobody has been answered; 0 while somebody is."""
        return 0.0 if self.requests else time.monotonic() - self._latest


class Counting:
    """Counts requests, and answers by status."""

    def __init__(self, app: ASGIApp, meters: Meters, activity: Activity) -> None:
        self._app, self._meters, self._activity = app, meters, activity

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything on."""
        self._activity.begin()
        try:
            await self._count(scope, receive, send)
        finally:
            self._activity.end()

    async def _count(self, scope: Scope, receive: Receive, send: Send) -> None:

        async def counted(message: object) -> None:
            assert isinstance(message, dict)
            if message["type"] == "http.response.start":
                self._meters.count(message["status"])
            await send(message)

        await self._app(scope, receive, counted)
