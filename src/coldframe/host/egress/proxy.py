"""An HTTP proxy for the sandbox: CONNECT, and requests for `http://` one per connection."""

from __future__ import annotations

import asyncio

from coldframe.host.egress import tunnel
from coldframe.host.egress.addresses import Address
from coldframe.host.egress.desk import Desk, RefusedError, UnreachableError
from coldframe.host.egress.flows import Flow
from coldframe.host.egress.http import (
    Authority,
    BadRequestError,
    Head,
    absolute,
    authority,
    hop_fields,
    refusal,
)
from coldframe.host.egress.policy import Verdict
from coldframe.host.egress.requests import ClientStream, credentials_for, send_body
from coldframe.host.egress.upstreams import PlainUpstream, TlsUpstream
from coldframe.protocol.network import Credential, EgressDecision, EgressKind

_ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"


async def serve_proxy(desk: Desk, flow: Flow) -> None:
    """Serve one connection to the proxy. Raises as `tunnel.carry`."""
    stream = ClientStream(flow.client)
    try:
        head = await stream.head()
        if head is None:
            return
        if head.method == "CONNECT":
            await _connect(desk, flow, stream, head)
        else:
            await _request(desk, flow, stream, head)
    except BadRequestError as error:
        await _say(flow, "400 Bad Request", str(error))
        raise desk.refuse(flow, str(error)) from None


async def _connect(desk: Desk, flow: Flow, stream: ClientStream, head: Head) -> None:
    flow.kind = EgressKind.CONNECT
    await _reach(desk, flow, authority(head.target, None))
    await asyncio.get_running_loop().sock_sendall(flow.client, _ESTABLISHED)
    await tunnel.carry(desk, flow, stream.rest())


async def _request(desk: Desk, flow: Flow, stream: ClientStream, head: Head) -> None:
    flow.kind = EgressKind.HTTP
    flow.spoken, flow.watched = "http", True
    wanted, path = absolute(head.target)
    length = head.length
    secrets = credentials_for(desk, head, wanted.name, wanted.port)
    by_tls = wanted.name is not None and any(one.tls for one in secrets)
    await _reach(desk, flow, wanted, connect=not by_tls)
    drop = hop_fields(head) | {"host"} | {one.header.lower() for one in secrets}
    upgrade = head.upgrade == "websocket" and not by_tls
    drop |= frozenset() if upgrade else {"connection", "upgrade", "http2-settings"}
    add = [("Host", _host(wanted)), *_plain(secrets)]
    if not upgrade:
        add.append(("Connection", "close"))
    desk.announce(flow)
    upstream: PlainUpstream | TlsUpstream
    if by_tls and wanted.name is not None:
        upstream = await TlsUpstream.open(flow, wanted.name)
    else:
        assert flow.upstream is not None
        upstream = PlainUpstream(flow, flow.upstream, None)
    await upstream.send(head.encode(target=path, drop=drop, add=tuple(add)))
    if upgrade and await upstream.upgraded():
        await tunnel.freely(desk, flow, stream.rest())
        return
    if isinstance(upstream, PlainUpstream):
        upstream.start()
    await send_body(stream, length, upstream)
    await upstream.down()


def _plain(secrets: list[Credential]) -> list[tuple[str, str]]:
    return [(one.header, one.value.get_secret_value()) for one in secrets]


def _host(wanted: Authority) -> str:
    host = wanted.name or str(wanted.address)
    host = f"[{host}]" if ":" in host else host
    return host if wanted.port == 80 else f"{host}:{wanted.port}"


async def _reach(desk: Desk, flow: Flow, wanted: Authority, *, connect: bool = True) -> None:
    """Decide about an authority and connect to it; what fails is said to the client.

    Raises RefusedError, UnreachableError: noted and said.
    """
    flow.name, flow.port = wanted.name, wanted.port
    try:
        if wanted.address is not None:
            addresses: tuple[Address, ...] = (wanted.address,)
        else:
            assert wanted.name is not None
            flow.names = (wanted.name,)
            addresses = await desk.resolve(wanted.name)
            if not addresses:
                raise UnreachableError(f"there is no host {wanted.name}")
        await _first_that_answers(desk, flow, addresses, connect=connect)
    except RefusedError as error:
        await _say(flow, "403 Forbidden", f"{wanted}: {error}")
        raise
    except UnreachableError as error:
        await _say(flow, "502 Bad Gateway", f"{wanted}: {error}")
        raise


async def _first_that_answers(
    desk: Desk, flow: Flow, addresses: tuple[Address, ...], *, connect: bool
) -> None:
    verdict, failure = Verdict(False), ""
    for address in addresses:
        flow.address = address
        verdict = _decide(desk, flow)
        if not verdict.allowed:
            continue
        flow.verdict = verdict
        if not connect:
            return
        try:
            await desk.dial(flow, address)
            return
        except (OSError, TimeoutError) as error:
            failure = str(error) or "it does not answer"
    if failure:
        desk.note(flow, EgressDecision.FAILED, failure)
        raise UnreachableError(failure)
    raise desk.refuse(flow, verdict.reason)


def _decide(desk: Desk, flow: Flow) -> Verdict:
    assert flow.address is not None
    if flow.kind is EgressKind.HTTP:
        return desk.engine.named(flow.name or "", flow.address, flow.port, "http")
    return desk.engine.address(flow.address, flow.port, flow.names)


async def _say(flow: Flow, status: str, reason: str) -> None:
    await flow.answer(refusal(status, reason))
