"""WebSockets: refused as any request is, and ended when the service says so."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any, cast

from uvicorn.config import Config
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.http11 import Response
from websockets.server import ServerProtocol

from coldframe.protocol.errors import InvalidRequestError
from coldframe.protocol.wire import error_body

LOST = "coldframe.lost"
"""Key in the scope of a request or WebSocket: an event that is set once its connection is lost."""
_SWITCHED, _BAD_REQUEST = 101, 400


class _Handshake(ServerProtocol):
    """Says why it refuses as everything here is refused, not in plain text."""

    def reject(self, status: Any, text: str) -> Response:
        """See `ServerProtocol`."""
        why = text.partition("\n")[0] or "this WebSocket is refused"
        told = json.dumps(error_body(InvalidRequestError(why))).encode("ascii")
        response = super().reject(status, "")
        response.body = told
        for name, value in (
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(told))),
        ):
            del response.headers[name]
            response.headers[name] = value
        return response


class Lasting(WebSocketsSansIOProtocol):
    """A WebSocket that goes on while commands come to their end, and is closed after them."""

    def __init__(self, config: Config, server_state: ServerState, app_state: Any) -> None:
        super().__init__(config, server_state, app_state)
        logger = logging.getLogger("uvicorn.error")
        self.conn = _Handshake(max_size=config.ws_max_size, logger=logger)
        self._lost = asyncio.Event()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell whoever waits for something else than the client's next message."""
        super().connection_lost(exc)
        self._lost.set()

    def handle_connect(self, event: Any) -> None:
        """Let a handshake in; its scope tells when the connection is lost."""
        super().handle_connect(event)
        if self.refused is None:  # its task has not begun yet
            cast(dict[str, object], self.scope)[LOST] = self._lost

    def keepalive_timeout(self) -> None:
        """End a connection that does not answer, unless it is us who read nothing of it."""
        if self.read_paused:
            self.pending_ping_payload = None  # its answer is still to be read
            self.schedule_ping()
        else:
            super().keepalive_timeout()

    def data_received(self, data: bytes) -> None:
        """Take what comes; the first of it is the whole head of the handshake."""
        super().data_received(data)
        if not self.handshake_initiated and not self.transport.is_closing():
            self._refuse_head()

    def _refuse_head(self) -> None:
        """Refuse a head that could not be read, of which uvicorn says nothing for ever."""
        why = self.conn.handshake_exc
        text = f"this is no handshake of a WebSocket: {why and (why.__cause__ or why)}"
        self.response = _Handshake().reject(_BAD_REQUEST, text)
        self.handshake_initiated = self.handshake_complete = self.close_sent = True
        self.transport.write(self.response.serialize())
        self.transport.close()

    @property
    def refused(self) -> int | None:
        """The status by which the handshake itself was refused; None: it was not."""
        status = self.response.status_code
        return None if status == _SWITCHED else status

    async def send(self, message: Any) -> None:
        """Send; a handshake that was answered by a refusal is over, too."""
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and self.close_sent:
            self.handshake_complete = True  # else uvicorn reports a fault of ours

    def shutdown(self) -> None:
        """Leave it open: whoever is attached to a command is still to hear the rest of it."""
        if not self.handshake_complete:
            super().shutdown()

    def end(self) -> None:
        """Close it: the service ends."""
        super().shutdown()

    def is_answering(self) -> bool:
        """Whether more may be said on it."""
        return not self.transport.is_closing()
