"""The name seen by DNS, by TLS and by HTTP must be one that is allowed, and the same."""

from __future__ import annotations

import asyncio
import ssl
import struct

from coldframe.protocol.network import EgressDecision, EgressKind
from tests.fixtures.egress import OTHER, PRIVATE, WEB, Internet, MakeFenced, hello
from tests.fixtures.waiting import until
from tests.integration.egress.conftest import TALK, TLS

KEEP = """
import http.client, sys
link = http.client.HTTPConnection(sys.argv[1], 80, timeout=30)
for host in sys.argv[2:]:
    try:
        link.request("POST", "/path", body=b"x" * 1000, headers={"Host": host})
        answer = link.getresponse()
        print(answer.status, len(answer.read()) > 1000)
    except (OSError, http.client.HTTPException) as error: print("ERROR", type(error).__name__)
"""


async def test_tls_must_show_the_name_that_was_resolved(
    servers: Internet, fenced: MakeFenced, tls_server: ssl.SSLContext
) -> None:
    """Many hosts share an address: the one that is allowed must not lead to the others."""
    await servers.serve(WEB, 443, hello, ssl=tls_server)
    servers.names["twin.example"] = [WEB]
    box = await fenced("web.example:443")

    assert await box.python(TLS, "web.example", "443", "web.example") == "h2 b'hello\\n'\n"
    for shown in ("twin.example", "other.example", ""):
        said = await box.python(TLS, "web.example", "443", shown)
        assert said.startswith("ERROR"), (shown, said)
    await box.set("web.example:443", "twin.example:443")
    said = await box.python(TLS, "web.example", "443", "twin.example")
    assert said.startswith("ERROR")  # allowed, but nobody resolved it: DNS and TLS disagree
    await box.python(TALK, "twin.example", "1", "")
    assert await box.python(TLS, "web.example", "443", "twin.example") == "h2 b'hello\\n'\n"
    await box.set(f"{WEB}:443")
    assert await box.python(TLS, WEB, "443", "whatever.example") == "h2 b'hello\\n'\n"


async def test_every_request_of_a_connection_must_name_its_host(
    servers: Internet, fenced: MakeFenced
) -> None:
    """The second request of a connection that is kept must not reach another virtual host."""
    servers.names["twin.example"] = [WEB]
    box = await fenced("web.example:80")

    good = await box.python(KEEP, "web.example", *["web.example"] * 3)
    bad = await box.python(KEEP, "web.example", "web.example", "twin.example")

    assert good == "200 True\n" * 3
    assert bad.startswith("200 True\nERROR"), bad
    (refused,) = box.events(decision=EgressDecision.REFUSED, name="web.example")
    assert "twin.example" in refused.reason
    await box.set("web.example:80", f"{WEB}:80")
    both = await box.python(KEEP, "web.example", "web.example", "twin.example")
    assert both == "200 True\n" * 2


async def test_requests_that_two_readers_could_understand_differently_are_refused(
    servers: Internet, fenced: MakeFenced
) -> None:
    """Request smuggling hides the host that is really meant."""
    box = await fenced("web.example:80")
    host = "Host: web.example\r\n"
    bad = [
        "GET / HTTP/1.1\r\n\r\n",
        f"GET / HTTP/1.1\r\n{host}Host: twin.example\r\n\r\n",
        f"GET http://twin.example/ HTTP/1.1\r\n{host}\r\n",
        f"CONNECT twin.example:80 HTTP/1.1\r\n{host}\r\n",
        f"GET / HTTP/1.1\n{host}\r\n\r\n",
        f"GET / HTTP/1.1 \r\n{host}\r\n",
        f"GET / http/1.1\r\n{host}\r\n",
        f"GET / HTTP/1.1\r\n X: y\r\n{host}\r\n",
        f"GET / HTTP/1.1\r\nX : y\r\n{host}\r\n",
        f"GET / HTTP/1.1\r\n{host}Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        f"GET / HTTP/1.1\r\n{host}Transfer-Encoding: xchunked\r\n\r\n",
        f"GET / HTTP/1.1\r\n{host}Content-Length: +1\r\n\r\n1",
        f"GET / HTTP/1.1\r\n{host}Content-Length: 1\r\nContent-Length: 2\r\n\r\n12",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ]

    for request in bad:
        said = await box.python(TALK, "web.example", "80", request.encode().hex())
        assert "200 OK" not in said, (request, said)
    good = f"GET / HTTP/1.1\r\n{host}\r\n"
    said = await box.python(TALK, "web.example", "80", good.encode().hex())
    assert "200 OK" in said
    assert len(box.events(decision=EgressDecision.REFUSED)) == len(bad)


