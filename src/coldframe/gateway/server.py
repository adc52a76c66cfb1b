"""A node, or a way to one, with its doors open: unix sockets, TCP, or both, on one event loop.

To close lets what is being answered come to its end. When and how: `stopping.py`, `parting.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import uvicorn
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from coldframe.gateway import sockets
from coldframe.gateway.activity import Activity, Counting
from coldframe.gateway.app import routes
from coldframe.gateway.audit import open_log
from coldframe.gateway.audited import Auditor
from coldframe.gateway.express import Door
from coldframe.gateway.failures import Faultless
from coldframe.gateway.guard import Admission, Guard, by_key, by_socket, is_loopback
from coldframe.gateway.handover import Handover, require_program
from coldframe.gateway.lasting import Lasting
from coldframe.gateway.parting import Conversation, part
from coldframe.gateway.protocol import bounded
from coldframe.gateway.proxy import ByUrl
from coldframe.gateway.proxy_websocket import LARGEST_MESSAGE
from coldframe.gateway.served import Served
from coldframe.gateway.settings import GatewaySettings
from coldframe.gateway.store import Store
from coldframe.gateway.traces import find_tracer, traced
from coldframe.gateway.watch import Watch
from coldframe.node.sandboxes import CloseReport
from coldframe.protocol.errors import CapabilityError, InvalidRequestError

_BACKLOG = 1024
_UNSENT_BYTES = 1 << 19
"""What the kernel takes of an answer before the client has room for it; else up to 4 MiB for each
client that does not read, all of which has to be worked out first."""
_ALIVE = {socket.TCP_KEEPIDLE: 60, socket.TCP_KEEPINTVL: 15, socket.TCP_KEEPCNT: 4}
"""Seconds of silence, and probes, after which a client's machine counts as gone."""
_LOOK_S = 0.05
_LAST_WORDS_S = 1.0
"""How long WebSockets may go on once commands have ended: those of commands end by themselves."""
_LEAVE_S = 10.0
"""How long requests may take to come to their end when another process is to go on."""
_LAST_ANSWERS_S = 5.0
"""How long answers may take, at least, to be sent once commands have ended."""


@dataclass(frozen=True)
class Listen:
    """An address to serve TCP on. Port 0: any that is free."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def reachable(self) -> Listen:
        """Where a program of this machine reaches it."""
        anywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}
        return Listen(anywhere.get(self.host, self.host), self.port)

    @classmethod
    def parse(cls, text: str) -> Listen:
        """Read HOST:PORT; an IPv6 address stands in brackets.

        Raises:
            InvalidRequestError: it is none.
        """
        host, colon, port = text.rpartition(":")
        if not (colon and host and port.isdecimal() and int(port) < 1 << 16):
            raise InvalidRequestError(f"{text!r} is no HOST:PORT, such as 127.0.0.1:8080")
        return cls(host.strip("[]"), int(port))


class _Server(uvicorn.Server):
    """Leaves signals to us: there may be several of these."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Guest(Protocol):
    """Routes of another service's, beside our own: for clients that know only those."""

    @property
    def routes(self) -> list[BaseRoute]:
        """To be looked up by what is asked for."""

    def beside(self, app: ASGIApp, admit: Admission, watch: Watch) -> ASGIApp:
        """Return an application that answers its own paths, and leaves others to `app`."""


