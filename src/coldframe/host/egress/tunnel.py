"""Carry a connection whose destination is allowed, once its first bytes agree with that.

What a host's rule allowed must show that host: by the name in the TLS greeting, or in every plain
HTTP request. The other side may speak first; what the client says waits until it is known.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

from coldframe.host.egress import relay
from coldframe.host.egress.desk import Desk
from coldframe.host.egress.flows import Flow
from coldframe.host.egress.openings import MalformedError, Opening, look
from coldframe.host.egress.policy import Verdict
from coldframe.host.egress.requests import CREDENTIALS_PORT, RequestCarrier
from coldframe.host.egress.terminated import carry_terminated
from coldframe.host.egress.upstreams import TLS_PORT
from coldframe.protocol.network import host_name

_DEADLINE_S = 10.0
_READ_BYTES = 1 << 14
_MOST_PIECES = 256
"""Of a beginning: each is looked at anew, and the event loop is everybody's."""


async def carry(desk: Desk, flow: Flow, beginning: bytes = b"") -> None:
    """Carry a connection to its end.

    Args:
        flow: with address, port and verdict; `upstream` if it is connected already.
        beginning: what was read of the client already.
    Raises:
        RefusedError, UnreachableError: noted; nothing more is to be said.
        OSError: either side broke.
    """
    secret = flow.port == CREDENTIALS_PORT and any(map(desk.engine.credentials, flow.names))
    secret |= flow.port == TLS_PORT and any(map(desk.engine.ends_tls, flow.names))
    if not _watched(flow) and not secret:
        await _plainly(desk, flow, beginning)
        return
    flow.watched = True
    down = None
    if not secret:
        # Whoever speaks first, the client or the server: neither waits for the other.
        down = relay.downward(flow, flow.upstream or await desk.connect(flow))
    opening, data = await _opening(desk, flow, beginning)
    if opening is not None and opening.spoken == "http":
        if down is not None and not flow.bytes_in:
            down.stop()  # nothing came yet: requests begin with the client
            down = None
        await RequestCarrier(desk, flow, data, down).run()
        return
    if opening is not None:
        _require_agreement(desk, flow, opening)
        name = _ended_here(desk, flow, opening)
        if name is not None:
            await carry_terminated(desk, flow, name, data)
            return
    desk.announce(flow)
    upstream = flow.upstream or await desk.connect(flow)
    down = down or relay.downward(flow, upstream)
    await _send(flow, upstream, data)
    await desk.carry(flow, down)


def _watched(flow: Flow) -> bool:
    return bool(flow.verdict.names) or "tcp" not in flow.verdict.protocols


async def _plainly(desk: Desk, flow: Flow, beginning: bytes) -> None:
    if flow.upstream is None:
        await desk.connect(flow)
    desk.announce(flow)
    await freely(desk, flow, beginning)


async def freely(desk: Desk, flow: Flow, beginning: bytes) -> None:
    """Carry both ways of a connection whose two sides have agreed. Raises OSError."""
    assert flow.upstream is not None
    down = relay.downward(flow, flow.upstream) if beginning else None
    await _send(flow, flow.upstream, beginning)
    await desk.carry(flow, down)


async def _send(flow: Flow, upstream: socket.socket, data: bytes) -> None:
    if data:
        await flow.allow(len(data))
        flow.count_out(len(data))
        await asyncio.get_running_loop().sock_sendall(upstream, data)


async def _opening(desk: Desk, flow: Flow, data: bytes) -> tuple[Opening | None, bytes]:
    """Read until it is known what it is; None: the client said nothing at all.

    The first byte may take as long as it likes, the rest must follow soon.
    """
    loop = asyncio.get_running_loop()
    try:
        if not data:
            data = await loop.sock_recv(flow.client, _READ_BYTES)
            if not data:
                return None, b""
        opening = look(data)
        async with asyncio.timeout(_DEADLINE_S):
            for _ in range(_MOST_PIECES):
                if opening is not None:
                    break
                more = await loop.sock_recv(flow.client, _READ_BYTES)
                data += more
                opening = look(data, whole=not more)
    except MalformedError as error:
        raise desk.refuse(flow, str(error)) from None
    except TimeoutError:
        raise desk.refuse(flow, "it did not tell in time which host is meant") from None
    if opening is None:
        raise desk.refuse(flow, "it began in too many pieces to tell which host is meant")
    return opening, data


def _require_agreement(desk: Desk, flow: Flow, opening: Opening) -> None:
    """Refuse a connection whose beginning does not agree with what allowed it.

    Raises RefusedError.
    """
    flow.spoken = "tls" if opening.spoken == "tls" else "tcp"
    if not flow.verdict.names:
        verdict = _by_protocol(desk, flow)
    elif opening.spoken == "tls":
        verdict = _by_server_name(desk, flow, opening.name)
    elif opening.spoken == "http2":
        verdict = Verdict(False, reason="HTTP/2 without TLS does not show which host is meant")
    else:
        verdict = _by_any_name(desk, flow)
    if not verdict.allowed:
        raise desk.refuse(flow, verdict.reason)
    flow.verdict = verdict


def _ended_here(desk: Desk, flow: Flow, opening: Opening) -> str | None:
    """Return the host in whose place the node speaks TLS; None: the client speaks with the host."""
    if opening.spoken != "tls" or opening.name is None or flow.port != TLS_PORT:
        return None
    with contextlib.suppress(ValueError):
        name = host_name(opening.name)
        if name in flow.names and desk.engine.ends_tls(name):
            return name
    return None


def _by_protocol(desk: Desk, flow: Flow) -> Verdict:
    assert flow.address is not None
    name = flow.names[0] if flow.names else ""
    return desk.engine.named(name, flow.address, flow.port, flow.spoken)


def _by_server_name(desk: Desk, flow: Flow, shown: str | None) -> Verdict:
    assert flow.address is not None
    if shown is None:
        return Verdict(False, reason="its TLS greeting names no host")
    try:
        name = host_name(shown)
    except ValueError as error:
        return Verdict(False, reason=f"its TLS greeting: {error}")
    flow.name = name
    if name not in flow.names:
        return Verdict(False, reason="TLS names another host than was resolved to this address")
    return desk.engine.named(name, flow.address, flow.port, "tls")


def _by_any_name(desk: Desk, flow: Flow) -> Verdict:
    assert flow.address is not None
    verdict = Verdict(False, reason="no name")
    for name in flow.verdict.names:
        verdict = desk.engine.named(name, flow.address, flow.port, "tcp")
        if verdict.allowed:
            flow.name = name
            break
    return verdict
