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
from dataclasses import dataclass, field
from functools import partial
from ipaddress import IPv4Address, IPv6Address, ip_address

from coldframe.host.egress import dns
from coldframe.host.egress.desk import Desk, RefusedError, Serve, UnreachableError
from coldframe.host.egress.events import EventLog
from coldframe.host.egress.flows import Budget, Flow
from coldframe.host.egress.namespace import work_inside, write_sysctl
from coldframe.host.egress.netlink import RouteSocket
from coldframe.host.egress.policy import Engine
from coldframe.host.egress.proxy import serve_proxy
from coldframe.host.egress.redirect import DatagramRefuser, serve_redirected
from coldframe.host.egress.resolver import Names, Resolve
from coldframe.host.egress.steering import Steering, refusal
from coldframe.protocol.errors import CapabilityError
from coldframe.protocol.network import EgressKind

SERVICE = "127.0.0.53"
"""Where DNS (port 53) and the proxy stand in the sandbox."""
PROXY_PORT = 3128
OWN4, OWN6 = IPv4Address("169.254.1.1"), IPv6Address("fd63:6f6c:6466::1")
"""What connections to outside come from, inside."""
_STEERED_PORT = 1
_BACKLOG = 4096
_MOST_ACCEPTS = 16
"""Taken at once from one listener before others have their turn."""
_PAUSE_S = 0.05
_DNS_IDLE_S = 30.0
_MOST_QUERIES = 256


def _as_listed(address: IPv4Address | IPv6Address, port: int) -> bytes:
    words = struct.unpack(f"={len(address.packed) // 4}I", address.packed)
    return b"".join(b"%08X" % word for word in words) + b":%04X" % port


LISTENERS = frozenset(
    _as_listed(ip_address(address), port)
    for address, port in (
        (SERVICE, 53),
        (SERVICE, PROXY_PORT),
        (OWN4, _STEERED_PORT),
        (OWN6, _STEERED_PORT),
    )
)
"""TCP listeners that are not the sandbox's own, as the kernel lists them."""


@dataclass
class _Sockets:
    """Everything that is open inside."""

    steered4: socket.socket
    proxy: socket.socket
    dns_stream: socket.socket
    dns: socket.socket
    sink4: socket.socket
    errors4: socket.socket
    six: tuple[socket.socket, socket.socket, socket.socket] | None = None
    """Steered, sink and errors of IPv6; None: the machine has none."""
    undo: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)


