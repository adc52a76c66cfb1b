"""A connection into a sandbox through a service: one request, both of whose bodies stay open."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

from coldframe.client._http import Http
from coldframe.protocol import wire
from coldframe.protocol.errors import ColdframeError

_PIECE = 1 << 16


async def tunnel(
    http: Http, target: str, running: set[asyncio.Task[None]]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return what stands for the connection; a task in `running` carries it.

    End of file is passed on to the port; when the port ends its side, both sides end.

    Raises what the service answers, such as PortUnreachableError, before anything is returned.
    """
    ours, theirs = socket.socketpair()
    opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    task = asyncio.ensure_future(_carry(http, target, ours, opened))
    running.add(task)
    task.add_done_callback(running.discard)
    try:
        await opened
        return await asyncio.open_connection(sock=theirs)
    except BaseException:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        theirs.close()
        raise


async def _carry(
    http: Http, target: str, ours: socket.socket, opened: asyncio.Future[None]
) -> None:
    reader, writer = await asyncio.open_connection(sock=ours)

    async def spoken() -> AsyncIterator[bytes]:
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(_PIECE):
                yield piece

    try:
        async with http.stream("POST", target, spoken()) as (head, heard):
            if head.status >= 400:
                raise wire.read_error(b"".join([p async for p in heard]), head.status)
            opened.set_result(None)
            with contextlib.suppress(ConnectionError):
                async for piece in heard:
                    writer.write(piece)
                    await writer.drain()
    except (ColdframeError, OSError) as error:
        if not opened.done():
            opened.set_exception(error)
        # Else the connection ends here, as any that is lost on the way.
    finally:
        if not opened.done():
            opened.cancel()
        writer.close()
