"""The proxy: CONNECT, plain requests, and credentials that the sandbox never holds."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest

from coldframe.protocol.network import Credential, EgressDecision, EgressKind, NetworkPolicy
from tests.fixtures.egress import WEB, Internet, MakeFenced, hello, web
from tests.fixtures.waiting import until
from tests.integration.egress.conftest import TALK

NODE = "203.0.113.1"
PROXY = ("127.0.0.53", "3128")
SECRET = "Bearer of-the-operator"


def connect(target: str, then: str = "") -> str:
    """The bytes of a tunnel's beginning, as TALK takes them."""
    return f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n{then}".encode("latin-1").hex()


def get(url: str, fields: str = "") -> str:
    """The bytes of a request to the proxy, as TALK takes them."""
    return f"GET {url} HTTP/1.1\r\nHost: x\r\n{fields}\r\n".encode().hex()


async def test_proxy_tunnels_to_what_is_allowed_and_says_why_not(
    servers: Internet, fenced: MakeFenced
) -> None:
    """A program that is told of the proxy gets no more than one that is not, and a reason."""
    box = await fenced("web.example:7", f"{WEB}:80")
    node = await asyncio.start_server(hello, NODE, 7777)

    good = ["web.example:7", f"{WEB}:80", "WEB.example.:7"]
    bad = {
        "web.example:81": "403",
        "other.example:7": "403",
        "10.77.0.10:7": "403",
        "169.254.169.254:80": "403",
        f"{NODE}:7777": "403",
        "127.0.0.1:7777": "403",
        "[::1]:7777": "403",
        "[::ffff:127.0.0.1]:7777": "403",
        "localhost:7777": "403",
        "0.0.0.0:7777": "403",
        "[::]:7777": "403",
        "[::127.0.0.1]:7777": "403",
        "[64:ff9b::127.0.0.1]:7777": "403",
        "[2002:7f00:1::]:7777": "403",
        "127.0.0.53:3128": "403",
        "127.0.0.1.:7777": "400",
        "127.0.0.1%00.web.example:7": "400",
        "web.example:7@127.0.0.1:7777": "400",
        "0:7777": "400",
        "[::1%25lo]:7777": "400",
        "2130706433:7777": "400",
        "0x7f000001:7777": "400",
        "127.1:7777": "400",
        "0177.0.0.1:7777": "400",
        "web.example": "400",
        "web.example:99999": "400",
    }
    try:
        for target in good:
            said = await box.python(TALK, *PROXY, connect(target))
            assert said.startswith("HTTP/1.1 200"), (target, said)
        for target, status in bad.items():
            said = await box.python(TALK, *PROXY, connect(target))
            assert said.startswith(f"HTTP/1.1 {status}"), (target, said)
            assert "coldframe: " in said
        assert servers.asked == ["web.example"]
        closed = {"kind": EgressKind.CONNECT, "decision": EgressDecision.CLOSED}
        await until(lambda: len(box.events(**closed)) == 3)
        other = await fenced(f"{NODE}:7777")
        said = await other.python(TALK, *PROXY, connect(f"{NODE}:7777"), deadline_s=20)
        assert "200" in said
        assert "hello" in said
    finally:
        node.close()


async def test_proxy_carries_plain_requests_to_their_own_host(
    servers: Internet, fenced: MakeFenced
) -> None:
    """The address line decides, not what Host says; what was for the proxy stays with it."""
    box = await fenced("web.example")
    fields = "Proxy-Authorization: Basic x\r\nConnection: keep-alive, X-Hop\r\nX-Hop: 1\r\nA: b\r\n"

    said = await box.python(TALK, *PROXY, get("http://web.example/path?q=1", fields))
    refused = await box.python(TALK, *PROXY, get("http://other.example/"))
    odd = await box.python(TALK, *PROXY, get("ftp://web.example/"))

    assert "GET /path?q=1 HTTP/1.1\r\nA: b\r\nHost: web.example\r\nConnection: close\r\n" in said
    assert refused.startswith("HTTP/1.1 403")
    assert odd.startswith("HTTP/1.1 400")


async def test_tunnel_must_show_the_host_that_it_was_asked_for(
    servers: Internet, fenced: MakeFenced
) -> None:
    """CONNECT to the allowed host and Host of another one is a way around."""
    servers.names["twin.example"] = [WEB]
    box = await fenced("web.example:80")
    request = "GET / HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n"

    good = await box.python(TALK, *PROXY, connect("web.example:80", request.format("web.example")))
    bad = await box.python(TALK, *PROXY, connect("web.example:80", request.format("twin.example")))

    assert "200 OK" in good
    assert "200 OK" not in bad


