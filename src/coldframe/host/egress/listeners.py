"""What stands in a sandbox's network namespace while it has a policy, and how it is made there.

DNS and the proxy have one loopback address. What leaves for outside comes from two addresses of
our own, by routes that make every other address one of the namespace's.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address

from coldframe.host import forks
from coldframe.host.egress.namespace import write_sysctl
from coldframe.host.egress.netlink import RouteSocket

SERVICE = "127.0.0.53"
"""Where DNS (port 53) and the proxy stand in the sandbox."""
PROXY_PORT = 3128
OWN4, OWN6 = IPv4Address("169.254.1.1"), IPv6Address("fd63:6f6c:6466::1")
"""What connections to outside come from, inside."""
_STEERED_PORT = 1
_BACKLOG = 4096
_RECEIVE_ORIGINAL = {
    socket.AF_INET: (socket.SOL_IP, 20),
    socket.AF_INET6: (socket.IPPROTO_IPV6, 74),
}
"""IP_RECVORIGDSTADDR, IPV6_RECVORIGDSTADDR."""
_ERRORS = {socket.AF_INET: socket.IPPROTO_ICMP, socket.AF_INET6: socket.IPPROTO_ICMPV6}


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
class Listeners:
    """Everything that is open inside."""

    proxy: socket.socket
    dns_stream: socket.socket
    dns: socket.socket
    steered: dict[tuple[int, int], socket.socket]
    """What takes everything for outside, by family and kind; no IPv6 if the machine has none."""
    sinks: list[tuple[socket.socket, socket.socket]]
    """Of those, what takes datagrams, each with the raw socket that answers them."""
    undo: contextlib.ExitStack
    """Closes them all."""


def make_listeners() -> Listeners:
    """Make them in the namespace of the calling thread. Raises OSError: one is taken inside."""
    with contextlib.ExitStack() as undo:

        def open_socket(family: int, kind: int, protocol: int = 0) -> socket.socket:
            flags = socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
            made = forks.own_socket(socket.socket(family, kind | flags, protocol))
            return undo.enter_context(made)

        def listener(family: int, address: str, port: int) -> socket.socket:
            made = open_socket(family, socket.SOCK_STREAM)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind((address, port))
            made.listen(_BACKLOG)
            return made

        steered: dict[tuple[int, int], socket.socket] = {}
        sinks = []
        for own in _add_routes():
            family = socket.AF_INET if own.version == 4 else socket.AF_INET6
            steered[family, socket.SOCK_STREAM] = listener(family, str(own), _STEERED_PORT)
            sink = steered[family, socket.SOCK_DGRAM] = open_socket(family, socket.SOCK_DGRAM)
            sink.setsockopt(*_RECEIVE_ORIGINAL[family], 1)
            sink.bind((str(own), _STEERED_PORT))
            sinks.append((sink, open_socket(family, socket.SOCK_RAW, _ERRORS[family])))
        _set_echo(ignored=True)
        dns = open_socket(socket.AF_INET, socket.SOCK_DGRAM)
        dns.bind((SERVICE, 53))
        proxy = listener(socket.AF_INET, SERVICE, PROXY_PORT)
        dns_stream = listener(socket.AF_INET, SERVICE, 53)
        return Listeners(proxy, dns_stream, dns, steered, sinks, undo.pop_all())


def _add_routes() -> list[IPv4Address | IPv6Address]:
    """Add our own addresses and the routes from them; return those that the machine has."""
    added: list[IPv4Address | IPv6Address] = []
    with contextlib.closing(RouteSocket()) as routes:
        for own in (OWN4, OWN6):
            try:
                routes.add_address(own)
                routes.add_local_default(own)
            except OSError:
                if own.version == 4:
                    raise
                break  # IPv6 is switched off on this machine
            added.append(own)
    return added


def remove_routes() -> None:
    """Take back what is not closed with the listeners, in the calling thread's namespace."""
    with contextlib.closing(RouteSocket()) as routes:
        for own in (OWN4, OWN6):
            with contextlib.suppress(OSError):
                routes.remove_local_default(own)
            with contextlib.suppress(OSError):
                routes.remove_address(own)
    _set_echo(ignored=False)


def _set_echo(*, ignored: bool) -> None:
    """Let the kernel not answer pings in the name of the whole world."""
    for name in ("ipv4/icmp_echo_ignore_all", "ipv6/icmp/echo_ignore_all"):
        with contextlib.suppress(OSError):
            write_sysctl(name, "1" if ignored else "0")
