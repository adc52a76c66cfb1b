"""The bridge from synchronous callers to the event loop: threads, signals, forks, iterators."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from coldframe.client._portal import Portal
from coldframe.protocol.errors import ClientClosedError, InvalidRequestError


class Log:
    """What happened on the loop."""

    def __init__(self) -> None:
        self.events: list[str] = []

    async def final(self) -> None:
        self.events.append("final")


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def portal(log: Log) -> Iterator[Portal]:
    portal = Portal(log.final)
    yield portal
    portal.close()


async def double(value: int) -> int:
    await asyncio.sleep(0)
    return 2 * value


def test_run_many_threads_each_gets_its_own_answer(portal: Portal) -> None:
    """A harness calls from a pool; answers must not be mixed."""
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda i: portal.run(double(i)), range(500)))
    assert answers == [2 * i for i in range(500)]


def test_run_exception_is_the_callers(portal: Portal) -> None:
    """What fails on the loop is raised where it was asked for, as itself."""

    async def fail() -> None:
        raise FileNotFoundError("x")

    with pytest.raises(FileNotFoundError, match="x"):
        portal.run(fail())


def test_run_sees_the_callers_context(portal: Portal) -> None:
    """Ids that are bound for logging must not be lost at the bridge."""
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")
    variable.set("mine")

    async def read() -> str:
        return variable.get()

    assert portal.run(read()) == "mine"


def test_run_interrupted_cancels_the_work_and_waits_for_its_end(portal: Portal, log: Log) -> None:
    """After Ctrl-C nothing may go on behind the caller's back."""
    begun = threading.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            log.events.append("cancelled")
            raise

    def interrupt() -> None:
        begun.wait()
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        portal.run(work())
    assert log.events == ["cancelled"]
    thread.join()


def test_run_inside_its_own_thread_is_refused(portal: Portal) -> None:
    """It would wait for itself for ever."""

    async def nested() -> int:
        return portal.run(double(1))

    with pytest.raises(InvalidRequestError, match="own thread"):
        portal.run(nested())


def test_run_after_close_is_refused(portal: Portal, log: Log) -> None:
    """A late call must fail at once, not hang."""
    portal.run(double(1))
    portal.close()
    portal.close()

    with pytest.raises(ClientClosedError):
        portal.run(double(1))
    assert log.events == ["final"]


def test_close_during_a_call_ends_the_call(portal: Portal) -> None:
    """Another thread's call must not hang when the client is closed under it."""
    begun = threading.Event()

    async def forever() -> None:
        begun.set()
        await asyncio.get_running_loop().create_future()

    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(portal.run, forever())
        begun.wait()
        portal.close()
        with pytest.raises(ClientClosedError):
            call.result(10)


def test_run_in_forked_child_is_refused(portal: Portal, log: Log) -> None:
    """The child has no thread behind the portal; closing there must not end the parent's."""
    portal.run(double(1))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            portal.close()
            portal.run(double(1))
        except ClientClosedError as error:
            code = 0 if "process" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert portal.run(double(2)) == 4
    assert log.events == []


async def count(log: Log) -> AsyncIterator[int]:
    try:
        for number in range(1000):
            log.events.append(f"made {number}")
            yield number
    finally:
        log.events.append("closed")


def test_iterate_asks_for_one_item_at_a_time(portal: Portal, log: Log) -> None:
    """Running ahead would hold 2 GiB of a file in memory."""
    numbers = portal.iterate(count(log))
    assert next(numbers) == 0
    assert next(numbers) == 1
    numbers.close()
    assert log.events == ["made 0", "made 1", "closed"]


def test_iterate_dropped_iterator_is_closed(portal: Portal, log: Log) -> None:
    """`break` out of a loop over output must end the command."""
    for _ in portal.iterate(count(log)):
        break
    gc.collect()
    portal.run(double(1))
    assert log.events == ["made 0", "closed"]


def test_run_with_iterates_content_in_the_callers_thread(portal: Portal) -> None:
    """A generator may use what belongs to its thread, and may block."""
    threads = set()

    def content() -> Iterator[bytes]:
        for _ in range(3):
            threads.add(threading.current_thread())
            yield b"xy"

    async def total(pieces: AsyncIterator[bytes]) -> int:
        return sum([len(piece) async for piece in pieces])

    assert portal.run_with(total, content()) == 6
    assert threads == {threading.current_thread()}


def test_run_with_failing_content_raises_its_own_error(portal: Portal, log: Log) -> None:
    """A local read error is not a fault of the sandbox; the write must not go through."""

    def content() -> Iterator[bytes]:
        yield b"x"
        raise OSError("disk")

    async def store(pieces: AsyncIterator[bytes]) -> None:
        async for _ in pieces:
            pass
        log.events.append("stored")

    with pytest.raises(OSError, match="disk"):
        portal.run_with(store, content())
    assert log.events == []


def test_run_with_text_pieces_is_refused(portal: Portal) -> None:
    """A file opened as text would be written in an unknown encoding."""

    async def store(pieces: AsyncIterator[bytes]) -> None:
        async for _ in pieces:
            pass

    with pytest.raises(InvalidRequestError, match="'rb'"):
        portal.run_with(store, ["text"])  # type: ignore[list-item]


def test_exit_of_the_program_runs_the_final_work() -> None:
    """A script that forgets to close must not leave sandboxes; executors still work then."""
    script = """
import asyncio
from coldframe.client._portal import Portal
async def final():
    await asyncio.to_thread(print, "final")
async def nothing():
    pass
Portal(final).run(nothing())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, timeout=60
    )
    assert (done.stdout, done.stderr, done.returncode) == (b"final\n", b"", 0)
