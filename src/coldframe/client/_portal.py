"""How the synchronous SDK runs its core: on one event loop in one background thread.

Any number of threads may call at once. A caller waits on a lock, so a signal such as Ctrl-C
interrupts it; the work is then cancelled, and has ended when the exception leaves.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import os
import queue
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from importlib import import_module
from typing import Any, Generic, TypeAlias, TypeVar

from coldframe.client._content import Content, Pieces, SyncSource, async_pieces, whole_bytes
from coldframe.client._relay import relay
from coldframe.client._runner import AsyncConnection, closed_message
from coldframe.protocol.errors import ClientClosedError, InvalidRequestError
from coldframe.protocol.pieces import close_source

T = TypeVar("T")

Connection: TypeAlias = socket.socket
"""A TCP connection into a sandbox."""

_END = object()

_Wanted: TypeAlias = (
    "queue.SimpleQueue[tuple[Callable[[SyncSource], Any], asyncio.Future[Any]] | None]"
)
"""What is asked of a source of content, and who is to be told; None: the work has ended."""


class _Call(Generic[T]):
    """One piece of work on the loop, and the lock that its caller waits on."""

    def __init__(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> None:
        self._loop, self._work = loop, work
        self._context = contextvars.copy_context()
        self._task: asyncio.Task[T] | None = None
        self._ended = threading.Lock()
        self._ended.acquire()
        self.on_end: Callable[[], None] | None = None

    def submit(self) -> None:
        self._loop.call_soon_threadsafe(self._start)

    def _start(self) -> None:
        self._task = self._loop.create_task(self._work, context=self._context)
        self._task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[T] | None) -> None:
        self._ended.release()
        if self.on_end is not None:
            self.on_end()

    def wait(self) -> None:
        self._ended.acquire()

    def cancel(self) -> None:
        """Cancel the work, whether or not it was submitted, and wait until it has ended."""
        try:
            self._loop.call_soon_threadsafe(self._cancel)
        except RuntimeError:  # the loop is closed, and its tasks ended before
            self._work.close()
        else:
            self._ended.acquire()

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        else:
            self._work.close()
            self._end(None)

    def answer(self, told: asyncio.Future[Any], what: object) -> None:
        """Give the work what it has asked the source of content for."""
        self._loop.call_soon_threadsafe(_give, told, what)

    def result(self) -> T:
        """Return what the work returned, after `wait`."""
        assert self._task is not None
        try:
            return self._task.result()
        except asyncio.CancelledError:
            raise ClientClosedError("the client was closed during the call") from None


class Portal:
    """Runs coroutines for synchronous callers. Its twin is `AsyncRunner`."""

    def __init__(self, final: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._final = final
        self._pid = os.getpid()
        self._guard = threading.Lock()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what `work` returns.

        Raises:
            ClientClosedError: after or during `close`, or in a forked child.
            InvalidRequestError: called from the portal's own thread, which would never end.
        """
        call = self._prepare(work)
        try:
            self._submit(call)
            call.wait()
        except BaseException:
            call.cancel()
            raise
        return call.result()

    def _prepare(self, work: Coroutine[Any, Any, T]) -> _Call[T]:
        try:
            return _Call(self._open_loop(), work)
        except BaseException:
            work.close()
            raise

    def _submit(self, call: _Call[T]) -> None:
        with self._guard:  # so that nothing is submitted after the final work
            if self._closed:
                raise ClientClosedError(closed_message(self._pid))
            call.submit()

    def _open_loop(self) -> asyncio.AbstractEventLoop:
        if self._closed or os.getpid() != self._pid:
            raise ClientClosedError(closed_message(self._pid))
        if self._loop is None:
            with self._guard:
                if self._loop is None:
                    self._loop = self._start_thread()
        elif self._thread is threading.current_thread():
            raise InvalidRequestError("a synchronous call from inside the client's own thread")
        return self._loop

    def _start_thread(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=_serve, args=(loop,), name="coldframe-client", daemon=True
        )
        self._thread.start()
        _open_portals.add(self)
        return loop

    def run_with(
        self, make: Callable[[AsyncIterator[bytes]], Coroutine[Any, Any, T]], content: Content
    ) -> T:
        """Run `make(pieces of content)`; iterables are iterated in the caller's thread."""
        whole = whole_bytes(content)
        if whole is not None:
            return self.run(make(async_pieces(whole)))
        wanted: _Wanted = queue.SimpleQueue()
        source = SyncSource(content)
        call = self._prepare(make(_Pulled(wanted, source.repeats)))
        call.on_end = lambda: wanted.put(None)
        try:
            self._submit(call)
            while (asked := wanted.get()) is not None:
                do, told = asked
                call.answer(told, do(source))
            call.wait()
        except BaseException:
            call.cancel()
            raise
        return call.result()

    def iterate(self, source: AsyncIterator[T]) -> Generator[T, None, None]:
        """Yield what `source` yields, asking for one item at a time."""
        try:
            while (item := self.run(_next_or_end(source))) is not _END:
                yield item  # type: ignore[misc]  # _END is the only thing that is not a T
        finally:
            self._close_source(source)

    def _close_source(self, source: AsyncIterator[Any]) -> None:
        if self._thread is not threading.current_thread():
            with contextlib.suppress(ClientClosedError):
                self.run(close_source(source))
        elif self._loop is not None and not self._loop.is_closed():
            # The garbage collector ran in the portal's thread: waiting would be for ourselves.
            task = self._loop.create_task(close_source(source))
            _closing.add(task)
            task.add_done_callback(_closing.discard)

    def connect(self, work: Coroutine[Any, Any, AsyncConnection]) -> Connection:
        """Return a real socket that is relayed to the connection that `work` opens."""
        try:
            return self.run(_relayed(work))
        finally:
            work.close()  # where it never began, as on a closed client

    def close(self) -> None:
        """Run the final work, then end the thread. Later calls do nothing."""
        if os.getpid() != self._pid:
            return
        with self._guard:
            if self._closed:
                return
            if self._loop is None or self._thread is None:
                self._closed = True
                return
            call = _Call(self._loop, self._final())
            call.submit()
            self._closed = True
        _open_portals.discard(self)
        try:
            call.wait()
        except BaseException:
            call.cancel()
            raise
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        call.result()


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


