"""A client for one command: on the machine's node, or the service that COLDFRAME_URL names."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from coldframe.protocol.errors import InvalidRequestError

if TYPE_CHECKING:
    from coldframe.client import AsyncSandboxClient

T = TypeVar("T")


def require_lasting_node() -> None:
    """Refuse a node that would end with this command, and its sandboxes with it.

    Raises:
        InvalidRequestError: the environment asks for one.
    """
    from coldframe.client._address import IN_PROCESS, url_of_environment

    if url_of_environment() == IN_PROCESS:
        raise InvalidRequestError(
            f"COLDFRAME_URL={IN_PROCESS} asks for a node that ends with this command: unset it, or "
            "use coldframe run"
        )


def with_client(work: Callable[[AsyncSandboxClient], Awaitable[T]]) -> T:
    """Return what `work` does with a client that is closed afterwards.

    Raises:
        InvalidRequestError: the environment asks for a node that would end with this command.
    """
    require_lasting_node()

    async def run() -> T:
        from coldframe.client import AsyncSandboxClient

        async with AsyncSandboxClient() as client:
            return await work(client)

    return asyncio.run(run())