async def test_redirect_to_a_host_that_is_not_allowed_ends_there(
    servers: Internet, fenced: MakeFenced
) -> None:
    """An allowed host that redirects must not take the sandbox along."""

    async def redirect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        location = b"Location: http://other.example/\r\n"
        writer.write(b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\n" + location + b"\r\n")

    await servers.serve(WEB, 81, redirect)
    box = await fenced("web.example:81")
    script = """
import urllib.request
try: print(urllib.request.urlopen("http://web.example:81/", timeout=30).status)
except OSError as error: print("ERROR", error)
"""
    assert (await box.python(script)).startswith("ERROR")
    (refused,) = {e.name for e in box.events(kind=EgressKind.DNS, decision=EgressDecision.REFUSED)}
    assert refused == "other.example"
    await box.set("web.example:81", "other.example:80")
    assert await box.python(script) == "200\n"


async def test_name_that_turns_to_a_local_address_is_refused(
    servers: Internet, fenced: MakeFenced
) -> None:
    """Rebinding: an allowed name whose owner points it into the private network."""
    servers.names["turn.example"] = [PRIVATE]
    servers.names["mixed.example"] = [PRIVATE, WEB]
    box = await fenced("*.example")

    assert (await box.python(TALK, "turn.example", "7", "")).startswith("ERROR gaierror")
    (refused, *_) = box.events(decision=EgressDecision.REFUSED)
    assert PRIVATE in refused.reason
    assert await box.python(TALK, "mixed.example", "7", "") == "hello\n"
    await until(lambda: {e.address for e in box.events(decision=EgressDecision.CLOSED)} == {WEB})
    other = await fenced("*.example", PRIVATE)
    assert await other.python(TALK, "turn.example", "7", "") == "hello\n"


async def test_answer_is_pinned_whatever_the_world_says_next(
    servers: Internet, fenced: MakeFenced
) -> None:
    """Between the check and the connection, and between two connections, nothing moves."""
    box = await fenced("web.example")
    assert await box.python(TALK, "web.example", "7", "") == "hello\n"

    servers.names["web.example"] = [OTHER]

    assert await box.python(TALK, "web.example", "7", "") == "hello\n"
    await until(lambda: {e.address for e in box.events(decision=EgressDecision.CLOSED)} == {WEB})
    assert servers.asked == ["web.example"]
    assert (await box.python(TALK, OTHER, "7", "")).startswith("ERROR")


async def test_names_that_are_not_allowed_are_asked_of_nobody(
    servers: Internet, fenced: MakeFenced
) -> None:
    """A question is a message: what follows it outside can carry anything out."""
    box = await fenced("web.example")
    script = """
import socket, struct
def ask(name, kind, tcp=False):
    labels = b"".join(bytes([len(x)]) + x.encode() for x in name.split("."))
    query = struct.pack("!6H", 7, 0x100, 1, 0, 0, 0) + labels + b"\\0" + struct.pack("!2H", kind, 1)
    link = socket.socket(socket.AF_INET, socket.SOCK_STREAM if tcp else socket.SOCK_DGRAM)
    link.settimeout(5)
    link.connect(("127.0.0.53", 53))
    link.send(struct.pack("!H", len(query)) * tcp + query)
    answer = link.recv(4096)[2 * tcp:]
    number, flags, _, answers, _, _ = struct.unpack_from("!6H", answer)
    print(number, flags & 15, answers)
ask("the-secret.tunnel.example", 1)
ask("the-secret.web.example", 28)
ask("web.example", 16)
ask("web.example", 255)
ask("web.example", 1)
ask("web.example", 1, tcp=True)
ask("the-secret.tunnel.example", 1, tcp=True)
"""
    said = await box.python(script)

    assert said.split("\n") == ["7 3 0", "7 3 0", "7 0 0", "7 0 0", "7 0 1", "7 0 1", "7 3 0", ""]
    assert servers.asked == ["web.example"]
    await box.set("*.tunnel.example")
    await box.python(TALK, "the-secret.tunnel.example", "7", "")
    assert "the-secret.tunnel.example" in servers.asked


async def test_hostile_questions_are_answered_or_dropped_and_never_break_it(
    servers: Internet, fenced: MakeFenced
) -> None:
    """The parser sits in the node: garbage must not end it."""
    box = await fenced("web.example")
    gateway = box.sandbox.parts.egress._gateway
    assert gateway is not None
    header = struct.pack("!6H", 1, 0x100, 1, 0, 0, 0)
    for data in (
        b"",
        b"\0" * 11,
        header,
        header + b"\xc0\x0c\0\1\0\1",
        header + b"\x3f" + b"a" * 10,
        header + b"\5a.b\0c\0\0\1\0\1",
        header + b"\1\xff\0\0\1\0\1",
        header + (b"\1a" * 200) + b"\0\0\1\0\1",
        struct.pack("!6H", 1, 0x8100, 1, 0, 0, 0) + b"\0\0\1\0\1",
        struct.pack("!6H", 1, 0x2800, 1, 0, 0, 0) + b"\0\0\1\0\1",
        struct.pack("!6H", 1, 0x100, 9, 9, 9, 9) + b"\0\0\1\0\1",
    ):
        reply = await gateway.reply(data)
        assert reply == b"" or reply[3] & 15 in (1, 4), data
    assert await box.python(TALK, "web.example", "7", "") == "hello\n"


async def test_name_whose_first_address_is_dead_is_reached_by_another(
    servers: Internet, fenced: MakeFenced
) -> None:
    """Inside, connecting has succeeded: the program can no longer try the next address itself."""
    servers.names["double.example"] = ["2001:db8::10", WEB]
    await servers.serve(WEB, 99, hello)
    box = await fenced("double.example")

    assert await box.python(TALK, "double.example", "99", "") == "hello\n"
    await until(lambda: {e.address for e in box.events(decision=EgressDecision.CLOSED)} == {WEB})


async def test_websocket_goes_on_and_a_refused_upgrade_is_still_read(
    servers: Internet, fenced: MakeFenced
) -> None:
    """After 101 bytes are free; a server that refuses must not open that door."""

    async def socket_server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n")
        await hello(reader, writer)

    await servers.serve(WEB, 82, socket_server)
    box = await fenced("web.example")
    ask = "GET / HTTP/1.1\r\nHost: web.example\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"
    frames = "\x81\x05frame GET / HTTP/1.1\r\nHost: twin.example\r\n\r\n"

    said = await box.python(TALK, "web.example", "82", (ask + frames).encode("latin-1").hex())
    tried = await box.python(
        TALK, "web.example", "80", (ask + frames[7:].lstrip()).encode("latin-1").hex()
    )

    assert said.endswith("hello\n" + frames), said
    assert "twin.example" not in tried


async def test_names_resolve_where_the_image_links_its_resolver_to_nowhere(
    servers: Internet, fenced: MakeFenced
) -> None:
    """Root file systems of whole machines link it to what a service would make."""
    box = await fenced()
    await box.run("ln", "-sf", "../run/resolve/stub-resolv.conf", "/etc/resolv.conf")

    await box.set("web.example:7")

    assert await box.python(TALK, "web.example", "7", "") == "hello\n"
    await box.set()
    assert await box.run("readlink", "/etc/resolv.conf") == "../run/resolve/stub-resolv.conf\n"
    assert "nothing" in await box.run("sh", "-c", "cat /etc/resolv.conf || echo nothing")
