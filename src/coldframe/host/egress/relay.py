"""Carry bytes between two sockets without copying them: splice through a pipe.

Back-pressure is the kernel's: nothing is read while the other side takes nothing. An end of file
is passed on for its direction alone. A pipe is held only while it has something in it. Imports
the standard library only: the processes of `carrier` run it too.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from coldframe.host.egress.flows import Flow

_RESET = struct.pack("ii", 1, 0)
_CHUNK = 1 << 18
_SLICE_S = 0.0005
"""In one turn of the event loop, for all that have more to carry: the loop is everybody's."""
_SPARE_PIPES, _MOST_PIPES, _LARGE_PIPES = 64, 512, 64
"""Beyond so many at once bytes are copied, a little at a time: a pipe is two descriptors."""
_COPIED = 1 << 14
_FLAGS = os.SPLICE_F_NONBLOCK | os.SPLICE_F_MOVE


class Meter(Protocol):
    """Says how much may be carried."""

    @property
    def delay_s(self) -> float:
        """When to ask again after nothing was granted."""

    def grant(self, wanted: int) -> int:
        """Return how many bytes may be carried now."""

    def spend(self, count: int) -> None:
        """Note bytes that were carried."""


class Metered(Protocol):
    """Has a meter, perhaps another one each time."""

    @property
    def meter(self) -> Meter:
        """The one of now."""


