"""Connections whose heads and trailers have an end, before anybody has shown a key."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_BYTES = 64 * 1024
_TOO_LARGE = b"HTTP/1.1 431 Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class BoundedHeads(HttpToolsProtocol):
    """Refuses what sends more than `MOST_BYTES` that are no body, and reads nothing more of it."""

    _size = 0
    """What came since the last of a body, or the end of a message."""
    _refused = False

    def data_received(self, data: bytes) -> None:
        """Count what is no body."""
        if self._refused:
            return
        self._size += len(data)
        super().data_received(data)
        if self._size > MOST_BYTES:
            self._refuse()

    def on_headers_complete(self) -> None:
        """Refuse a head that came at once with its body, too."""
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MOST_BYTES:
            self._refuse()
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A body is bounded by who reads it."""
        self._size = 0
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The next head may come."""
        self._size = 0
        if not self._refused:
            super().on_message_complete()

    def _refuse(self) -> None:
        self._refused = True
        cycle: Any = self.cycle
        if cycle is None or not cycle.response_started or cycle.response_complete:
            self.transport.write(_TOO_LARGE)
        self.transport.close()
