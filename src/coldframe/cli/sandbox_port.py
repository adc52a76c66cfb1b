"""`coldframe sandbox port`: a port of a sandbox as one of this machine's loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from coldframe.cli import flags, render
from coldframe.cli.clients import with_client
from coldframe.protocol.errors import CapabilityError, ColdframeError, InvalidRequestError

if TYPE_CHECKING:
    from coldframe.client import AsyncSandbox, AsyncSandboxClient

_PIECE = 1 << 16


def port(
    sandbox: flags.Sandbox,
    ports: Annotated[
        str, typer.Argument(metavar="[LOCAL:]PORT", help="8000, or 9000:8000; 0: any free one.")
    ],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the local address as JSON.")
    ] = False,
) -> None:
    """Forward a port of 127.0.0.1 to one of a sandbox, until interrupted.

    Whatever listens on PORT in the sandbox is reached by LOCAL here (default: the same number);
    the address is printed once it is open. The sandbox needs no network policy for it.
    """
    local, inner = _numbers(ports)

    async def forward(client: AsyncSandboxClient) -> None:
        await _forward(await client.get_sandbox(sandbox), local, inner, as_json=as_json)

    with_client(forward)


def _numbers(text: str) -> tuple[int, int]:
    left, colon, right = text.rpartition(":")
    local, inner = (left if colon else right), right
    if not (local.isdecimal() and inner.isdecimal()):
        raise InvalidRequestError(f"{text!r}: write PORT or LOCAL:PORT, such as 9000:8000")
    if int(local) > 65535 or not 0 < int(inner) <= 65535:
        raise InvalidRequestError(f"{text!r}: a port is a number of at most 65535")
    return int(local), int(inner)


async def _forward(sandbox: AsyncSandbox, local: int, inner: int, *, as_json: bool) -> None:
    connections: set[asyncio.Task[None]] = set()

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A coroutine would be asyncio's own task, which complains of being cancelled.
        task = loop.create_task(_connected(sandbox, inner, reader, writer))
        connections.add(task)
        task.add_done_callback(connections.discard)

    try:
        server = await asyncio.start_server(serve, "127.0.0.1", local)
    except OSError as error:
        raise CapabilityError(f"127.0.0.1:{local} is not free: {error.strerror}") from error
    async with server:
        opened = server.sockets[0].getsockname()[1]
        if as_json:
            print(json.dumps({"host": "127.0.0.1", "port": opened}), flush=True)
        else:
            print(f"127.0.0.1:{opened} -> {sandbox.id}:{inner}; Ctrl-C ends it", flush=True)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        await stop.wait()
        server.close()
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)


async def _connected(
    sandbox: AsyncSandbox,
    inner: int,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    try:
        there, back = await sandbox.connect(inner)
    except ColdframeError as error:
        print(f"coldframe: {render.sentence(str(error))}", file=sys.stderr, flush=True)
        writer.transport.abort()
        return
    try:
        async with asyncio.TaskGroup() as ways:
            ways.create_task(_pass(reader, back))
            ways.create_task(_pass(there, writer))
    except* OSError:
        pass  # one side has hung up: so does the other
    finally:
        for one in (writer, back):
            one.close()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_PIECE):
        writer.write(data)
        await writer.drain()
    with contextlib.suppress(OSError):  # it has ended already
        writer.write_eof()
