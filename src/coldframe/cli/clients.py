"""A client for one command: on the machine's node, or the service that COLDFRAME_URL names."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from coldframe.client import AsyncSandboxClient

T = TypeVar("T")


def with_client(work: Callable[[AsyncSandboxClient], Awaitable[T]]) -> T:
    """Return what `work` does with a client that is closed afterwards."""

    async def run() -> T:
        from coldframe.client import AsyncSandboxClient

        async with AsyncSandboxClient() as client:
            return await work(client)

    return asyncio.run(run())
