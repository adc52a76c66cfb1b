"""`coldframe serve`: a node as a service."""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coldframe.cli import render
from coldframe.protocol import places, tracing
from coldframe.protocol.errors import CapabilityError, ColdframeError, InvalidRequestError
from coldframe.protocol.text import lacking

if TYPE_CHECKING:
    from coldframe.gateway.served import Served
    from coldframe.gateway.server import Guest, Listen
    from coldframe.gateway.settings import GatewaySettings
    from coldframe.gateway.store import Store
    from coldframe.node.settings import NodeSettings

STORE_OPTION = typer.Option(
    "--store",
    metavar="URL",
    envvar="COLDFRAME_STORE",
    help="Keys and quotas: sqlite:PATH (default: in COLDFRAME_HOME) or redis://HOST:PORT.",
)


def serve(
    unix: Annotated[
        Path | None,
        typer.Option(
            "--unix",
            metavar="PATH",
            help="A unix socket for root and this user only, beside node.sock of the home.",
        ),
    ] = None,
    listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="TCP; port 0 takes a free one.")
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Certificate chain, PEM; with --listen.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="Its key, PEM.")] = None,
    store: Annotated[str | None, STORE_OPTION] = None,
    node: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Serve the node of this service instead of one of this process: unix:PATH, or a "
            "URL with COLDFRAME_API_KEY, whose scope is admin.",
        ),
    ] = None,
    node_key: Annotated[str | None, typer.Option(hidden=True, envvar="COLDFRAME_API_KEY")] = None,
    compat: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Answer another service's clients too: orchard (docs/orchard.md)."
        ),
    ] = None,
    idle_exit: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="End after so long without sandboxes and clients. Default: never.",
        ),
    ] = None,
) -> int:
    """Serve this machine's node to clients: on a unix socket, and on TCP with --listen.

    Clients of this machine find it by its socket, node.sock in COLDFRAME_HOME, and start it there
    if nobody serves (then with --idle-exit 300): a home has one node. One with --idle-exit leaves
    to one without, and its sandboxes with it. TCP asks for keys (coldframe key create); as long as
    there is none, it is loopback only.

    Ctrl-C and SIGTERM let requests come to their end, then end every sandbox; a second one, and
    SIGUSR1, leave them to who serves the same home next, as a kill does. SIGHUP executes the
    program anew (coldframe node upgrade).
    """
    tls = _tls(tls_cert, tls_key)
    if idle_exit is not None and not (math.isfinite(idle_exit) and idle_exit >= 1):
        raise InvalidRequestError(
            f"--idle-exit {idle_exit:g} is not a number of seconds of at least 1"
        )
    if node is not None and (idle_exit is not None or (unix is None and listen is None)):
        raise InvalidRequestError("--node goes with --listen or --unix, and not with --idle-exit")
    if compat not in {None, "orchard"}:
        raise InvalidRequestError(f"--compat {compat!r}: orchard is the one that is known")
    if compat is not None and node is not None:
        raise InvalidRequestError("--compat serves a node of this process: not with --node")
    _log_to_stderr()
    behind = Behind(node, node_key, store, compat is not None)
    return asyncio.run(_serve(unix and unix.absolute(), listen, tls, behind, idle_exit))


def _tls(cert: Path | None, key: Path | None) -> ssl.SSLContext | None:
    if (cert is None) != (key is None):
        raise InvalidRequestError("give --tls-cert and --tls-key, or neither")
    if cert is None:
        return None
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        tls.load_cert_chain(cert, key)
    except OSError as error:
        raise InvalidRequestError(
            f"--tls-cert {cert}, --tls-key {key}: no usable pair of PEM files: {error}"
        ) from error
    return tls