async def _next_or_end(source: AsyncIterator[T]) -> T | object:
    return await anext(source, _END)


class _Pulled(Pieces):
    """What a source gives that is read in the caller's thread."""

    def __init__(self, wanted: _Wanted, repeats: bool) -> None:
        self._wanted, self.repeats = wanted, repeats

    async def _ask(self, do: Callable[[SyncSource], Any]) -> Any:
        told: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._wanted.put((do, told))
        return await told

    async def __anext__(self) -> bytes:
        piece: bytes | None = await self._ask(SyncSource.read)
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def rewind(self) -> bool:
        """See `Pieces`."""
        return bool(await self._ask(SyncSource.rewind))


def _give(told: asyncio.Future[Any], what: object) -> None:
    if not told.done():
        told.set_result(what)


async def _relayed(work: Coroutine[Any, Any, AsyncConnection]) -> socket.socket:
    reader, writer = await work
    ours, theirs = socket.socketpair()
    try:
        task = asyncio.get_running_loop().create_task(
            relay(reader, writer, *(await asyncio.open_connection(sock=ours)))
        )
    except BaseException:
        writer.close()
        ours.close()
        theirs.close()
        raise
    _closing.add(task)
    task.add_done_callback(_closing.discard)
    return theirs


_closing: set[asyncio.Task[None]] = set()
_open_portals: set[Portal] = set()
"""Held until they are closed: a client that was dropped still owns sandboxes."""


def _close_all() -> None:
    for portal in list(_open_portals):
        portal.close()


# Closing needs asyncio's executors, which are shut before atexit runs. Their hook is registered
# when their module is imported, and hooks run in reverse order: so that ours comes first.
import_module("concurrent.futures.thread")
getattr(threading, "_register_atexit", atexit.register)(_close_all)