async def test_tls_and_http2_pass_through_the_proxy_untouched(
    servers: Internet, fenced: MakeFenced, tls_server: ssl.SSLContext
) -> None:
    """The node neither ends nor reads TLS: certificates are the client's to check."""
    await servers.serve(WEB, 443, hello, ssl=tls_server)
    box = await fenced("web.example:443")
    script = """
import socket, ssl, sys
link = socket.create_connection(("127.0.0.53", 3128), 5)
link.sendall(b"CONNECT web.example:443 HTTP/1.1\\r\\n\\r\\n")
assert b" 200 " in link.recv(100)
context = ssl.create_default_context()
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
context.set_alpn_protocols(["h2"])
try:
    link = context.wrap_socket(link, server_hostname=sys.argv[1])
    link.sendall(b"PRI * HTTP/2.0\\r\\n\\r\\n")
    said = link.recv(6)
    while len(said) < 24: said += link.recv(100)
    print(link.selected_alpn_protocol(), said)
except OSError as error: print("ERROR", type(error).__name__)
"""
    good = await box.python(script, "web.example")
    bad = await box.python(script, "other.example")

    assert good == "h2 b'hello\\nPRI * HTTP/2.0\\r\\n\\r\\n'\n"
    assert bad.startswith("ERROR")


async def test_websocket_through_the_proxy_goes_on(servers: Internet, fenced: MakeFenced) -> None:
    """Clients that send ws:// as a plain request need the 101 and what follows it."""

    async def socket_server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n")
        await hello(reader, writer)

    await servers.serve(WEB, 82, socket_server)
    box = await fenced("web.example")
    upgrade = "Upgrade: websocket\r\nConnection: Upgrade\r\n"
    begin = get("http://web.example:82/ws", upgrade) + b"frame".hex()

    assert (await box.python(TALK, *PROXY, begin)).endswith("hello\nframe")


async def test_credential_is_added_for_its_host_and_never_seen_inside(
    servers: Internet, fenced: MakeFenced
) -> None:
    """What the sandbox does not hold it cannot leak; its own header does not count."""
    secret = Credential(host="web.example", value=SECRET, tls=False)
    box = await fenced("web.example", "other.example", credentials=(secret,))
    request = "GET / HTTP/1.1\r\nHost: {}\r\nAuthorization: mine\r\nConnection: close\r\n\r\n"

    direct = await box.python(
        TALK, "web.example", "80", request.format("web.example").encode().hex()
    )
    proxied = await box.python(TALK, *PROXY, get("http://web.example/", "authorization: mine\r\n"))
    other = await box.python(
        TALK, "other.example", "80", request.format("other.example").encode().hex()
    )

    # The server repeats the request's head, so that it can be seen here what it was given.
    assert f"Authorization: {SECRET}" in direct
    assert f"Authorization: {SECRET}" in proxied
    assert "mine" not in direct + proxied
    assert SECRET not in other
    spec = box.sandbox.egress_events(0, 1000)
    assert SECRET not in spec.model_dump_json() + repr(spec)
    inside = await box.run("sh", "-c", "env; cat /etc/resolv.conf; ls -R /etc | head -500")
    assert SECRET not in inside


async def test_credential_by_tls_is_sent_to_a_checked_certificate_only(
    servers: Internet,
    fenced: MakeFenced,
    tls_server: ssl.SSLContext,
    certificate: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The node speaks TLS in the sandbox's place; a stranger in between must not get the secret."""
    tls_server.set_alpn_protocols(["http/1.1"])
    await servers.serve(WEB, 443, web, ssl=tls_server)
    secret = Credential(host="web.example", value=SECRET)
    box = await fenced("web.example", credentials=(secret,))
    request = b"GET / HTTP/1.1\r\nHost: web.example\r\nConnection: close\r\n\r\n"

    strange = await box.python(TALK, "web.example", "80", request.hex())
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate.with_name("cert.pem")))
    known = await box.python(TALK, "web.example", "80", request.hex())
    proxied = await box.python(TALK, *PROXY, get("http://web.example/"))

    assert SECRET not in strange
    assert SECRET in known
    assert SECRET in proxied


def test_policy_shows_no_secret_but_where_it_is_asked_to() -> None:
    """Policies are printed, logged and recorded."""
    policy = NetworkPolicy.parse(
        "a.example", credentials=[Credential(host="a.example", value=SECRET)]
    )

    for shown in (repr(policy), str(policy), policy.model_dump_json(), str(policy.model_dump())):
        assert SECRET not in shown
    assert NetworkPolicy.model_validate_json(policy.dump_with_secrets()) == policy
    assert NetworkPolicy.model_validate_json(policy.model_dump_json()).redacted