class Gateway:
    """Belongs to one event loop."""

    def __init__(
        self, network: int, engine: Engine, resolve: Resolve, log: EventLog, budget: Budget
    ) -> None:
        """`network` is a descriptor of the sandbox's network namespace, and is now its own."""
        self._network = network
        self.desk = Desk(engine, Names(resolve), log, budget)
        self._undo = contextlib.ExitStack()
        self._accepting = False
        self._queries: set[asyncio.Task[None]] = set()

    async def open(self, steering: Steering) -> None:
        """Make the listeners; return when they answer. `steering` is now its own.

        Raises:
            OSError: an address or a port is taken inside.
        """
        self._undo.callback(steering.close)
        sockets = await work_inside(self._network, _make_sockets)
        self._undo.push(sockets.undo)
        self._undo.callback(self._stop_accepting)
        self._accepting = True
        self._steer(sockets, steering)
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

    def _steer(self, sockets: _Sockets, steering: Steering) -> None:
        serve = partial(serve_redirected, self.desk)
        listeners: dict[tuple[int, int], socket.socket] = {
            (socket.AF_INET, socket.SOCK_STREAM): sockets.steered4,
            (socket.AF_INET, socket.SOCK_DGRAM): sockets.sink4,
        }
        sinks = [(sockets.sink4, sockets.errors4)]
        if sockets.six is not None:
            steered6, sink6, errors6 = sockets.six
            listeners[socket.AF_INET6, socket.SOCK_STREAM] = steered6
            listeners[socket.AF_INET6, socket.SOCK_DGRAM] = sink6
            sinks.append((sink6, errors6))
            self._listen(steered6, EgressKind.TCP, serve)
        self._listen(sockets.steered4, EgressKind.TCP, serve)
        for sink, errors in sinks:
            self._undo.callback(DatagramRefuser(self.desk, sink, errors).close)
        steering.attach(self._network, listeners)

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
                    await work_inside(network, _undo_inside)
            finally:
                os.close(network)

    def _stop_accepting(self) -> None:
        self._accepting = False

    # --- listeners --------------------------------------------------------------------

    def _add_reader(self, one: socket.socket, ready: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(one, ready)
        self._undo.callback(loop.remove_reader, one)

    def _listen(self, listener: socket.socket, kind: EgressKind, serve: Serve) -> None:
        self._add_reader(listener, partial(self._accept, listener, kind, serve))

    def _accept(self, listener: socket.socket, kind: EgressKind, serve: Serve) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(_MOST_ACCEPTS):
            try:
                client, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                    # It stays ready: look again later, and let others work meanwhile.
                    loop.remove_reader(listener)
                    again = partial(self._accept, listener, kind, serve)
                    loop.call_later(_PAUSE_S, self._resume, listener, again)
                return
            self.desk.serve(kind, client, serve)

    def _resume(self, listener: socket.socket, ready: Callable[[], None]) -> None:
        if self._accepting:
            asyncio.get_running_loop().add_reader(listener, ready)

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


# --- in the sandbox's namespace -------------------------------------------------------


def _make_sockets() -> _Sockets:
    with contextlib.ExitStack() as undo:

        def open_socket(family: int, kind: int, protocol: int = 0) -> socket.socket:
            flags = socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
            return undo.enter_context(socket.socket(family, kind | flags, protocol))

        def listener(family: int, address: str, port: int) -> socket.socket:
            made = open_socket(family, socket.SOCK_STREAM)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind((address, port))
            made.listen(_BACKLOG)
            return made

        def sink(family: int, address: str, level: int, option: int) -> socket.socket:
            made = open_socket(family, socket.SOCK_DGRAM)
            made.setsockopt(level, option, 1)
            made.bind((address, _STEERED_PORT))
            return made

        with contextlib.closing(RouteSocket()) as routes:
            routes.add_address(OWN4)
            routes.add_local_default(OWN4)
            six = _add_six(routes)
        _set_echo(ignored=True)
        resolver = open_socket(socket.AF_INET, socket.SOCK_DGRAM)
        resolver.bind((SERVICE, 53))
        sockets = _Sockets(
            steered4=listener(socket.AF_INET, str(OWN4), _STEERED_PORT),
            proxy=listener(socket.AF_INET, SERVICE, PROXY_PORT),
            dns_stream=listener(socket.AF_INET, SERVICE, 53),
            dns=resolver,
            sink4=sink(socket.AF_INET, str(OWN4), socket.SOL_IP, 20),
            errors4=open_socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP),
        )
        if six:
            sockets.six = (
                listener(socket.AF_INET6, str(OWN6), _STEERED_PORT),
                sink(socket.AF_INET6, str(OWN6), socket.IPPROTO_IPV6, 74),
                open_socket(socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6),
            )
        sockets.undo = undo.pop_all()
        return sockets


def _add_six(routes: RouteSocket) -> bool:
    try:
        routes.add_address(OWN6)
        routes.add_local_default(OWN6)
    except OSError:  # IPv6 is switched off on this machine
        return False
    return True


def _set_echo(*, ignored: bool) -> None:
    """Let the kernel not answer pings in the name of the whole world."""
    for name in ("ipv4/icmp_echo_ignore_all", "ipv6/icmp/echo_ignore_all"):
        with contextlib.suppress(OSError):
            write_sysctl(name, "1" if ignored else "0")


def _undo_inside() -> None:
    with contextlib.closing(RouteSocket()) as routes:
        for own in (OWN4, OWN6):
            with contextlib.suppress(OSError):
                routes.remove_local_default(own)
            with contextlib.suppress(OSError):
                routes.remove_address(own)
    _set_echo(ignored=False)
