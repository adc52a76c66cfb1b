"""How the asynchronous SDK runs its core: on the caller's own event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from typing import Any, TypeAlias, TypeVar

from coldframe.client._content import AsyncContent, async_pieces
from coldframe.protocol.errors import ClientClosedError
from coldframe.protocol.pieces import close_source

T = TypeVar("T")

AsyncConnection: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]
"""A TCP connection into a sandbox."""


class AsyncRunner:
    """Awaits what it is given. Its twin for synchronous callers is `Portal`."""

    def __init__(self, final: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._final = final
        self._pid = os.getpid()
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        """The one that it was first used on: connections and a node in process live there."""

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what `work` returns.

        Raises:
            ClientClosedError: after `close`, in a forked child, or on another event loop.
        """
        if self._closed or os.getpid() != self._pid:
            work.close()
            raise ClientClosedError(closed_message(self._pid))
        try:
            self._require_own_loop()
        except ClientClosedError:
            work.close()
            raise
        return await work

    def _require_own_loop(self) -> None:
        running = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = running
        elif self._loop is not running:
            raise ClientClosedError(
                "this client belongs to another event loop"
                + (", which is closed" if self._loop.is_closed() else "")
                + ": open, use and close a client within one asyncio.run()"
            )

    async def run_with(
        self,
        make: Callable[[AsyncIterator[bytes]], Coroutine[Any, Any, T]],
        content: AsyncContent,
    ) -> T:
        """Run `make(pieces of content)`."""
        return await self.run(make(async_pieces(content)))

    async def iterate(self, source: AsyncIterator[T]) -> AsyncGenerator[T, None]:
        """Yield what `source` yields; close it when the caller stops."""
        try:
            while True:
                try:
                    item = await self.run(_next(source))
                except StopAsyncIteration:
                    return
                yield item
        finally:
            await close_source(source)

    async def connect(self, work: Coroutine[Any, Any, AsyncConnection]) -> AsyncConnection:
        """Return the connection that `work` opens."""
        return await self.run(work)

    async def close(self) -> None:
        """Run the final work once; later calls do nothing.

        Raises:
            ClientClosedError: on another event loop than it was used on.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._require_own_loop()
        self._closed = True
        await self._final()


async def _next(source: AsyncIterator[T]) -> T:
    return await anext(source)


def closed_message(pid: int) -> str:
    """Say why a client cannot be used."""
    if os.getpid() != pid:
        return f"this client belongs to process {pid}; a forked process opens one of its own"
    return "this client is closed"
