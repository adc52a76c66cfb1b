"""How bytes leave a connection: what is said in one turn together, and how much was taken."""

from __future__ import annotations

import asyncio
import fcntl
import struct
import termios
from typing import Any

_LITTLE = 64 * 1024
_COUNT = struct.Struct("i")


class Joined:
    """A transport that sends what is written in one turn of the event loop by one call.

    The head and the body of an answer are written apart; each would wake the client by itself.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._waiting: list[bytes] = []
        self.written = 0
        """How many bytes have been given to the transport."""

    def write(self, data: bytes) -> None:
        """Send soon, and in order."""
        if len(data) > _LITTLE:
            self.write_now(data)
            return
        if not self._waiting:
            self._loop.call_soon(self.flush)
        self._waiting.append(data)

    def flush(self) -> None:
        """Send now what waits."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._pass(b"".join(waiting))

    def write_now(self, data: bytes) -> None:
        """Send at once."""
        self.flush()
        self._pass(data)

    def _pass(self, data: bytes) -> None:
        self.written += len(data)
        self._transport.write(data)

    def owed(self) -> int:
        """Return of how much the client's kernel has not said that it is there."""
        fd = self._transport.get_extra_info("socket").fileno()
        (in_kernel,) = _COUNT.unpack(fcntl.ioctl(fd, termios.TIOCOUTQ, bytes(_COUNT.size)))
        return int(in_kernel) + self._transport.get_write_buffer_size()

    def is_closing(self) -> bool:
        """Whether it is closed, or will be."""
        return self._transport.is_closing()

    def close(self) -> None:
        """Close once all is sent."""
        self.flush()
        self._transport.close()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Hand the connection on, as for a WebSocket."""
        self.flush()
        self._transport.set_protocol(protocol)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
