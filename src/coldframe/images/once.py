"""Let one builder at a time do a step, in this process or another; the others wait for it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from coldframe.images.locks import try_lock

_LOOK_AGAIN_S = 0.05


@asynccontextmanager
async def one_at_a_time(path: Path, waiting: Callable[[], None]) -> AsyncIterator[None]:
    """Hold the lock of a file that comes and goes with its holder.

    Nothing is waited for in a thread: those are few, and the holder needs them.

    Args:
        waiting: called once if somebody else holds it.
    """
    fd = _try(path)
    if fd is None:
        waiting()
    while fd is None:
        await asyncio.sleep(_LOOK_AGAIN_S)
        fd = _try(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # noqa: ASYNC240  # one call
        os.close(fd)


def remove_if_free(path: Path) -> None:
    """Remove what a holder left that was killed; one that somebody holds stays."""
    with suppress(FileNotFoundError):
        fd = try_lock(path, exclusive=True)
        if fd is not None:
            try:
                path.unlink()
            finally:
                os.close(fd)


def _try(path: Path) -> int | None:
    path.touch(0o600)
    try:
        return try_lock(path, exclusive=True)
    except FileNotFoundError:  # its holder has just ended
        return None
