"""Results to come, for which any number of tasks wait without owning them.

To cancel one that waits changes nothing for the others, nor for what is waited for. So does
`asyncio.shield`, which takes two turns of the event loop from the result to whoever waits; this
takes one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from types import TracebackType
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Outcome(Generic[T]):
    """One result or error to come. Await it, as often as needed. Belongs to one event loop."""

    __slots__ = ("_callbacks", "_done", "_error", "_result", "_traceback", "_waiters")

    def __init__(self) -> None:
        self._done = False
        self._result: T
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None
        # Nothing that is empty: a node keeps thousands that are done.
        self._waiters: dict[asyncio.Future[None], None] | None = None
        self._callbacks: dict[Callable[[Outcome[T]], None], None] | None = None

    def done(self) -> bool:
        """Whether it is known."""
        return self._done

    def cancelled(self) -> bool:
        """Whether what should have led to it was cancelled."""
        return isinstance(self._error, asyncio.CancelledError)

    def exception(self) -> BaseException | None:
        """The error of one that is done; None: it has a result."""
        return self._error

    def result(self) -> T:
        """The result of one that is done. Raises its error."""
        if self._error is not None:
            raise self._error.with_traceback(self._traceback)
        if not self._done:
            raise asyncio.InvalidStateError("it is not known yet")
        return self._result

    def set_result(self, result: T) -> None:
        """Say how it came out, once."""
        self._result = result
        self._settle()

    def set_exception(self, error: BaseException) -> None:
        """Say that it failed. That nobody asks is fine."""
        self._error, self._traceback = error, error.__traceback__
        self._settle()

    def then(self, callback: Callable[[Outcome[T]], None]) -> None:
        """Call `callback` in the moment it is known, before any that wait go on."""
        if self._done:
            callback(self)
            return
        if self._callbacks is None:
            self._callbacks = {}
        self._callbacks[callback] = None

    def forget(self, callback: Callable[[Outcome[T]], None]) -> None:
        """Do not call `callback`, nor hold it any longer. Twice is fine."""
        if self._callbacks is not None:
            self._callbacks.pop(callback, None)

    def settled(self) -> Outcome[T]:
        """The same of one that is done, without what led to it."""
        alone: Outcome[T] = Outcome()
        if self._error is None:
            alone.set_result(self.result())
        else:
            alone.set_exception(self._error)
        return alone

    def __await__(self) -> Generator[Any, None, T]:
        if not self._done:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            if self._waiters is None:
                self._waiters = {}
            self._waiters[waiter] = None
            try:
                yield from waiter
            finally:
                if self._waiters is not None:
                    self._waiters.pop(waiter, None)
        return self.result()

    def _settle(self) -> None:
        if self._done:
            raise asyncio.InvalidStateError("it is known already")
        self._done = True
        waiters, self._waiters = self._waiters, None
        for waiter in waiters or ():
            if not waiter.done():
                waiter.set_result(None)
        callbacks, self._callbacks = self._callbacks, None
        for callback in callbacks or ():
            try:
                callback(self)
            except Exception as error:  # noqa: BLE001 - the loop reports it, as for a future's
                message = f"a callback of an outcome failed: {callback!r}"
                told = {"message": message, "exception": error}
                asyncio.get_running_loop().call_exception_handler(told)


class Undertaking(Outcome[T]):
    """A coroutine that runs to its end in a task of its own, whoever stops waiting for it."""

    __slots__ = ("task",)

    def __init__(self, coroutine: Coroutine[Any, Any, T], *, at_once: bool = False) -> None:
        """Start it, in the next turn of the event loop or before this returns.

        What starts at once must not ask for the current task before it first waits: up to there
        that is still its maker's.
        """
        super().__init__()
        run = self._run(coroutine)
        self.task: asyncio.Task[None] = asyncio.create_task(_Begun(run) if at_once else run)
        """Ends with it, and fails only by being cancelled."""
        if not at_once:
            self.task.add_done_callback(lambda _: self._note_unbegun(coroutine))

    async def _run(self, coroutine: Coroutine[Any, Any, T]) -> None:
        try:
            result = await coroutine
        except BaseException as error:
            self.set_exception(error)
            if not isinstance(error, Exception):
                raise
        else:
            self.set_result(result)

    def _note_unbegun(self, coroutine: Coroutine[Any, Any, T]) -> None:
        """A task that is cancelled before its first step never enters its coroutine."""
        if not self._done:
            coroutine.close()
            self.set_exception(asyncio.CancelledError())


class _Begun(Coroutine[Any, Any, None]):
    """A coroutine that has taken its first step; the rest is a task's.

    So a task that is cancelled before its own first step cancels it where it waits.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._coroutine = coroutine
        self._waits_for: list[Any] = []
        """What the first step ended in, until the task has heard of it."""
        self._ended = False
        try:
            self._waits_for.append(coroutine.send(None))
        except StopIteration:
            self._ended = True

    def send(self, value: Any) -> Any:
        """See `Coroutine.send`."""
        if self._ended:
            raise StopIteration
        return self._waits_for.pop() if self._waits_for else self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        """See `Coroutine.throw`."""
        if self._ended:
            raise StopIteration
        self._waits_for.clear()
        return self._coroutine.throw(*error)

    def close(self) -> None:
        """See `Coroutine.close`."""
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, None]:
        return self._coroutine.__await__()
