"""One worker of the spawner: its process, the connection to it, and what it is to keep."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from coldframe.host import answers, requests, wire
from coldframe.host.descriptors import needing_room
from coldframe.host.link import Link
from coldframe.host.outcome import Outcome
from coldframe.host.spawner_types import Keep
from coldframe.host.wire import Field, Fields, FrameType, Tag, Type
from coldframe.protocol.errors import SpawnerLostError

T = TypeVar("T")
_DROP_AFTER_S = 0.05
_DROPS_PER_FRAME = 128


@dataclass(eq=False, slots=True)
class Worker:
    """One worker process and the connection to it."""

    pid: int
    pidfd: int
    link: Link
    lost: bool = False
    _reaping: threading.Lock = field(default_factory=threading.Lock)
    """A worker that is lost while its spawner closes is waited for by two threads."""
    _drops: list[str] = field(default_factory=list)
    """Names of what it need not keep any more, and has not been told yet."""
    _dropping: asyncio.TimerHandle | None = None

    # --- its process ------------------------------------------------------------------

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return whether it has ended in that time; blocks."""
        pidfd = self.pidfd
        if pidfd < 0:
            return True
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        if not poll.poll(None if timeout_s is None else timeout_s * 1000):
            return False
        with self._reaping:
            if self.pidfd >= 0:
                with contextlib.suppress(ChildProcessError):  # another daemon's child
                    os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED)
                os.close(self.pidfd)
                self.pidfd = -1
        return True

    async def reap(self, timeout_s: float) -> None:
        """Return when it has ended; it is killed after `timeout_s`."""
        if not await asyncio.to_thread(self.wait, timeout_s):
            with self._reaping:
                if self.pidfd >= 0:
                    signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            await asyncio.to_thread(self.wait)

    async def leave(self) -> None:
        """Let go of it, once it has been told everything; it lives on."""
        self._tell_drops()
        await self.link.flush()
        self.link.close("the daemon leaves")
        if self.pidfd >= 0:
            os.close(self.pidfd)

    # --- requests ---------------------------------------------------------------------

    def tell(
        self, frame_type: FrameType, fields: list[Field], descriptors: Sequence[int] = ()
    ) -> None:
        """Ask for something that nobody waits for."""
        with contextlib.suppress(OSError):  # it is gone, or going
            answer = answers.Answer(Outcome[None](), answers.decode_nothing)
            self.link.request(frame_type, fields, answer, descriptors)

    def send(
        self,
        frame_type: FrameType,
        fields: list[Field],
        waiter: answers.Answer[T],
        descriptors: Sequence[int] = (),
    ) -> None:
        """Ask for something; `waiter` gets the answers.

        Raises:
            SpawnerLostError: it is gone.
            CapacityError: this process has no room for a copy of the descriptors.
            ValueError: the request is longer than a frame.
        """
        try:
            with needing_room("the spawner was not asked"):
                self.link.request(frame_type, fields, waiter, descriptors)
        except (BrokenPipeError, ConnectionError) as error:
            self.link.close(str(error))
            raise SpawnerLostError(f"the spawner worker is gone: {error}") from error

    async def ask(
        self,
        frame_type: FrameType,
        fields: list[Field],
        decode: Callable[[Fields, list[int]], T],
        descriptors: Sequence[int] = (),
    ) -> T:
        """Ask for something and return the one answer. Raises as `send`, and SpawnerFault."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.send(frame_type, fields, answers.Answer(future, decode), descriptors)
        return await future

    # --- what outlives us -------------------------------------------------------------

    def keep(self, name: str, keep: Keep) -> None:
        """Let it keep something under a name, for the next daemon."""
        self._keep(name, keep, [])

    def keep_with_exec(self, name: str, exec_id: int, keep: Keep) -> None:
        """As `keep`; without a daemon that command is killed when it expires."""
        fields = [(Tag.EXEC_ID, wire.U64.pack(exec_id)), *requests.lease_fields(keep)]
        self._keep(name, keep, fields)

    def keep_sandbox(self, sandbox_id: str, keep: Keep) -> None:
        """Replace what is kept with a sandbox of its own, which may have ended."""
        self._keep(sandbox_id, keep, requests.lease_fields(keep))

    def _keep(self, name: str, keep: Keep, more: list[Field]) -> None:
        descriptors: list[int] = []
        fields: list[Field] = [(Tag.KEPT, name.encode()), *more]
        fields += requests.keep_fields(keep, descriptors)
        self.tell(Type.KEEP, fields, descriptors)

    def drop(self, name: str) -> None:
        """Let it keep something no longer. It is told a little later, of many at once."""
        self._drops.append(name)
        if self._dropping is None and self.link.open:
            loop = asyncio.get_running_loop()
            self._dropping = loop.call_later(_DROP_AFTER_S, self._tell_drops)

    def drop_now(self, *names: str) -> None:
        """As `drop`, but it is told at once."""
        self.tell(Type.DROP, [(Tag.KEPT, name.encode()) for name in names])

    def _tell_drops(self) -> None:
        if self._dropping is not None:
            self._dropping.cancel()
            self._dropping = None
        drops, self._drops = self._drops, []
        for start in range(0, len(drops), _DROPS_PER_FRAME):
            self.drop_now(*drops[start : start + _DROPS_PER_FRAME])
