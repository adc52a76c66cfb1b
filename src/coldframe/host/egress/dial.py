"""Connect to the outside, from the node's own network namespace."""

from __future__ import annotations

import asyncio
import socket

from coldframe.host import forks
from coldframe.host.egress.addresses import Address

CONNECT_TIMEOUT_S = 30.0


async def open_connection(address: Address, port: int) -> socket.socket:
    """Connect to a port of an address. Raises OSError, TimeoutError."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    made = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    forks.own_socket(made)
    try:
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await asyncio.get_running_loop().sock_connect(made, (str(address), port))
    except BaseException:
        made.close()
        raise
    return made
