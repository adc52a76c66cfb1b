"""HTTP/1.1 as the SDK needs it: kept connections, raw bodies both ways, over a socket or TCP.

Not httpx: it takes 0.9 ms of processor time per request where this takes 0.1 ms, which is more
than the command that is run (docs/adr/0050-a-small-http-client.md). What it speaks with is a
Coldframe service; heads are bounded, and whatever does not fit ends the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from time import monotonic
from typing import Any

from coldframe.client._connection import (
    Address,
    Answer,
    Connection,
    Head,
    open_connection,
    pieces,
    read_head,
)
from coldframe.protocol import tracing
from coldframe.protocol.errors import Execution, NotPermittedError, ServiceUnreachableError

_CONNECT_S = 10.0
_KEPT = 64

Headers = Sequence[tuple[str, str]]
Reviver = Callable[[], Awaitable[None]]
"""Starts again what served a socket and was killed."""


class Http:
    """Requests to one service. Belongs to one event loop."""

    def __init__(self, address: Address, headers: Headers) -> None:
        self.address = address
        fixed = [("Host", address.authority), *headers]
        self._fixed = "".join(f"{name}: {value}\r\n" for name, value in fixed).encode("latin-1")
        self._idle: list[Connection] = []
        self._tls = ssl.create_default_context() if address.tls else None
        self._refused_since: float | None = None
        self.revive: Reviver | None = None
        """Called when whoever made the socket is gone without having taken it away."""

    @property
    def refused_s(self) -> float:
        """For how long nobody has listened where a service did or should; 0: somebody does."""
        return 0.0 if self._refused_since is None else monotonic() - self._refused_since

    def close(self) -> None:
        """Close the connections that are kept."""
        while self._idle:
            self._idle.pop().close()

    async def request(
        self,
        method: str,
        target: str,
        body: bytes = b"",
        headers: Headers = (),
        *,
        within_s: float | None = None,
    ) -> Answer:
        """Send a request and return its answer, body included.

        Raises:
            ServiceUnreachableError: nobody answered, or not `within_s`; its `execution` says
                whether the request may have been carried out.
        """
        connection = await self._connection()
        request = self._head(method, target, headers, len(body)) + body
        try:
            answer = await connection.answer(request, method, within_s)
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            connection.close()
            raise self._lost(error) from error
        except BaseException:
            connection.close()
            raise
        self._keep(connection, answer)
        return answer

    @contextlib.asynccontextmanager
    async def stream(
        self,
        method: str,
        target: str,
        content: AsyncIterator[bytes] | None = None,
        headers: Headers = (),
    ) -> AsyncIterator[tuple[Head, AsyncIterator[bytes]]]:
        """Send a request whose body is sent while the answer is read.

        Raises ServiceUnreachableError as `request`, also while the answer is read; and whatever
        `content` raises.
        """
        connection = await self._connection()
        extra = headers if content is None else (*headers, ("Transfer-Encoding", "chunked"))
        connection.writer.write(self._head(method, target, extra, 0 if content is None else None))
        sending = None
        if content is not None:
            sending = asyncio.ensure_future(_send(connection.writer, content))
        whole = False
        try:
            begun = await self._answered(connection, sending)

            async def content_of() -> AsyncIterator[bytes]:
                nonlocal whole
                try:
                    async for piece in pieces(connection.reader, method, begun):
                        yield piece
                except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
                    raise self._lost(error) from error
                whole = True

            yield begun, content_of()
        finally:
            if sending is not None and not sending.done():
                whole = False
                sending.cancel()
            if sending is not None:
                await asyncio.gather(sending, return_exceptions=True)
            if whole:
                self._keep(connection, begun)
            else:
                connection.close()

    async def _answered(self, connection: Connection, sending: asyncio.Future[None] | None) -> Head:
        """Return the head of the answer; what the body's source raises comes first."""
        reading = asyncio.ensure_future(read_head(connection.reader))
        try:
            if sending is not None:
                both: set[asyncio.Future[Any]] = {reading, sending}
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                # A service that refuses a body may answer and close before it has read all of it,
                # so only what the body's own source raised ends this.
                failed = sending.exception() if sending.done() else None
                if isinstance(failed, _ContentFailedError):
                    raise failed.error
            try:
                return await reading
            except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
                raise self._lost(error) from error
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    # --- connections ------------------------------------------------------------------

    async def _connection(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.wake():
                return connection
            connection.close()
        try:
            return await self._connect()
        except ServiceUnreachableError as error:
            if self.revive is None or not isinstance(error.__cause__, ConnectionRefusedError):
                raise
            await self.revive()
            return await self._connect()

    async def _connect(self) -> Connection:
        where = self.address
        try:
            async with asyncio.timeout(_CONNECT_S):
                connection = await open_connection(where, self._tls)
        except ssl.SSLCertVerificationError as error:
            raise ServiceUnreachableError(
                f"the certificate of {where} is not trusted: {error.verify_message}; for an "
                "authority of your own set SSL_CERT_FILE"
            ) from error
        except (OSError, TimeoutError) as error:
            if isinstance(error, PermissionError) and where.unix is not None:
                raise NotPermittedError(
                    f"{where} is for root and the user who serves it; run this as one of them, or "
                    "set COLDFRAME_URL to an address that takes keys, or COLDFRAME_URL=in-process"
                ) from error
            if isinstance(error, ConnectionRefusedError) and self._refused_since is None:
                self._refused_since = monotonic()
            why = str(error) or "no connection in time"
            raise ServiceUnreachableError(
                f"no service answers at {where}: {why}; start one with coldframe serve, or set "
                "COLDFRAME_URL"
            ) from error
        self._refused_since = None
        return connection

    def _keep(self, connection: Connection, head: Head) -> None:
        if head.headers.get("connection") == "close" or len(self._idle) >= _KEPT:
            connection.close()
        else:
            connection.rest()
            self._idle.append(connection)

    def _lost(self, error: BaseException) -> ServiceUnreachableError:
        return ServiceUnreachableError(
            f"the connection to {self.address} was lost before the answer: "
            f"{str(error) or type(error).__name__}",
            execution=Execution.UNKNOWN,
        )

    def _head(self, method: str, target: str, headers: Headers, length: int | None) -> bytes:
        more = "".join(f"{name}: {value}\r\n" for name, value in headers)
        trace = tracing.traceparent()
        if trace is not None:
            more += f"{tracing.HEADER}: {trace}\r\n"
        if length is not None:
            more += f"Content-Length: {length}\r\n"
        line = f"{method} {target} HTTP/1.1\r\n"
        return line.encode("ascii") + self._fixed + more.encode("latin-1") + b"\r\n"


class _ContentFailedError(Exception):
    """The source of a body failed; the body is not whole and never will be."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


async def _send(writer: asyncio.StreamWriter, content: AsyncIterator[bytes]) -> None:
    while True:
        try:
            piece = await anext(content, None)
        except Exception as error:
            raise _ContentFailedError(error) from error
        if piece is None:
            break
        if piece:
            writer.write(b"%x\r\n" % len(piece))
            writer.write(piece)
            writer.write(b"\r\n")
            await writer.drain()
    writer.write(b"0\r\n\r\n")
    await writer.drain()
