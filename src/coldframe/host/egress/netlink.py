"""Just enough of rtnetlink: addresses and routes of the namespace a socket was made in."""

from __future__ import annotations

import os
import socket
import struct
from ipaddress import IPv4Address, IPv6Address

Address = IPv4Address | IPv6Address

_NEWADDR, _NEWROUTE, _GETROUTE, _DELADDR, _DELROUTE = 20, 24, 26, 21, 25
_ERROR = 2
_REQUEST, _ACK, _REPLACE, _CREATE = 0x1, 0x4, 0x100, 0x400
_HEADER = struct.Struct("=IHHII")
_ADDRESS = struct.Struct("=BBBBI")
_ROUTE = struct.Struct("=BBBBBBBBI")
_ATTRIBUTE = struct.Struct("=HH")
_IFA_ADDRESS, _IFA_LOCAL, _IFA_FLAGS = 1, 2, 8
_NODAD = 0x02
_RTA_DST, _RTA_OIF, _RTA_PREFSRC = 1, 4, 7
_TABLE_MAIN, _STATIC, _HOST_SCOPE = 254, 4, 254
_LOCAL = 2
LOOPBACK_INDEX = 1


class RouteSocket:
    """A rtnetlink socket of the calling thread's network namespace."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0)
        self._serial = 0

    def close(self) -> None:
        """Give the descriptor back."""
        self._socket.close()

    def add_address(self, address: Address) -> None:
        """Give loopback one more address. Raises OSError."""
        flags = struct.pack("=I", _NODAD)
        body = _ADDRESS.pack(_family(address), address.max_prefixlen, _NODAD, 0, LOOPBACK_INDEX)
        body += _attribute(_IFA_LOCAL, address.packed) + _attribute(_IFA_ADDRESS, address.packed)
        self._ask(_NEWADDR, _CREATE | _REPLACE, body + _attribute(_IFA_FLAGS, flags))

    def remove_address(self, address: Address) -> None:
        """Take it away again. Raises OSError."""
        body = _ADDRESS.pack(_family(address), address.max_prefixlen, 0, 0, LOOPBACK_INDEX)
        self._ask(_DELADDR, 0, body + _attribute(_IFA_LOCAL, address.packed))

    def add_local_default(self, source: Address) -> None:
        """Make every address that no other route knows one of this namespace's own.

        So packets to them come back in by loopback. `source` is what they come from.
        """
        self._ask(_NEWROUTE, _CREATE | _REPLACE, _local_default(source))

    def remove_local_default(self, source: Address) -> None:
        """Take the route away again. Raises OSError."""
        self._ask(_DELROUTE, 0, _local_default(source))

    def is_own(self, address: Address) -> bool:
        """Whether packets to an address stay on this machine. Raises OSError: no route."""
        body = _ROUTE.pack(_family(address), address.max_prefixlen, 0, 0, 0, 0, 0, 0, 0)
        answer = self._ask(_GETROUTE, 0, body + _attribute(_RTA_DST, address.packed), ack=False)
        kind: int = _ROUTE.unpack_from(answer)[7]
        return kind != 1  # of all kinds only unicast leaves this machine for one other

    def _ask(self, kind: int, flags: int, body: bytes, *, ack: bool = True) -> bytes:
        """Send one request and return the body of its answer; the kernel answers at once."""
        self._serial += 1
        flags |= _REQUEST | (_ACK if ack else 0)
        header = _HEADER.pack(_HEADER.size + len(body), kind, flags, self._serial, 0)
        self._socket.send(header + body)
        while True:
            answer = self._socket.recv(65536)
            length, answered, _, serial, _ = _HEADER.unpack_from(answer)
            if serial != self._serial:
                continue
            content = answer[_HEADER.size : length]
            if answered != _ERROR:
                return content
            (number,) = struct.unpack_from("=i", content)
            if number:
                raise OSError(-number, os.strerror(-number), "rtnetlink")
            return b""


def _family(address: Address) -> int:
    return socket.AF_INET if address.version == 4 else socket.AF_INET6


def _attribute(kind: int, value: bytes) -> bytes:
    padding = -len(value) % 4
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), kind) + value + b"\0" * padding


def _local_default(source: Address) -> bytes:
    body = _ROUTE.pack(_family(source), 0, 0, 0, _TABLE_MAIN, _STATIC, _HOST_SCOPE, _LOCAL, 0)
    body += _attribute(_RTA_OIF, struct.pack("=I", LOOPBACK_INDEX))
    return body + _attribute(_RTA_PREFSRC, source.packed)