class _Pipes:
    """Empty pipes, kept for the next use, whichever thread's loop that is."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spare: list[tuple[int, int]] = []
        self._taken = 0

    def take(self) -> tuple[int, int] | None:
        """Return a pipe, None if there are too many."""
        with self._lock:
            if self._taken >= _MOST_PIPES:
                return None
            self._taken += 1
            if self._spare:
                return self._spare.pop()
        try:
            pipe = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:  # no descriptor is left
            with self._lock:
                self._taken -= 1
            return None
        if self._taken <= _LARGE_PIPES:  # what they hold is the kernel's memory
            with contextlib.suppress(OSError):  # a limit of the machine; slower is fine
                fcntl.fcntl(pipe[1], fcntl.F_SETPIPE_SZ, _CHUNK)
        return pipe

    def give_back(self, pipe: tuple[int, int], *, empty: bool) -> None:
        with self._lock:
            self._taken -= 1
            if empty and len(self._spare) < _SPARE_PIPES:
                self._spare.append(pipe)
                return
        for end in pipe:
            os.close(end)


_pipes = _Pipes()


class _Turns:
    """Lets those of one event loop that have more to carry take turns, sandbox by sandbox."""

    def __init__(self) -> None:
        # Without the loop, which would then be kept by what goes with it.
        self._waiting: dict[Meter, deque[Direction]] = {}
        self._scheduled = False

    def add(self, direction: Direction, meter: Meter) -> None:
        """Let it carry on in its turn. All directions of one sandbox have one meter."""
        self._waiting.setdefault(meter, deque()).append(direction)
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        self._scheduled = False
        end = time.monotonic() + _SLICE_S
        for _ in range(sum(map(len, self._waiting.values()))):
            meter, queue = next(iter(self._waiting.items()))
            # To the end: the next sandbox has its turn before this one has another.
            del self._waiting[meter]
            direction = queue.popleft()
            if queue:
                self._waiting[meter] = queue
            direction.pump()
            if time.monotonic() >= end:
                break
        if self._waiting:
            self._schedule()


_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, _Turns] = WeakKeyDictionary()


def turns_of(loop: asyncio.AbstractEventLoop) -> _Turns:
    """Those of an event loop; they go with it."""
    found = _turns.get(loop)
    if found is None:
        found = _turns[loop] = _Turns()
    return found


class Direction:
    """One way of a connection. Belongs to the running event loop."""

    def __init__(
        self,
        source: socket.socket,
        target: socket.socket,
        metered: Metered,
        count: Callable[[int], None],
    ) -> None:
        """Its meter is asked for anew each time: a new policy brings another one."""
        self._source, self._target = source, target
        # The loop is given numbers: of a socket asyncio makes a text each time.
        self._source_fd, self._target_fd = source.fileno(), target.fileno()
        self._metered, self._count = metered, count
        self._loop = asyncio.get_running_loop()
        self._turns = turns_of(self._loop)
        self._pipe: tuple[int, int] | None = None
        self._held = self._moved = 0
        self._copied = b""
        """What is held without a pipe."""
        self._timer: asyncio.Handle | None = None
        self._reading = self._writing = False
        self.halted = False
        """Whether nothing more is to be carried, until `stop` says so to the event loop too."""
        self.ended: asyncio.Future[None] = self._loop.create_future()
        """Done at the end of file; raises OSError when either side broke."""
        self.pump()

    def stop(self) -> None:
        """Carry nothing more."""
        self._watch()
        if self._timer is not None:
            self._timer.cancel()
        if self._pipe is not None:
            _pipes.give_back(self._pipe, empty=self._held == 0)
            self._pipe = None
        if not self.ended.done():
            self.ended.cancel()

    def let_go(self) -> bool:
        """Stop, so that somebody else can go on with the same sockets.

        False: it holds something, or has ended.
        """
        if self._held or self.ended.done():
            return False
        self.stop()
        return True

    def _watch(self, *, read: bool = False, write: bool = False) -> None:
        if self._reading != read:
            self._reading = read
            if read:
                self._loop.add_reader(self._source_fd, self.pump)
            else:
                self._loop.remove_reader(self._source_fd)
        if self._writing != write:
            self._writing = write
            if write:
                self._loop.add_writer(self._target_fd, self.pump)
            else:
                self._loop.remove_writer(self._target_fd)

    def pump(self) -> None:
        """Carry what can be carried now, a chunk or little more."""
        enough = self._moved + _CHUNK
        try:
            # Little is followed by nothing, mostly: to find that out now saves a turn of the loop.
            while self._held or self._moved < enough:
                if self.halted or self.ended.done() or not self._turn():
                    return
        except OSError as error:
            if not self.ended.done():
                self.ended.set_exception(error)
            self.stop()
            return
        self._watch()
        self._turns.add(self, self._metered.meter)

    def _turn(self) -> bool:
        """Move one chunk; False: there is something to wait for."""
        if not self._held:
            return self._fill()
        try:
            self._held -= self._drain()
        except BlockingIOError:
            self._watch(write=True)
            return False
        return True

    def _drain(self) -> int:
        """Move what is held to the target; raises BlockingIOError when it takes nothing."""
        if self._pipe is not None:
            return os.splice(self._pipe[0], self._target_fd, self._held, flags=_FLAGS)
        moved = self._target.send(self._copied)
        self._copied = self._copied[moved:]
        return moved

    def _take_in(self, granted: int) -> int:
        """Take bytes from the source; raises BlockingIOError when it has none yet."""
        if self._pipe is not None:
            return os.splice(self._source_fd, self._pipe[1], granted, flags=_FLAGS)
        self._copied = self._source.recv(min(granted, _COPIED))
        return len(self._copied)

    def _fill(self) -> bool:
        granted = self._metered.meter.grant(_CHUNK)
        if self.ended.done():
            return False
        if not granted:
            self._watch()
            self._timer = self._loop.call_later(self._metered.meter.delay_s, self.pump)
            return False
        if self._pipe is None:
            self._pipe = _pipes.take()
        try:
            self._held = self._take_in(granted)
        except BlockingIOError:
            self._release()
            self._watch(read=True)
            return False
        if not self._held:
            self._finish()
            return False
        self._moved += self._held
        self._metered.meter.spend(self._held)
        self._count(self._held)
        return True

    def _release(self) -> None:
        if self._pipe is not None:
            _pipes.give_back(self._pipe, empty=True)
            self._pipe = None

    def _finish(self) -> None:
        with contextlib.suppress(OSError):  # the other side has gone: its own direction tells
            self._target.shutdown(socket.SHUT_WR)
        self.ended.set_result(None)
        self.stop()


def upward(flow: Flow, upstream: socket.socket) -> Direction:
    """Carry what comes from the sandbox."""
    made = Direction(flow.client, upstream, flow, flow.count_out)
    flow.stops.append(made.stop)
    flow.directions.append(made)
    flow.watch(made.ended)
    return made


def downward(flow: Flow, upstream: socket.socket) -> Direction:
    """Carry what goes to the sandbox."""
    made = Direction(upstream, flow.client, flow, flow.count_in)
    flow.stops.append(made.stop)
    flow.directions.append(made)
    flow.watch(made.ended)
    return made


async def both(*directions: Direction) -> None:
    """Wait for the end of both ways. Raises OSError as soon as one breaks."""
    await asyncio.gather(*(direction.ended for direction in directions))


def close(one: socket.socket, *, reset: bool = False) -> None:
    """Close a connection, with a reset if what it carried is not to be trusted as whole."""
    if reset:
        with contextlib.suppress(OSError):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    one.close()
