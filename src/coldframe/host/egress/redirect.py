"""Serve connections that were meant for somebody outside."""

from __future__ import annotations

import asyncio
import socket
import struct
from ipaddress import IPv4Address, IPv6Address, ip_address

from coldframe.host.egress import tunnel
from coldframe.host.egress.addresses import Address, canonical
from coldframe.host.egress.desk import Desk
from coldframe.host.egress.flows import Flow
from coldframe.protocol.network import EgressDecision, EgressKind

_ORIGINAL4, _ORIGINAL6 = 20, 74
"""IP_RECVORIGDSTADDR, IPV6_RECVORIGDSTADDR."""
_MOST_DATAGRAMS = 16
_PAUSE_S = 0.002
"""Between so many: a flood is the sandbox's own affair, the event loop everybody's."""
_UNREACHABLE4, _PORT4 = 3, 3
_UNREACHABLE6, _PORT6 = 1, 4
_UDP_HEADER = 8


async def serve_redirected(desk: Desk, flow: Flow) -> None:
    """Serve one connection: allowed as its address is, then as its first bytes say."""
    flow.address, flow.port = _destination(flow.client)
    flow.names = desk.names.names_of(flow.address)
    flow.verdict = desk.engine.address(flow.address, flow.port, flow.names)
    if not flow.verdict.allowed:
        raise desk.refuse(flow, flow.verdict.reason)
    if flow.verdict.names:
        flow.names = flow.verdict.names
    await tunnel.carry(desk, flow)


def _destination(client: socket.socket) -> tuple[Address, int]:
    """Where a redirected connection was meant to go."""
    address, port = client.getsockname()[:2]
    return canonical(ip_address(address)), int(port)


class DatagramRefuser:
    """Refuses what is sent by UDP: at once, with the answer of a closed port, and an event."""

    def __init__(self, desk: Desk, sink: socket.socket, errors: socket.socket) -> None:
        """Args: `sink` gets every datagram for outside, `errors` is a raw ICMP socket."""
        self._desk, self._sink, self._errors = desk, sink, errors
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._loop.add_reader(sink.fileno(), self._refuse)

    def close(self) -> None:
        """Give the sockets back."""
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._sink.fileno())
        self._sink.close()
        self._errors.close()

    def _refuse(self) -> None:
        for _ in range(_MOST_DATAGRAMS):
            try:
                data, ancillary, _, source = self._sink.recvmsg(_UDP_HEADER, 256)
            except OSError:
                return
            for level, kind, value in ancillary:
                if (level, kind) == (socket.SOL_IP, _ORIGINAL4):
                    self._answer4(source, IPv4Address(value[4:8]), value, len(data))
                elif (level, kind) == (socket.IPPROTO_IPV6, _ORIGINAL6):
                    self._answer6(source, IPv6Address(value[8:24]), value, len(data))
        self._loop.remove_reader(self._sink.fileno())
        self._timer = self._loop.call_later(_PAUSE_S, self._resume)

    def _resume(self) -> None:
        self._loop.add_reader(self._sink.fileno(), self._refuse)

    def _note(self, address: IPv4Address | IPv6Address, port: int) -> None:
        found = canonical(address)
        names = self._desk.names.names_of(found)
        self._desk.log.add(
            EgressKind.UDP,
            EgressDecision.REFUSED,
            name=names[0] if names else None,
            address=str(found),
            port=port,
            reason="UDP is not carried",
        )

    def _answer4(
        self, source: tuple[str, int], to: IPv4Address, sockaddr: bytes, size: int
    ) -> None:
        (port,) = struct.unpack_from("!H", sockaddr, 2)
        self._note(to, port)
        sender = ip_address(source[0])
        packet = struct.pack("!BBHHHBBH", 0x45, 0, 28 + size, 0, 0, 64, socket.IPPROTO_UDP, 0)
        packet += sender.packed + to.packed
        packet += struct.pack("!HHHH", source[1], port, _UDP_HEADER + size, 0)
        body = struct.pack("!BBHI", _UNREACHABLE4, _PORT4, 0, 0) + packet
        self._send(body[:2] + struct.pack("!H", _checksum(body)) + body[4:], source[0])

    def _answer6(
        self, source: tuple[str, int], to: IPv6Address, sockaddr: bytes, size: int
    ) -> None:
        (port,) = struct.unpack_from("!H", sockaddr, 2)
        self._note(to, port)
        sender = ip_address(source[0])
        packet = struct.pack("!IHBB", 0x60000000, _UDP_HEADER + size, socket.IPPROTO_UDP, 64)
        packet += sender.packed + to.packed
        packet += struct.pack("!HHHH", source[1], port, _UDP_HEADER + size, 0)
        # The kernel puts in the checksum.
        self._send(struct.pack("!BBHI", _UNREACHABLE6, _PORT6, 0, 0) + packet, source[0])

    def _send(self, message: bytes, target: str) -> None:
        try:
            self._errors.sendto(message, (target, 0))
        except OSError:  # its buffers are full: the sender waits, as for a lost answer
            return


def _checksum(data: bytes) -> int:
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
