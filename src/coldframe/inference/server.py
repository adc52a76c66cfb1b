"""A proxy with its door open: TCP, on an event loop that may serve others too."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn

from coldframe.inference.app import ProxyApp
from coldframe.inference.heads import BoundedHeads
from coldframe.protocol.errors import CapabilityError

_BACKLOG = 1024


class _Server(uvicorn.Server):
    """Leaves signals to whoever runs the loop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def serving(app: ProxyApp, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Serve while entered, and give the base URL, to be followed by `/v1`.

    Raises:
        CapabilityError: the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named, else asyncio takes it for no TCP and leaves Nagle's delay on.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise CapabilityError(f"{host}:{port} is not free: {error}") from error
    listener.setblocking(False)
    config = uvicorn.Config(
        app,
        http=BoundedHeads,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=5,
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve([listener]))
    try:
        while not server.started:
            if task.done():
                await task
                raise CapabilityError("the server ended before it had started")
            await asyncio.sleep(0.005)
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
