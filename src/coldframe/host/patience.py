"""Bound what may take for ever: a long job in a thread, and tasks that should end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any

from coldframe.protocol.errors import NotKnownError


class Patience:
    """Asked again and again by a job; may be told from another thread that nobody waits."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._deadline = time.monotonic() + limit_s

    def lose(self) -> None:
        """Nobody waits any more."""
        self._deadline = 0.0

    def check(self) -> None:
        """Raise NotKnownError once the time is up, or nobody waits any more."""
        if time.monotonic() > self._deadline:
            raise NotKnownError(
                f"the state of its files could not be told within {self._limit_s:g} s; "
                "the sandbox holds too much, or too deep a tree"
            )


async def wait_while_any_end(
    tasks: Iterable[asyncio.Future[Any]], pause_s: float
) -> set[asyncio.Future[Any]]:
    """Wait for tasks as long as one ends in each pause; return those that are left."""
    left = set(tasks)
    while left:
        before = len(left)
        _, left = await asyncio.wait(left, timeout=pause_s)
        if len(left) == before:
            break
    return left
