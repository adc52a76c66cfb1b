"""What somebody inside tries on purpose; each refusal beside what goes through."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import replace
from pathlib import Path

import pytest

from coldframe.host.egress.flows import Budget
from coldframe.protocol.ids import new_operation_id
from coldframe.protocol.models import ExecRequest
from coldframe.protocol.network import Credential, EgressDecision
from tests.fixtures.egress import METADATA, OTHER, PRIVATE, WEB, Internet, MakeFenced, web
from tests.fixtures.waiting import until
from tests.integration.egress.conftest import TALK

SECRET = "Bearer of-the-operator"

PIECES = """
import socket, sys, time
link = socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)
link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
try:
    for piece in sys.argv[3:]:
        link.sendall(bytes.fromhex(piece))
        time.sleep(0.05)
    link.shutdown(socket.SHUT_WR)
    while data := link.recv(65536): sys.stdout.write(data.decode("latin-1"))
except OSError as error: print("ERROR", type(error).__name__)
"""
"""Says bytes with pauses between them."""


def pieces(*texts: str) -> list[str]:
    """What PIECES takes."""
    return [text.encode("latin-1").hex() for text in texts]


class Heard:
    """A server that keeps what it is told, and answers each chunked body or head."""

    def __init__(self) -> None:
        self.data = b""

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            self.data += data
            if self.data.endswith(b"\r\n\r\n"):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")


async def test_request_that_comes_in_pieces_must_name_its_host_all_the_same(
    servers: Internet, fenced: MakeFenced
) -> None:
    """What is told from half a line must be true of the whole: servers wait for the rest."""
    servers.names["twin.example"] = [WEB]
    box = await fenced("web.example:80")
    ways = [
        ("A" * 41, " / HTTP/1.1\r\n"),
        ("GET\t", "/ HTTP/1.1\r\n"),
        ("GET /\1", " HTTP/1.1\r\n"),
        ("GET\x0b", "/ HTTP/1.1\r\n"),
        ("G", "ET / HTTP/1.1\r\n"),
        ("GET /", "\r\n"),
        ("\r\n\r\n", "GET / HTTP/1.1\r\n"),
    ]
    for way in ways:
        said = await box.python(
            PIECES, "web.example", "80", *pieces(*way, "Host: twin.example\r\n\r\n")
        )
        assert "200 OK" not in said, (way, said)
        refused = [e for e in box.events(decision=EgressDecision.REFUSED) if e.port == 80]
        assert refused, way
    said = await box.python(
        PIECES, "web.example", "80", *pieces("G", "ET / HTTP/1.1\r\n", "Host: web.example\r\n\r\n")
    )
    assert "200 OK" in said


async def test_body_reaches_the_server_written_anew(servers: Internet, fenced: MakeFenced) -> None:
    """In chunks' extensions and trailers hides a second request, for whoever reads otherwise."""
    heard = Heard()
    await servers.serve(WEB, 81, heard)
    box = await fenced("web.example:81")
    request = (
        "POST / HTTP/1.1\r\nHost: web.example:81\r\nTransfer-Encoding: chunked\r\n\r\n"
        "05;x\nGET / HTTP/1.1\r\nhello\r\n0;y\r\nX: y\nHost: twin.example\r\n\r\n"
    )

    said = await box.python(TALK, "web.example", "81", request.encode().hex())

    assert "200 OK" in said
    assert heard.data.endswith(b"\r\n\r\n5\r\nhello\r\n0\r\n\r\n")
    assert b"twin" not in heard.data
    for bad in (
        "5\nhello\r\n0\r\n\r\n",
        "5 \r\nhello\r\n0\r\n\r\n",
        "-1\r\n",
        "5\r\nhelloX\r\n0\r\n\r\n",
    ):
        head = request.partition("05;")[0]
        heard.data = b""
        await box.python(TALK, "web.example", "81", (head + bad).encode().hex())
        assert not heard.data.endswith(b"0\r\n\r\n"), bad


