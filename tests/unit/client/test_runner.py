"""The asynchronous client's own event loop: on another one it is refused, by a typed error."""

from __future__ import annotations

import asyncio
import os

import pytest

from coldframe.client._runner import AsyncRunner
from coldframe.protocol.errors import ClientClosedError


async def _nothing() -> None:
    """Both the work and the final work."""


async def _refused(runner: AsyncRunner) -> list[str]:
    said = []
    for use in (runner.run(_nothing()), runner.close()):
        with pytest.raises(ClientClosedError) as error:
            await use
        said.append(str(error.value))
    return said


def test_client_is_refused_on_an_event_loop_that_is_not_its_own() -> None:
    """Its connections are on the first one: a raw RuntimeError names no remedy."""
    remedy = "open, use and close a client within one asyncio.run()"
    runner = AsyncRunner(_nothing)
    other = asyncio.new_event_loop()
    with asyncio.Runner() as own:
        own.run(runner.run(_nothing()))
        beside = other.run_until_complete(_refused(runner))
    assert beside == [f"this client belongs to another event loop: {remedy}"] * 2
    closed = other.run_until_complete(_refused(runner))
    assert closed == [f"this client belongs to another event loop, which is closed: {remedy}"] * 2
    other.close()


def test_client_is_refused_in_a_forked_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both would read from one connection, and each get the other's answers."""
    runner = AsyncRunner(_nothing)
    of_parent = os.getpid()
    asyncio.run(runner.run(_nothing()))
    monkeypatch.setattr(os, "getpid", lambda: of_parent + 1)
    with pytest.raises(ClientClosedError, match=f"belongs to process {of_parent}"):
        asyncio.run(runner.run(_nothing()))
