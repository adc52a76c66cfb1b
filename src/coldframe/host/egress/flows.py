"""Connections that a policy allowed: what they carry, what limits them, how they are ended."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from coldframe.host.egress.addresses import Address
from coldframe.host.egress.policy import Verdict
from coldframe.host.egress.relay import Direction, close
from coldframe.protocol.network import EgressKind

_BURST_S = 0.05
_LEAST_BURST = 16384
_LEAST_GRANT, _LEAST_DELAY_S = 2048, 0.002
_LAST_WORDS_S, _LAST_READS, _LAST_BYTES = 1.0, 64, 1 << 16


class Meter:
    """How many bytes a sandbox's connections may carry, together, both ways."""

    def __init__(self, rate: int | None, most: int | None, exhausted: Callable[[], None]) -> None:
        """Rate in bytes per second. `exhausted` is called when `most` bytes have been carried."""
        self._rate, self._left, self._exhausted = rate, most, exhausted
        self._burst = max(_LEAST_BURST, int((rate or 0) * _BURST_S))
        self._tokens = float(self._burst)
        self._at = time.monotonic()

    def grant(self, wanted: int) -> int:
        """Return how many bytes may be carried now; 0: ask again after `delay_s`."""
        if self._left is not None:
            if self._left <= 0:
                self._exhausted()
                return 0
            wanted = min(wanted, self._left)
        if self._rate is None:
            return wanted
        now = time.monotonic()
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate)
        self._at = now
        if self._tokens < min(wanted, _LEAST_GRANT):
            return 0
        return min(wanted, int(self._tokens))

    @property
    def limited(self) -> bool:
        """Whether it limits anything."""
        return self._rate is not None or self._left is not None

    @property
    def delay_s(self) -> float:
        """When something will be granted again."""
        return max(_LEAST_DELAY_S, _LEAST_GRANT / (self._rate or _LEAST_GRANT))

    def spend(self, count: int) -> None:
        """Note bytes that were carried."""
        self._tokens -= count
        if self._left is not None:
            self._left -= count

    @property
    def spent(self) -> bool:
        """Whether nothing more may be carried."""
        return self._left is not None and self._left <= 0


class Budget:
    """How many connections all sandboxes may have together.

    Nobody may hold more than are left: so one that takes all it can leaves half of them, and the
    next ones find room whatever others do.
    """

    def __init__(self, most: int) -> None:
        self._most = self._left = most

    @property
    def taken(self) -> float:
        """Which part of it is taken, 0 to 1."""
        return 1 - self._left / self._most

    def has_room(self, held: int) -> bool:
        """Whether a sandbox that holds so many may have one more."""
        return held < self._left

    def take(self, held: int) -> bool:
        """Take one for a sandbox that holds so many; False: it has its share."""
        if not self.has_room(held):
            return False
        self._left -= 1
        return True

    def give_back(self) -> None:
        """Give one back."""
        self._left += 1


@dataclass(eq=False, slots=True)
class Flow:
    """One connection."""

    number: int
    kind: EgressKind
    client: socket.socket
    meter: Meter
    name: str | None = None
    names: tuple[str, ...] = ()
    """Names that it may show."""
    address: Address | None = None
    port: int = 0
    spoken: str = "tcp"
    verdict: Verdict = field(default_factory=lambda: Verdict(False))
    announced: bool = False
    bytes_out: int = 0
    bytes_in: int = 0
    cut: str = ""
    """Why it was ended by us."""
    watched: bool = False
    """Whether its first bytes were, or will be, compared with what allowed it."""
    answered: bool = False
    """Whether the client was told why: then it must be able to read that."""
    broken: bool = False
    """Whether either side broke."""
    whole: bool = False
    """Whether it was served to its end; whoever sees a reset knows that it was not."""
    far: bool = False
    """Whether another process carries it; its sockets are no longer ours."""
    task: asyncio.Task[None] | None = None
    upstream: socket.socket | None = None
    stops: list[Callable[[], None]] = field(default_factory=list)
    """Each stops a direction at once."""
    directions: list[Direction] = field(default_factory=list)
    settled: bool = False
    """Whether nothing but its directions carries it any more."""

    def halt(self, reason: str) -> bool:
        """Carry nothing more from now on, if that takes no time; `end` has to follow."""
        if self.settled and not self.far:
            self.cut = self.cut or reason
            for one in self.directions:
                one.halted = True
        return bool(self.cut)

    def count_out(self, count: int) -> None:
        """Note bytes from the sandbox."""
        self.bytes_out += count

    def count_in(self, count: int) -> None:
        """Note bytes to the sandbox."""
        self.bytes_in += count

    async def allow(self, count: int) -> None:
        """Wait until so many bytes may be carried, and count them as carried."""
        while count > 0:
            granted = self.meter.grant(count)
            if granted:
                self.meter.spend(granted)
                count -= granted
            else:
                await asyncio.sleep(self.meter.delay_s)

    async def answer(self, message: bytes) -> None:
        """Tell the client something as the last thing, and let it read that. Raises OSError."""
        self.stop()
        self.answered = True
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self.client, message)
        self.client.shutdown(socket.SHUT_WR)
        # Closing with something unread would be a reset, which destroys what was said.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                for _ in range(_LAST_READS):
                    if not await loop.sock_recv(self.client, _LAST_BYTES):
                        break

    def end(self, reason: str) -> None:
        """Carry nothing more from now on; both sides will see a reset."""
        self.cut = self.cut or reason
        self.stop()
        if self.task is not None:
            self.task.cancel()

    def watch(self, ended: asyncio.Future[None]) -> None:
        """End the connection when one of its directions breaks, whoever waits for what."""
        ended.add_done_callback(self._note_end)

    def _note_end(self, ended: asyncio.Future[None]) -> None:
        if not ended.cancelled() and ended.exception() is not None:
            self.broken = True
            if self.task is not None:
                self.task.cancel()

    def stop(self) -> None:
        """Stop carrying bytes."""
        stops, self.stops = self.stops, []
        for stop in stops:
            stop()

    def close(self, *, reset: bool) -> None:
        """Give the sockets back."""
        self.stop()
        for one in (self.client, self.upstream):
            if one is not None:
                close(one, reset=reset)