class Doors:
    """Serves a node that is started, or another service."""

    def __init__(
        self,
        served: Served,
        store: Store,
        settings: GatewaySettings,
        guest: Guest | None = None,
        handed: Handover | None = None,
    ) -> None:
        """`handed`: what the program before has left open."""
        self._handed = dict((handed or Handover()).listeners)
        self._listeners: dict[str, socket.socket] = {}
        """Copies of those that listen, by address: a server closes its own."""
        self._served, self._store, self._settings = served, store, settings
        self._watch = Watch(store)
        self._guest = guest
        self._routes = routes(*(guest.routes if guest else ()))
        self._auditor = Auditor(open_log(settings), self._routes)
        self._servers: list[tuple[_Server, asyncio.Task[None]]] = []
        self._unix: list[Path] = []
        self._activity = Activity()
        self._hurried = False
        self._lock: int | None = None

    async def open_unix(self, path: Path) -> None:
        """Serve on a unix socket that only root and this process's user can use.

        Raises:
            CapabilityError: the path is taken, or cannot be made.
        """
        address = f"unix:{path}"
        listener = self._handed_listener(address) or await sockets.listen(path)
        self._unix.append(path)
        await self._serve(address, listener, by_socket, None)

    async def open_tcp(self, listen: Listen, tls: ssl.SSLContext | None = None) -> Listen:
        """Serve on TCP and return where; keys are asked for as soon as there is one.

        Raises:
            InvalidRequestError: there is no key, and this is not a loopback address.
            CapabilityError: it cannot be bound.
        """
        if not is_loopback(listen.host) and await self._store.keyless():
            raise InvalidRequestError(
                f"without keys only loopback is served, not {listen.host!r}: make one with "
                "coldframe key create, or listen on 127.0.0.1"
            )
        listener = self._handed_listener(str(listen)) or _bound(listen)
        at = Listen(*listener.getsockname()[:2])
        self._served.reached_at(f"{'http' if tls is None else 'https'}://{at.reachable}")
        admit, waits = by_key(self._store), self._store.waits
        await self._serve(str(listen), listener, admit, tls, waits=waits)
        return at

    def _handed_listener(self, address: str) -> socket.socket | None:
        fd = self._handed.pop(address, None)
        return None if fd is None else socket.socket(fileno=fd)

    async def _serve(
        self,
        address: str,
        listener: socket.socket,
        admit: Admission,
        tls: ssl.SSLContext | None,
        *,
        waits: bool = False,
    ) -> None:
        """`waits`: see `Door`."""
        listener.setblocking(False)
        self._listeners[address] = listener.dup()
        app: ASGIApp = Guard(self._served.app, admit, self._watch)
        if self._guest is not None:
            app = self._guest.beside(app, admit, self._watch)
        app = self._auditor.over(Faultless(app))
        by_url = self._auditor.over(Faultless(self._served.by_url), only_refused=True)
        app = ByUrl(traced(app, self._routes), by_url)
        app = Counting(app, self._served.meters, self._activity)
        door = Door(admit, self._watch, self._auditor, self._activity, waits)
        express = None if find_tracer() else self._served.express(door)
        settings = self._settings
        config = uvicorn.Config(
            app,
            http=bounded(settings.head_bytes, settings.head_s, self._auditor.refused, express),
            ws=Lasting,
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=round(settings.keep_alive_s),
            ws_max_size=LARGEST_MESSAGE,
            ws_per_message_deflate=False,  # a window per connection, however idle
        )
        config.load()
        config.ssl = tls
        server = _Server(config)
        task = asyncio.create_task(server.serve([listener]))
        while not server.started:
            if task.done():
                await task
                raise CapabilityError("the server ended before it had started")
            await asyncio.sleep(0.005)
        self._servers.append((server, task))

    async def until_idle(self, seconds: float) -> None:
        """Return once there was no sandbox and no request for so long; then nobody gets in."""
        while self._activity.idle_s() < seconds:
            await asyncio.sleep(min(seconds - self._activity.idle_s(), seconds / 4))
            if self._served.live():
                self._activity.touch()
        # Nothing may come between looking and closing: who connects now is turned away, and
        # starts another node.
        self._remove_unix()
        for server, _ in self._servers:
            for listening in server.servers:
                listening.close()
        self._close_listeners()

    def _close_listeners(self) -> None:
        while self._listeners:
            self._listeners.popitem()[1].close()

    async def close(self) -> None:
        """Let nobody in, and return when what is being answered has been.

        Commands that run have `drain_s` to end, so that who waits for one gets its result.
        """
        self._close_listeners()
        self._let_nobody_in()
        latest = _in(self._settings.drain_s)
        await self._while(self._served.running, latest)  # the last that ends tells nobody
        await self._part(max(latest, _in(_LAST_ANSWERS_S)))
        self._remove_unix()

    def _let_nobody_in(self) -> None:
        for server, _ in self._servers:
            server.should_exit = True

    def _remove_unix(self) -> None:
        for path in self._unix:
            path.unlink(missing_ok=True)

    async def _part(self, latest: float) -> None:
        """Let every answer come to its end, or cut it."""
        self._served.answer_now()
        await self._while(self._sockets, _in(_LAST_WORDS_S))
        for tied in self._sockets():
            tied.end()
        await part(self._connections, latest, lambda: self._hurried)
        await self._while(self._tasks, max(latest, _in(_LAST_WORDS_S)))
        for server, _ in self._servers:
            server.force_exit = True  # what it would wait for has been waited for
        await asyncio.gather(*(task for _, task in self._servers))
        self._auditor.close()

    async def _while(self, busy: Callable[[], object], latest: float) -> None:
        """Wait as long as something holds, but not beyond `latest` (the loop's time)."""
        while busy() and _in(0) < latest and not self._hurried:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)

    def _connections(self) -> list[Conversation]:
        known = (one for server, _ in self._servers for one in server.server_state.connections)
        return cast(list[Conversation], list(known))

    def _sockets(self) -> list[Lasting]:
        return [one for one in self._connections() if isinstance(one, Lasting)]

    def _tasks(self) -> bool:
        return any(server.server_state.tasks for server, _ in self._servers)

    async def end(self) -> CloseReport:
        """Once closed, end what is served."""
        return await self._served.close()

    async def leave(self) -> None:
        """Let nobody in and answer everybody at once, but leave what is served to another process.

        What listens goes on listening, for `handover`.
        """
        self._let_nobody_in()
        await self._part(_in(_LEAVE_S))
        self._lock = await self._served.leave()

    def require_successor(self) -> None:
        """Refuse to be replaced by a program that could not go on with what is here. Blocks.

        Raises:
            CapabilityError: see `require_program`.
        """
        require_program(self._served.spawner_protocol)

    def handover(self) -> Handover:
        """Return what another program is to go on with, once left."""
        listeners = {address: one.detach() for address, one in self._listeners.items()}
        return Handover(listeners, sockets.locks(), self._lock)

    def hurry(self) -> None:
        """Do not wait for commands or answers any more."""
        self._hurried = True


def _in(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds


def _bound(listen: Listen) -> socket.socket:
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    # The protocol is named, else asyncio takes it for no TCP and leaves Nagle's delay on.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
        for option, value in _ALIVE.items():
            listener.setsockopt(socket.IPPROTO_TCP, option, value)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        listener.bind((listen.host, listen.port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise CapabilityError(f"{listen.host}:{listen.port} is not free: {error}") from error
    return listener
