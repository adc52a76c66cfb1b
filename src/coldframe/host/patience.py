"""Bound a long job in a thread: by time, and by whether anybody still waits for it."""

from __future__ import annotations

import time

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
