"""How a service stops: it ends its sandboxes, leaves them to the next process, or is replaced.

SIGTERM, SIGINT: let commands and requests come to their end, then end every sandbox. A second one
does not wait: whatever outlives this process is left to the next. SIGQUIT: the same as the first,
without waiting for commands. SIGUSR1: leave. SIGHUP: execute the program anew, as it is installed.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any

from coldframe.gateway.server import Doors
from coldframe.node.sandboxes import CloseReport
from coldframe.protocol.errors import CapabilityError

log = logging.getLogger("coldframe.gateway")


class Stop(Enum):
    """What a signal asks for."""

    END = auto()
    END_NOW = auto()
    LEAVE = auto()
    REPLACE = auto()


_SIGNALS = {
    signal.SIGTERM: Stop.END,
    signal.SIGINT: Stop.END,
    signal.SIGQUIT: Stop.END_NOW,
    signal.SIGUSR1: Stop.LEAVE,
    signal.SIGHUP: Stop.REPLACE,
}


class _Asked:
    """What was asked for last, and how often."""

    def __init__(self, doors: Doors) -> None:
        self._doors = doors
        self._event = asyncio.Event()
        self.stop: Stop | None = None
        self.again = False

    def note(self, stop: Stop) -> None:
        if self.stop in {Stop.END, Stop.END_NOW}:
            if stop is Stop.END_NOW:
                self.stop = stop
            elif stop is Stop.END:
                self.again = True
            self._doors.hurry()
            return
        self.stop = stop
        if stop is Stop.END_NOW:
            self._doors.hurry()
        self._event.set()

    async def wait(self) -> None:
        await self._event.wait()

    def dismiss(self) -> None:
        self.stop = None
        self._event.clear()


async def until_stopped(doors: Doors, *, idle_exit_s: float | None = None) -> CloseReport | None:
    """Serve until a signal says how to stop, and stop so. None: to be replaced (`Doors.handover`).

    With `idle_exit_s` it also ends when nobody has used it for so long.
    """
    asked = _Asked(doors)
    with _listening(asked):
        while True:
            idle = doors.until_idle(idle_exit_s) if idle_exit_s else None
            await _first(asked.wait(), idle)
            if asked.stop is not Stop.REPLACE or await _replaceable(doors):
                break
            asked.dismiss()
        if asked.stop in {Stop.LEAVE, Stop.REPLACE}:
            await doors.leave()
            return None if asked.stop is Stop.REPLACE else CloseReport()
        await doors.close()
        if asked.again and asked.stop is not Stop.END_NOW:
            await doors.leave()
            return CloseReport()
        return await doors.end()


@contextmanager
def _listening(asked: _Asked) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number, stop in _SIGNALS.items():
        loop.add_signal_handler(number, asked.note, stop)
    try:
        yield
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


async def _replaceable(doors: Doors) -> bool:
    try:
        await asyncio.to_thread(doors.require_successor)
    except CapabilityError as error:
        log.error("not upgraded: %s", error)
        return False
    return True


async def _first(*ways: Coroutine[Any, Any, Any] | None) -> None:
    tasks = [asyncio.ensure_future(way) for way in ways if way is not None]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
