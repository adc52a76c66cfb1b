"""One connection to one spawner worker: send requests, match answers, keep count of descriptors.

Frames only; what their fields mean is known in requests.py and answers.py. Where this process has
no room for the descriptors of an answer, the kernel drops them: that answer is lost, the
connection is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from coldframe.host import forks, wire
from coldframe.host.descriptors import close_all, copy_all
from coldframe.host.wire import Field, Fields, FrameType, Tag

_RECEIVE_BYTES = 256 << 10
_ANCILLARY_BYTES = socket.CMSG_SPACE(4 * wire.MAX_DESCRIPTORS)
_READS_PER_TURN = 8


class Waiter(Protocol):
    """What waits for the answers to one request."""

    def answer(self, frame_type: int, fields: Fields, descriptors: list[int]) -> bool:
        """Take an answer and its descriptors; return whether it was the last one."""

    def lose(self, frame_type: int) -> bool:
        """An answer came without its descriptors; return whether it was the last one."""

    def fail(self, error: Exception) -> None:
        """No answer will come."""


class Link:
    """Speaks frames over a connected socket that it owns; belongs to the running loop."""

    def __init__(
        self,
        sock: socket.socket,
        on_event: Callable[[int, Fields, list[int]], None],
        on_lost: Callable[[str], None],
        first_id: int = 1,
    ) -> None:
        """`first_id`: above every number of those that spoke with this worker before."""
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._on_event, self._on_lost = on_event, on_lost
        self._waiting: dict[int, Waiter] = {}
        self._splitter = wire.Splitter()
        self._batches: deque[list[int] | None] = deque()
        """Descriptors of one frame each, as they came; None: dropped for want of room."""
        self._unsent: deque[tuple[bytes, list[int]]] = deque()
        self._next_id = first_id
        self.open = True
        sock.setblocking(False)
        self._loop.add_reader(sock.fileno(), self._readable)
        forks.own(self)

    def request(
        self,
        frame_type: FrameType,
        fields: list[Field],
        waiter: Waiter,
        descriptors: Sequence[int] = (),
    ) -> None:
        """Send one request. Descriptors are copied before this returns.

        Raises:
            ValueError: the frame is too long.
            OSError: the connection is closed (EPIPE), or a descriptor is bad.
        """
        if not self.open:
            raise BrokenPipeError("the worker is gone")
        request_id = self._next_id
        frame = wire.encode(frame_type, request_id, fields, len(descriptors))
        self._send(frame, descriptors)
        self._next_id += 1
        self._waiting[request_id] = waiter

    async def flush(self) -> None:
        """Return when everything has been sent, or the connection has ended."""
        while self._unsent and self.open:  # noqa: ASYNC110 - happens once, as the last thing
            await asyncio.sleep(0.005)

    def close(self, reason: str = "closed") -> None:
        """Close the connection and fail whatever waits. Twice is fine."""
        if not self.open:
            return
        self.open = False
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # whoever else holds it
        self._close_descriptors()
        self._on_lost(reason)

    def abandon(self) -> None:
        """See `forks.Owner`."""
        if self.open:
            self.open = False
            self._close_descriptors()

    def _close_descriptors(self) -> None:
        self._sock.close()
        for _, held in self._unsent:
            close_all(held)
        for batch in self._batches:
            close_all(batch or [])
        self._unsent.clear()
        self._batches.clear()

    def fail_all(self, error: Exception) -> None:
        """Tell every waiter that no answer will come."""
        waiting, self._waiting = self._waiting, {}
        for waiter in waiting.values():
            waiter.fail(error)

    def _send(self, frame: bytes, descriptors: Sequence[int]) -> None:
        sent = 0
        if not self._unsent:
            try:
                sent = self._sendmsg(frame, descriptors)
            except BlockingIOError:
                sent = 0
            if sent == len(frame):
                return
        self._unsent.append((frame[sent:], [] if sent else copy_all(descriptors)))
        self._loop.add_writer(self._sock.fileno(), self._writable)

    def _sendmsg(self, data: bytes, descriptors: Sequence[int]) -> int:
        if not descriptors:
            return self._sock.send(data)
        return socket.send_fds(self._sock, [data], list(descriptors))

    def _writable(self) -> None:
        try:
            while self._unsent:
                data, held = self._unsent[0]
                sent = self._sendmsg(data, held)
                close_all(held)
                if sent == len(data):
                    self._unsent.popleft()
                else:
                    self._unsent[0] = (data[sent:], [])
        except BlockingIOError:
            return
        except OSError as error:
            self.close(str(error))
            return
        self._loop.remove_writer(self._sock.fileno())

    def _readable(self) -> None:
        try:
            for _ in range(_READS_PER_TURN):
                if not self._read_once():
                    return
        except BlockingIOError:
            return
        except (OSError, wire.ProtocolError) as error:
            self.close(str(error) or type(error).__name__)

    def _read_once(self) -> bool:
        """Read what is there; return whether more may follow."""
        data, ancillary, flags, _ = self._sock.recvmsg(
            _RECEIVE_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
        )
        # One read brings the descriptors of one frame at most: the last that begins in it.
        batch: list[int] = []
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                batch.extend(memoryview(payload).cast("i"))
        dropped = bool(flags & socket.MSG_CTRUNC)
        if dropped:
            close_all(batch)
            self._batches.append(None)
        elif batch:
            self._batches.append(batch)
        if not data:
            self.close("the worker ended")
            return False
        for frame_type, count, request_id, body in self._splitter.feed(data):
            taken = self._take(count)
            self._dispatch(frame_type, request_id, wire.decode_fields(body), taken)
        # A read that ends at a descriptor's frame is short although more is waiting.
        return self.open and (bool(ancillary) or dropped or len(data) == _RECEIVE_BYTES)

    def _take(self, count: int) -> list[int] | None:
        """The descriptors of the next frame; None: they were dropped."""
        if not count:
            return []
        batch = self._batches.popleft() if self._batches else []
        if batch is not None and len(batch) != count:
            close_all(batch)
            raise wire.ProtocolError("descriptors are missing")
        return batch

    def _dispatch(
        self, frame_type: int, request_id: int, fields: Fields, descriptors: list[int] | None
    ) -> None:
        if request_id == 0:
            self._on_event(frame_type, fields, descriptors or [])
            return
        waiter = self._waiting.get(request_id)
        if waiter is None:
            close_all(descriptors or [])
            raise wire.ProtocolError(f"an answer to request {request_id}, which nobody made")
        if descriptors is None or (fields and fields[0][0] == Tag.LOST):
            last = waiter.lose(frame_type)
        else:
            last = waiter.answer(frame_type, fields, descriptors)
        if last:
            del self._waiting[request_id]
