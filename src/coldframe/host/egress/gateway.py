"""A sandbox's way out: listeners in its network namespace, there only while a policy is.

DNS and the proxy stand on one loopback address. Everything else that leaves for outside is
steered to one more listener, whatever its destination; nothing in the sandbox is set for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import struct
from collections.abc import Callable
from functools import partial
from ipaddress import IPv4Address, IPv6Address

from coldframe.host import forks
from coldframe.host.egress import dns
from coldframe.host.egress.desk import Desk, RefusedError, Room, Serve, UnreachableError
from coldframe.host.egress.events import EventLog
from coldframe.host.egress.flows import Flow
from coldframe.host.egress.listeners import (
    OWN4,
    OWN6,
    Listeners,
    make_listeners,
    remove_routes,
)
from coldframe.host.egress.namespace import work_inside
from coldframe.host.egress.policy import Engine
from coldframe.host.egress.proxy import serve_proxy
from coldframe.host.egress.redirect import DatagramRefuser, serve_redirected
from coldframe.host.egress.resolver import Names, Resolve
from coldframe.host.egress.steering import Steering, refusal
from coldframe.protocol.errors import CapabilityError
from coldframe.protocol.network import EgressKind

_MOST_ACCEPTS = 16
"""Taken at once from one listener before others have their turn."""
_FLOOD_S = 0.002
"""Pause behind so many: a flood is the sandbox's own affair, the event loop everybody's."""
_SHORTAGE_S = 0.05
"""Pause when there is no room, descriptor or memory for one more: it waits in the kernel."""
_DNS_IDLE_S = 30.0
_MOST_QUERIES = 256


class Gateway:
    """Belongs to one event loop."""

    def __init__(
        self, network: int, engine: Engine, resolve: Resolve, log: EventLog, room: Room
    ) -> None:
        """`network` is a descriptor of the sandbox's network namespace, and is now its own."""
        self._network = network
        forks.own(self)
        self.desk = Desk(engine, Names(resolve), log, room)
        self._undo = contextlib.ExitStack()
        self._accepting = False
        self._queries: set[asyncio.Task[None]] = set()

    async def open(self, steering: Steering) -> None:
        """Make the listeners; return when they answer. `steering` is now its own.

        Raises:
            OSError: an address or a port is taken inside.
        """

        def work() -> Listeners:
            made = make_listeners()
            with contextlib.ExitStack() as undo:
                undo.push(made.undo)
                steering.attach(self._network, made.steered)
                made.undo = undo.pop_all()
            return made

        self._undo.callback(steering.close)
        sockets = await work_inside(self._network, work)
        self._undo.push(sockets.undo)
        self._undo.callback(self._stop_accepting)
        self._accepting = True
        self._take_steered(sockets)
        self._listen(sockets.proxy, EgressKind.HTTP, partial(serve_proxy, self.desk))
        self._listen(sockets.dns_stream, EgressKind.DNS, self._serve_dns)
        self._add_reader(sockets.dns, partial(self._take_queries, sockets.dns))

    @staticmethod
    def load_steering() -> Steering:
        """Do what can be done before there is a sandbox.

        Raises CapabilityError: the kernel cannot steer connections.
        """
        try:
            return Steering((OWN4, OWN6))
        except OSError as error:
            raise CapabilityError(refusal() or str(error)) from error

    def _take_steered(self, sockets: Listeners) -> None:
        serve = partial(serve_redirected, self.desk)
        for (_, kind), one in sockets.steered.items():
            if kind == socket.SOCK_STREAM:
                self._listen(one, EgressKind.TCP, serve)
        for sink, errors in sockets.sinks:
            self._undo.callback(DatagramRefuser(self.desk, sink, errors).close)

    def abandon(self) -> None:
        """See `forks.Owner`: the namespace must not outlive its sandbox in a child."""
        network, self._network = self._network, -1
        if network >= 0:
            os.close(network)

    async def close(self, *, sandbox_ends: bool = False) -> None:
        """End every connection and take everything out of the namespace. Twice is fine.

        With `sandbox_ends` its addresses and routes are left to go with it.
        """
        opened = self._network >= 0
        self._undo.close()
        for task in list(self._queries):
            task.cancel()
        await asyncio.gather(*self._queries, return_exceptions=True)
        await self.desk.close()
        if opened and self._network >= 0:
            network, self._network = self._network, -1
            try:
                if not sandbox_ends:
                    await work_inside(network, remove_routes)
            finally:
                os.close(network)

    def _stop_accepting(self) -> None:
        self._accepting = False

    # --- listeners --------------------------------------------------------------------

    def _add_reader(self, one: socket.socket, ready: Callable[[], None]) -> None:
        loop, fd = asyncio.get_running_loop(), one.fileno()
        loop.add_reader(fd, ready)  # by number: of a socket asyncio makes a text each time
        self._undo.callback(loop.remove_reader, fd)

    def _listen(self, listener: socket.socket, kind: EgressKind, serve: Serve) -> None:
        self._add_reader(listener, partial(self._accept, listener, kind, serve))

    def _accept(self, listener: socket.socket, kind: EgressKind, serve: Serve) -> None:
        again = partial(self._accept, listener, kind, serve)
        for _ in range(_MOST_ACCEPTS):
            if self.desk.full_for_now:
                self._pause(listener, again, _SHORTAGE_S)
                return
            try:
                client, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                    self._pause(listener, again, _SHORTAGE_S)
                return
            self.desk.serve(kind, client, serve)
        self._pause(listener, again, _FLOOD_S)

    def _pause(self, one: socket.socket, ready: Callable[[], None], delay_s: float) -> None:
        """Look again later what has come, and let others work meanwhile: it stays ready."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(one.fileno())
        loop.call_later(delay_s, self._resume, one, ready)

    def _resume(self, one: socket.socket, ready: Callable[[], None]) -> None:
        if self._accepting:
            asyncio.get_running_loop().add_reader(one.fileno(), ready)

    # --- DNS --------------------------------------------------------------------------

    def _take_queries(self, server: socket.socket) -> None:
        for _ in range(_MOST_ACCEPTS):
            try:
                data, source = server.recvfrom(4096)
            except OSError:
                return
            if len(self._queries) >= _MOST_QUERIES:
                continue  # it asks again
            task = asyncio.ensure_future(self._answer(server, data, source))
            self._queries.add(task)
            task.add_done_callback(self._queries.discard)
        self._pause(server, partial(self._take_queries, server), _FLOOD_S)

    async def _answer(self, server: socket.socket, data: bytes, source: tuple[str, int]) -> None:
        reply = await self.reply(data)
        if reply:
            with contextlib.suppress(OSError):  # who asked has gone
                server.sendto(reply, source)

    async def _serve_dns(self, flow: Flow) -> None:
        loop = asyncio.get_running_loop()
        data = b""
        while True:
            async with asyncio.timeout(_DNS_IDLE_S):
                while len(data) < 2 or len(data) < 2 + struct.unpack("!H", data[:2])[0]:
                    more = await loop.sock_recv(flow.client, 4096)
                    if not more:
                        return
                    data += more
            (size,) = struct.unpack("!H", data[:2])
            question, data = data[2 : 2 + size], data[2 + size :]
            reply = await self.reply(question, stream=True)
            if not reply:
                return
            await loop.sock_sendall(flow.client, struct.pack("!H", len(reply)) + reply)

    async def reply(self, data: bytes, *, stream: bool = False) -> bytes:
        """Answer one DNS message; empty: it deserves none."""
        try:
            query = dns.parse(data)
        except dns.MalformedQueryError as error:
            return error.reply
        if query.name == "localhost" or query.name.endswith(".localhost"):
            return query.reply(dns.OK, (IPv4Address("127.0.0.1"), IPv6Address("::1")))
        try:
            if query.kind not in (dns.A, dns.AAAA):
                # Only addresses are known here; other kinds of an allowed name are empty.
                code = dns.OK if self.desk.engine.name(query.name).allowed else dns.NO_NAME
                return query.reply(code, stream=stream)
            addresses = await self.desk.resolve(query.name)
        except RefusedError:
            return query.reply(dns.NO_NAME, stream=stream)
        except UnreachableError:
            return query.reply(dns.SERVER_FAILURE, stream=stream)
        return query.reply(dns.OK if addresses else dns.NO_NAME, addresses, stream=stream)
