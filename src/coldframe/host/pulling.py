"""Let a thread read what an asynchronous iterator of an event loop gives."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import threading
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

T = TypeVar("T")
Read = Callable[[int], bytes]
"""Gives at most so many bytes, none at the end."""


async def pull(content: AsyncIterator[bytes], work: Callable[[Read], T]) -> T:
    """Run `work` on all of `content` in a thread of its own: it waits for whoever sends.

    Cancelled, it returns when the work has ended. What `content` raises comes out as it is.
    """
    loop = asyncio.get_running_loop()
    source = _Pulled(content, loop)
    done: asyncio.Future[T] = loop.create_future()
    job = functools.partial(_work, work, source, loop, done)
    threading.Thread(target=job, name="coldframe-pull", daemon=True).start()
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        source.abort()
        await asyncio.wait([done])
        done.exception()  # what it failed with does not matter any more
        raise


def _work(
    work: Callable[[Read], T],
    source: _Pulled,
    loop: asyncio.AbstractEventLoop,
    done: asyncio.Future[T],
) -> None:
    outcome: Callable[[], None]
    try:
        outcome = functools.partial(done.set_result, work(source.read))
    except _SenderError as error:
        outcome = functools.partial(done.set_exception, error.cause)
    except Exception as error:  # noqa: BLE001 (handed over to the waiting task)
        outcome = functools.partial(done.set_exception, error)
    with contextlib.suppress(RuntimeError):  # the loop has been closed meanwhile
        loop.call_soon_threadsafe(outcome)


class _AbortedError(Exception):
    """The work was given up by whoever asked for it."""


class _SenderError(Exception):
    """Whoever sends failed; wrapped, or it would pass for a failure of the work."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class _Pulled:
    """Lets a thread read from an asynchronous iterator of the loop."""

    def __init__(self, content: AsyncIterator[bytes], loop: asyncio.AbstractEventLoop) -> None:
        self._content, self._loop = content, loop
        self._rest = b""
        self._aborted = False
        self._task: asyncio.Task[bytes | None] | None = None

    def read(self, size: int) -> bytes:
        """Return at most `size` bytes, empty at the end. Called in the thread."""
        while not self._rest:
            pull = asyncio.run_coroutine_threadsafe(self._next(), self._loop)
            try:
                piece = pull.result()
            except concurrent.futures.CancelledError as error:
                raise _AbortedError from error
            except _AbortedError:
                raise
            except Exception as error:
                raise _SenderError(error) from error
            if piece is None:
                return b""
            self._rest = piece
        data, self._rest = self._rest[:size], self._rest[size:]
        return data

    def abort(self) -> None:
        """Make the thread's present or next read fail. Called in the loop."""
        self._aborted = True
        if self._task is not None:
            self._task.cancel()

    async def _next(self) -> bytes | None:
        if self._aborted:
            raise _AbortedError
        self._task = asyncio.current_task()
        try:
            return await anext(self._content, None)
        finally:
            self._task = None
