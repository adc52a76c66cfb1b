"""Processes that carry connections for the node once its own descriptors become scarce.

A process may have so many descriptors, and on many machines that cannot be raised. A connection
costs two of them wherever it is carried; here they are another process's.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import itertools
import socket
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import coldframe
from coldframe.host import forks
from coldframe.host.egress.carrier import ADOPT, CUT, ENDED, MOST_NUMBERS
from coldframe.host.egress.flows import Budget, Flow

MOST_PROCESSES = 4
_KEPT_DESCRIPTORS = 1200
"""Of a process: for its pipes and itself."""
_MOST_ENDS = 1024
_END_S, _AGAIN_S = 2.0, 0.0005
_START = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); "
    "from coldframe.host.egress.carrier import main; main()"
)


@dataclass(frozen=True, slots=True)
class _End:
    bytes_out: int
    bytes_in: int
    broken: bool


class Annex:
    """All such processes of a node; none is started before the first connection needs it."""

    def __init__(self, descriptors: int) -> None:
        """`descriptors` is how many each process may have."""
        self._each = max(1, (descriptors - _KEPT_DESCRIPTORS) // 2)
        self.budget = Budget(self._each * MOST_PROCESSES)
        self._processes: list[_Process] = []

    @property
    def pids(self) -> tuple[int, ...]:
        """Processes that run now."""
        return tuple(one.pid for one in self._processes)

    async def adopt(self, flow: Flow) -> Far:
        """Let one of them carry a connection; its sockets are then no longer ours.

        Raises OSError: there is none to be had, and the connection is as it was.
        """
        return await self._with_room().adopt(flow)

    def _with_room(self) -> _Process:
        self._processes = [one for one in self._processes if one.alive]
        for one in self._processes:
            if one.carried < self._each:
                return one
        self._processes.append(_Process())
        return self._processes[-1]

    def close(self) -> None:
        """End them all, and wait for that."""
        while self._processes:
            self._processes.pop().close()


class _Process:
    """One of them. Belongs to the running event loop."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair(
            socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK
        )
        forks.own_socket(self._channel)
        root = str(Path(coldframe.__file__).parents[1])
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", _START, root, str(theirs.fileno())],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
        except BaseException:
            self._channel.close()
            raise
        self._ends: dict[int, asyncio.Future[_End]] = {}
        self._numbers = itertools.count()
        self._cuts: list[int] = []
        """What could not be sent yet."""
        self._owed: set[int] = set()
        """What it was told to cut, and has not yet said to have ended."""
        self._heard = 0
        self._timer: asyncio.TimerHandle | None = None
        self._watchdog: asyncio.TimerHandle | None = None
        self._sending = asyncio.Lock()
        self._writable = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._channel.fileno(), self._listen)
        self.alive = True

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def carried(self) -> int:
        """How many connections it has."""
        return len(self._ends)

    async def adopt(self, flow: Flow) -> Far:
        """See `Annex.adopt`."""
        assert flow.upstream is not None
        number = next(self._numbers)
        ended: asyncio.Future[_End] = self._loop.create_future()
        self._ends[number] = ended
        try:
            await self._send(ADOPT, number, flow.client, flow.upstream)
        except BaseException:
            self._ends.pop(number, None)
            raise
        flow.far = True
        flow.client.close()
        flow.upstream.close()
        far = Far(self, number, ended)
        flow.stops.append(far.cut)
        return far

    async def _send(self, order: int, number: int, *sockets: socket.socket) -> None:
        rights = array.array("i", [one.fileno() for one in sockets])
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
        async with self._sending:
            while True:
                try:
                    self._channel.sendmsg([struct.pack("=QQ", order, number)], ancillary)
                    return
                except BlockingIOError:
                    await self._room()

    async def _room(self) -> None:
        """Wait until the channel takes something, or is no more."""
        self._writable.clear()
        self._loop.add_writer(self._channel.fileno(), self._writable.set)
        try:
            await self._writable.wait()
        finally:
            if self.alive:
                self._loop.remove_writer(self._channel.fileno())

    def cut(self, number: int) -> None:
        """Have both sides of a connection reset."""
        if number in self._ends and number not in self._owed and self.alive:
            self._owed.add(number)
            self._cuts.append(number)
            self._send_cuts()
            if self._watchdog is None:
                self._watchdog = self._loop.call_later(_END_S, self._require_progress, self._heard)

    def _require_progress(self, heard: int) -> None:
        """End a process that was told to let go of connections and does not."""
        self._watchdog = None
        if self._owed and heard == self._heard:
            self.lose()
        elif self._owed:
            self._watchdog = self._loop.call_later(_END_S, self._require_progress, self._heard)

    def _send_cuts(self) -> None:
        while self._cuts and self.alive:
            some = self._cuts[:MOST_NUMBERS]
            try:
                self._channel.send(struct.pack(f"={1 + len(some)}Q", CUT, *some))
            except BlockingIOError:
                if self._timer is None:
                    self._timer = self._loop.call_later(_AGAIN_S, self._send_cuts_again)
                return
            except OSError:
                self.lose()
                return
            del self._cuts[: len(some)]

    def _send_cuts_again(self) -> None:
        self._timer = None
        self._send_cuts()

    def _listen(self) -> None:
        for _ in range(_MOST_ENDS):
            try:
                message = self._channel.recv(ENDED.size)
            except BlockingIOError:
                return
            except OSError:
                message = b""
            if not message:
                self.lose()
                return
            number, out, into, broken = ENDED.unpack(message)
            self._heard += 1
            self._owed.discard(number)
            ended = self._ends.pop(number, None)
            if ended is not None:
                ended.set_result(_End(out, into, bool(broken)))

    def lose(self) -> None:
        """It has ended, or must: so have its connections."""
        if not self.alive:
            return
        self.alive = False
        for timer in (self._timer, self._watchdog):
            if timer is not None:
                timer.cancel()
        self._loop.remove_reader(self._channel.fileno())
        self._loop.remove_writer(self._channel.fileno())
        self._channel.close()
        self._process.kill()
        self._process.wait()
        self._writable.set()  # now, since who waits may be of a loop that is closed
        ends, self._ends = self._ends, {}
        for ended in ends.values():
            ended.set_result(_End(0, 0, broken=True))

    def close(self) -> None:
        """End it, and wait for that."""
        with contextlib.suppress(RuntimeError):  # who waits is of a loop that is closed
            self.lose()


class Far:
    """A connection that another process carries."""

    def __init__(self, process: _Process, number: int, ended: asyncio.Future[_End]) -> None:
        self._process, self._number, self._ended = process, number, ended

    def cut(self) -> None:
        """Have both sides reset."""
        self._process.cut(self._number)

    async def end(self, flow: Flow) -> None:
        """Wait for the end of both ways; what they carried is the flow's then.

        Whoever is cancelled returns when the other process has let go of it.
        Raises OSError: either side broke.
        """
        try:
            await asyncio.shield(self._ended)
        except asyncio.CancelledError:
            self.cut()
            await asyncio.wait({self._ended})  # it ends, or its process does
            raise
        finally:
            if self._ended.done():
                flow.count_out(self._ended.result().bytes_out)
                flow.count_in(self._ended.result().bytes_in)
        if self._ended.result().broken:
            flow.broken = True
            raise ConnectionResetError("either side broke")