async def test_connection_header_does_not_take_the_host_away(
    servers: Internet, fenced: MakeFenced
) -> None:
    """A server that drops what Connection names would fall back to its first host."""
    box = await fenced("web.example:80")
    head = "GET / HTTP/1.1\r\nHost: web.example\r\nConnection: {}\r\n\r\n"

    for named in ("close, Host", "content-length", "Transfer-Encoding"):
        said = await box.python(TALK, "web.example", "80", head.format(named).encode().hex())
        assert "200 OK" not in said, named
    said = await box.python(TALK, "web.example", "80", head.format("close").encode().hex())
    assert "200 OK" in said


async def test_server_cannot_be_made_to_repeat_a_credential(
    servers: Internet, fenced: MakeFenced
) -> None:
    """TRACE answers with the request as it came, and so with what was added to it."""
    secret = Credential(host="web.example", value=SECRET, tls=False)
    box = await fenced("web.example", "other.example", credentials=(secret,))
    head = "{} / HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n"

    for method in ("TRACE", "TRACK", "DEBUG"):
        said = await box.python(
            TALK, "web.example", "80", head.format(method, "web.example").encode().hex()
        )
        assert "200 OK" not in said
        assert SECRET not in said
    said = await box.python(
        TALK, "other.example", "80", head.format("TRACE", "other.example").encode().hex()
    )
    assert "200 OK" in said


