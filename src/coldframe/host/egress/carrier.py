"""A process that only carries: connections beyond those that the node has descriptors for.

It is given pairs of sockets by the node, carries bytes between them and says how many when both
ways have ended. It decides nothing, and ends with the node. Imports the standard library only,
so that it starts fast and stays small.

Wire: SEQPACKET. From the node ADOPT number (with two descriptors: client, upstream) and CUT
numbers; to it ENDED number, bytes out, bytes in, whether a side broke.
"""

from __future__ import annotations

import array
import asyncio
import os
import resource
import socket
import struct
import sys
from collections import deque

from coldframe.host.egress import relay

ADOPT, CUT = 1, 2
MOST_NUMBERS = 512
"""In one message."""
ENDED = struct.Struct("=QQQB")
_NOBODY = 65534
_DESCRIPTOR = array.array("i").itemsize
_ROOM = socket.CMSG_SPACE(2 * _DESCRIPTOR)


class _Unlimited:
    """The meter of what has no limits."""

    delay_s = 1.0

    def grant(self, wanted: int) -> int:
        return wanted

    def spend(self, count: int) -> None:
        """Nothing is counted against anything."""


class _Pair:
    """One connection."""

    def __init__(self, number: int, client: int, upstream: int, carrier: _Carrier) -> None:
        self.meter: relay.Meter = _Unlimited()
        self._number, self._carrier = number, carrier
        self._sockets = socket.socket(fileno=client), socket.socket(fileno=upstream)
        self._counts = [0, 0]
        one, other = self._sockets
        for each in self._sockets:
            each.setblocking(False)
        self._ways = (
            relay.Direction(one, other, self, lambda n: self._count(0, n)),
            relay.Direction(other, one, self, lambda n: self._count(1, n)),
        )
        for way in self._ways:
            way.ended.add_done_callback(self._way_ended)

    def _count(self, way: int, count: int) -> None:
        self._counts[way] += count

    def _way_ended(self, way: asyncio.Future[None]) -> None:
        if way.cancelled():
            return
        if way.exception() is not None:
            self.end(broken=True)
        elif all(one.ended.done() for one in self._ways):
            self.end(broken=False)

    def stop(self) -> None:
        """Carry nothing more."""
        for way in self._ways:
            way.stop()

    def end(self, *, broken: bool) -> None:
        """Close both sides and say so, once."""
        if not self._carrier.pairs.pop(self._number, None):
            return
        self.stop()
        for one in self._sockets:
            relay.close(one, reset=broken)
        self._carrier.say(ENDED.pack(self._number, *self._counts, broken))


class _Carrier:
    def __init__(self, channel: socket.socket) -> None:
        self.pairs: dict[int, _Pair] = {}
        self.over = asyncio.Event()
        self._channel = channel
        self._unsaid: deque[bytes] = deque()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(channel.fileno(), self._listen)

    def _listen(self) -> None:
        try:
            data, ancillary, flags, _ = self._channel.recvmsg(8 * (MOST_NUMBERS + 1), _ROOM)
        except BlockingIOError:
            return
        except OSError:
            data, ancillary, flags = b"", [], 0
        if not data:
            self._loop.remove_reader(self._channel.fileno())
            self.over.set()
            return
        order, *numbers = struct.unpack(f"={len(data) // 8}Q", data)
        given = array.array("i")
        for _, _, content in ancillary:
            given.frombytes(content[: len(content) // _DESCRIPTOR * _DESCRIPTOR])
        if order == CUT:
            cut = [self.pairs[number] for number in numbers if number in self.pairs]
            for pair in cut:
                pair.stop()  # none carries anything more while others are being closed
            for pair in cut:
                pair.end(broken=True)
        elif len(given) == 2 and not flags & socket.MSG_CTRUNC:
            self.pairs[numbers[0]] = _Pair(numbers[0], given[0], given[1], self)
        else:  # this process has no descriptor left
            for fd in given:
                socket.close(fd)
            self.say(ENDED.pack(numbers[0], 0, 0, True))

    def say(self, message: bytes) -> None:
        self._unsaid.append(message)
        self._say_all()

    def _say_all(self) -> None:
        while self._unsaid:
            try:
                self._channel.send(self._unsaid[0])
            except BlockingIOError:
                self._loop.add_writer(self._channel.fileno(), self._say_all)
                return
            except OSError:
                self.over.set()
                return
            self._unsaid.popleft()
        self._loop.remove_writer(self._channel.fileno())


async def _serve(channel: socket.socket) -> None:
    await _Carrier(channel).over.wait()


def main() -> None:
    """Serve the node at the other end of descriptor `argv[1]` until it closes that."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if os.geteuid() == 0:  # what it holds was given to it: it needs no rights of its own
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        channel.setblocking(False)
        asyncio.run(_serve(channel))


if __name__ == "__main__":
    main()