def _log_to_stderr() -> None:
    told = logging.StreamHandler()
    told.setFormatter(_Traces("%(asctime)s %(levelname)s %(trace)s%(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[told])
    # Requests that are none, and WebSockets that are refused, must not fill the log; below this
    # level it has the path of each WebSocket, which may be a secret.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)


class _Traces(logging.Formatter):
    """Adds the trace of what is done."""

    def format(self, record: logging.LogRecord) -> str:
        trace_id = tracing.current()
        record.trace = "" if trace_id is None else f"[{trace_id}] "
        return super().format(record)


@dataclass(frozen=True)
class Behind:
    """What a service is in front of."""

    node_url: str | None
    """None: a node of this process."""
    node_key: str | None
    store_url: str | None
    orchard: bool = False
    """Whether Orchard's clients are answered too."""


@asynccontextmanager
async def _served(
    behind: Behind,
    store: Store,
    settings: NodeSettings,
    chosen: GatewaySettings,
    daemon: int | None,
) -> AsyncIterator[Served]:
    if behind.node_url is not None:
        from coldframe.cli.relay import relayed

        async with relayed(behind.node_url, behind.node_key, store) as relay:
            yield relay
        return
    from coldframe.gateway.served import ServedNode
    from coldframe.node.node import Node

    async with Node(settings, outlive=True, daemon=daemon) as node:
        yield ServedNode(node, store, chosen)


async def _serve(
    unix: Path | None,
    listen: str | None,
    tls: ssl.SSLContext | None,
    behind: Behind,
    idle_exit_s: float | None,
) -> int:
    try:
        from coldframe.gateway import audit, audited, garbage, sockets
        from coldframe.gateway.handover import Handover, execute_again
        from coldframe.gateway.server import Doors, Listen
        from coldframe.gateway.settings import GatewaySettings
        from coldframe.gateway.stopping import until_stopped
        from coldframe.gateway.store import open_store
    except ImportError as error:
        raise CapabilityError(lacking("coldframe serve", error, "cli,gateway")) from error
    from coldframe.node.settings import NodeSettings

    for name in ("uvicorn.error", "coldframe.gateway"):
        logging.getLogger(name).addFilter(audited.Paced())
    settings = NodeSettings.from_environment()
    at = None if listen is None else Listen.parse(listen)
    paths = _sockets(unix, None if behind.node_url is not None else settings.home)
    handed = Handover.taken()
    sockets.go_on(handed.locks)
    stands_in = idle_exit_s is not None
    for path in paths:
        own = path == places.socket_of(settings.home)
        await sockets.claim(path, relieve=own and not stands_in, stand_in=own and stands_in)
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(open_store(behind.store_url, settings.home))
        chosen = GatewaySettings(audit=settings.home / audit.DIRECTORY)
        served = await stack.enter_async_context(
            _served(behind, store, settings, chosen, handed.daemon)
        )
        guest = _guest(served) if behind.orchard else None
        doors = Doors(served, store, chosen, guest, handed)
        try:
            if at is not None:
                _warn(await doors.open_tcp(at, tls), tls, keyless=await store.keyless())
            for path in paths:
                await doors.open_unix(path)
                _say(f"serving unix:{path}")
            _raise_descriptor_limit()
            garbage.look_once()
            report = await until_stopped(doors, idle_exit_s=idle_exit_s)
        except ColdframeError:
            await doors.close()
            raise
    if report is None:
        execute_again(doors.handover())
        raise AssertionError("executing returns only by raising")
    for failure in report.failures:
        print(f"coldframe: {render.sentence(failure)}", file=sys.stderr)
    return 1 if report.failures else 0


def _sockets(chosen: Path | None, home: Path | None) -> list[Path]:
    """What to serve on; a home's node is always at the home's socket, so that it has only one."""
    own = None if home is None else places.socket_of(home)
    if chosen is not None and own is not None and _resolved(chosen) == _resolved(own):
        chosen = None
    return [path for path in (chosen, own) if path is not None]


def _resolved(path: Path) -> Path:
    return path.parent.resolve() / path.name


def _warn(at: Listen, tls: ssl.SSLContext | None, *, keyless: bool) -> None:
    from coldframe.gateway.guard import is_loopback

    _say(f"serving {'http' if tls is None else 'https'}://{at}")
    if keyless:
        _say("no keys: loopback only, and whoever is on this machine may do everything")
    elif tls is None and not is_loopback(at.host):
        _say("no TLS: keys and all else can be read on the way; see --tls-cert")


def _guest(served: Served) -> Guest:
    from coldframe.gateway.served import ServedNode
    from coldframe.integrations.orchard.door import Orchard

    assert isinstance(served, ServedNode)
    return Orchard(served.service)


def _raise_descriptor_limit() -> None:
    """Every connection takes one. The spawners run already, so commands keep the limit they had."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _say(line: str) -> None:
    print(line, flush=True)