async def test_credential_for_tls_never_travels_on_a_connection_that_began_without(
    servers: Internet,
    fenced: MakeFenced,
    tls_server: ssl.SSLContext,
    certificate: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a second request for another host, or by a policy that changes in between."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate.with_name("cert.pem")))
    tls_server.set_alpn_protocols(["http/1.1"])
    plain = Heard()
    await servers.serve(WEB, 443, web, ssl=tls_server)
    servers.names["bare.example"] = [OTHER]
    await servers.serve(OTHER, 8080, plain)
    secret = Credential(host="web.example", value=SECRET)
    script = """
import http.client, sys
link = http.client.HTTPConnection("web.example", 80, timeout=30)
link.connect()
for host in sys.argv[1:]:
    if host == "wait":
        print("ready", flush=True)
        sys.stdin.readline()
        continue
    try:
        link.request("GET", "/", headers={"Host": host})
        answer = link.getresponse()
        print(answer.status, "operator" in answer.read().decode(), flush=True)
    except (OSError, http.client.HTTPException) as error: print("ERROR")
"""
    box = await fenced("public", "web.example", credentials=(secret,))
    # The server on port 80 repeats what it is told: there the secret must never be.
    assert await box.python(script, "twin.example") == "200 False\n"
    assert await box.python(script, "web.example", "web.example") == "200 True\n200 True\n"
    assert await box.python(script, "twin.example", "web.example") == "200 False\nERROR\n"
    assert await box.python(script, "web.example", "twin.example") == "200 True\nERROR\n"

    for before, after in (((), (secret,)), ((secret,), ())):
        await box.set("web.example", credentials=before)
        argv = ("python3", "-c", script, "web.example", "wait", "web.example")
        request = ExecRequest(argv=argv, stdin_open=True, deadline_s=30.0)
        running = await box.sandbox.start_exec(request, new_operation_id())
        await until(lambda: bool(box.events(name="web.example", decision=EgressDecision.ALLOWED)))
        said = b""
        while b"ready" not in said:
            said += (await running.read("stdout", len(said), 100)).data
        await box.set("web.example", credentials=after)
        await running.write_stdin(b"\n")
        result = await running.wait()
        assert result.stdout.decode() == f"200 {bool(before)}\nready\nERROR\n"


async def test_policy_that_changes_in_the_middle_of_a_request_ends_it(
    servers: Internet, fenced: MakeFenced
) -> None:
    """Half a body is what the old policy allowed; the other half is not."""
    heard = Heard()
    await servers.serve(WEB, 81, heard)
    box = await fenced("web.example:81")
    script = """
import socket, sys
link = socket.create_connection(("web.example", 81), 5)
link.sendall(b"POST / HTTP/1.1\\r\\nHost: web.example:81\\r\\nContent-Length: 10\\r\\n\\r\\nfirst")
print("ready", flush=True)
sys.stdin.readline()
try:
    link.sendall(b"other")
    link.recv(1)
    print("kept")
except OSError as error: print(type(error).__name__)
"""
    request = ExecRequest(argv=("python3", "-c", script), stdin_open=True, deadline_s=30.0)
    running = await box.sandbox.start_exec(request, new_operation_id())
    await until(lambda: heard.data.endswith(b"first"))

    await box.set("other.example")
    await running.write_stdin(b"\n")

    assert b"ConnectionResetError" in (await running.wait()).stdout
    assert heard.data.endswith(b"first")


async def test_numbers_that_mean_an_address_are_that_address(
    servers: Internet, fenced: MakeFenced
) -> None:
    """`2852039166` is metadata's address for every libc; so it must be for the policy."""
    forms = {
        METADATA: ["2852039166", "0xa9fea9fe", "0251.0376.0251.0376", "169.254.43518"],
        PRIVATE: ["172818442", "0x0a4d000a", "012.77.10", "10.77.10"],
    }
    box = await fenced("public")
    named = await fenced(METADATA, PRIVATE)
    for address, texts in forms.items():
        for text in texts:
            assert (await box.python(TALK, text, "7", "")).startswith("ERROR"), text
            assert await named.python(TALK, text, "7", "") == "hello\n", text
        refused = box.events(decision=EgressDecision.REFUSED, address=address)
        assert len(refused) == len(texts)


async def test_one_sandbox_does_not_reach_another(servers: Internet, fenced: MakeFenced) -> None:
    """They have the same addresses inside; each means its own by them."""
    serve = """
import socket
six = socket.create_server(("::", 4444), family=socket.AF_INET6, dualstack_ipv6=True)
print("ready", flush=True)
while True:
    link, _ = six.accept()
    link.sendall(b"other sandbox")
    link.close()
"""
    one, other = await fenced("public"), await fenced("public")
    request = ExecRequest(argv=("python3", "-c", serve), deadline_s=60.0)
    running = await one.sandbox.start_exec(request, new_operation_id())
    await running.read("stdout", 0, 10)

    for address in ("127.0.0.1", "::1", "169.254.1.1", "fd63:6f6c:6466::1", "127.0.0.53"):
        said = await other.python(TALK, address, "4444", "")
        assert said.startswith("ERROR"), (address, said)
    assert await one.python(TALK, "127.0.0.1", "4444", "") == "other sandbox"


async def test_sandbox_that_holds_all_it_can_leaves_its_neighbour_room(
    servers: Internet, fenced: MakeFenced
) -> None:
    """Connections that say nothing cost nothing to hold; descriptors are everybody's."""
    greedy, other = await fenced("web.example"), await fenced("web.example")
    near = Budget(64)
    for box in (greedy, other):
        gateway = box.sandbox.parts.egress._gateway
        assert gateway is not None
        gateway.desk.room = replace(gateway.desk.room, near=near)
    script = """
import socket, sys
links = []
for _ in range(100):
    try: links.append(socket.create_connection(("web.example", 80), 5))
    except OSError: pass
print("ready", flush=True)
sys.stdin.readline()
"""
    request = ExecRequest(argv=("python3", "-c", script), stdin_open=True, deadline_s=60.0)
    running = await greedy.sandbox.start_exec(request, new_operation_id())
    await running.read("stdout", 0, 10)
    await until(lambda: len(greedy.events(decision=EgressDecision.REFUSED)) >= 68)

    assert await other.python(TALK, "web.example", "7", b"x".hex()) == "hello\nx"
    await running.write_stdin(b"\n")
    await running.wait()


async def test_greeting_that_comes_byte_by_byte_is_given_up(
    servers: Internet, fenced: MakeFenced
) -> None:
    """Each byte has the node look at all of them again: work for it, none for the sender."""
    box = await fenced("web.example")
    script = """
import socket, sys, time
link = socket.create_connection(("web.example", 80), 5)
link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
sent = 0
try:
    for sent in range(5000):
        link.send(b"a")
        time.sleep(0.0005)
except OSError as error: print(type(error).__name__, sent < 4000)
"""
    assert (await box.python(script)).split() in (
        ["ConnectionResetError", "True"],
        ["BrokenPipeError", "True"],
    )
    refused = await box.event(decision=EgressDecision.REFUSED, port=80)
    assert "pieces" in refused.reason
