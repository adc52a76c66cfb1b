"""Ports of sandboxes by URL: what passes, what does not, and who can use it for how long."""

from __future__ import annotations

import asyncio
import base64
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect as aconnect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from coldframe import AsyncSandboxClient, CapabilityError, Sandbox, SandboxClient
from coldframe.images.base import Image
from coldframe.images.store import ImageStore
from coldframe.protocol.errors import PortUrlInvalidError
from tests.fixtures.ports import kept_port
from tests.fixtures.service import Service, serving
from tests.fixtures.waiting import wait_until
from tests.integration.gateway.conftest import audit_lines, http

SERVER = r"""
import hashlib, json, os, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *words): pass
    def body(self):
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            data = b""
            while size := int(self.rfile.readline(), 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return data
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))
    def answer(self):
        data = self.body()
        if self.path.startswith("/raw/"):
            import base64
            self.wfile.write(base64.urlsafe_b64decode(self.path[5:]))
            self.close_connection = True
            return
        if self.path == "/big":
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            piece = bytes(range(256)) * 256
            for _ in range(160):
                self.wfile.write(b"10000\r\n" + piece + b"\r\n")
            self.wfile.write(b"0\r\n\r\n")
            return
        told = json.dumps({
            "method": self.command, "path": self.path, "headers": self.headers.items(),
            "size": len(data), "sha256": hashlib.sha256(data).hexdigest(),
        }).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(told)))
        self.send_header("Set-Cookie", "session=abc; Path=/; Domain=example.com; HttpOnly")
        self.send_header("Set-Cookie", "theme=dark")
        self.send_header("Connection", "x-named")
        self.send_header("X-Named", "of this connection alone")
        self.send_header("Service-Worker-Allowed", "/")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(told)
    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = do_OPTIONS = answer

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""

SOCKETS = r"""
import asyncio, sys
from websockets.asyncio.server import serve

async def handle(tied):
    if tied.request.path.startswith("/told"):
        await tied.send(repr((tied.request.path, sorted(tied.request.headers.raw_items()))))
    if tied.request.path == "/close":
        await tied.close(4321, "so it is")
    async for message in tied:
        await tied.send(message)

async def main():
    async with serve(handle, "127.0.0.1", int(sys.argv[1]), max_size=None,
                     select_subprotocol=lambda _, offered:
                     "second" if "second" in offered else None) as server:
        await server.serve_forever()

asyncio.run(main())
"""


def _serve(sandbox: Sandbox, program: str) -> int:
    """Start a program of the tests' own Python in a sandbox of the fake runtime."""
    with kept_port() as port:
        sandbox.files.write("/server.py", program)
        sandbox.start([sys.executable, "server.py", str(port)])
        wait_until(lambda: port in sandbox.listening_ports())
        return port


@pytest.fixture
def web(served: Sandbox) -> int:
    """A port that answers HTTP with what it was asked."""
    return _serve(served, SERVER)


@pytest.fixture
def echo(served: Sandbox) -> int:
    """A port that answers WebSockets."""
    return _serve(served, SOCKETS)


@pytest.fixture
def browser() -> Iterator[httpx.Client]:
    """Somebody without a key."""
    with httpx.Client(timeout=30) as browser:
        yield browser


def _seen(answer: httpx.Response) -> tuple[dict[str, Any], dict[str, str]]:
    told = answer.json()
    return told, {name.lower(): value for name, value in told["headers"]}


def test_port_is_reached_by_a_url_with_every_method_and_body(
    served: Sandbox, web: int, browser: httpx.Client
) -> None:
    """A page in a sandbox is a page, whatever it asks of its server."""
    url = served.port_url(web).url

    for method in ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"):
        told, _ = _seen(browser.request(method, f"{url}a%2Fb/../c//d?x=%20&y", content=b"body"))
        assert (told["method"], told["path"]) == (method, "/a%2Fb/../c//d?x=%20&y") or (
            told["path"] == "/c//d?x=%20&y"  # the client has resolved it
        )
        assert told["size"] == 4
    assert browser.head(url).status_code == 200
    pieces = iter([b"x" * 100_000] * 50)
    told, headers = _seen(browser.post(url, content=pieces))
    assert (told["size"], headers["transfer-encoding"]) == (5_000_000, "chunked")
    assert len(browser.get(f"{url}big").content) == 160 * 65536
    plain = browser.get(url.rstrip("/") + "?q=1")
    assert (plain.status_code, plain.headers["location"]) == (
        308,
        httpx.URL(url).path + "?q=1",
    )


def test_neither_side_sees_what_is_the_others(
    served: Sandbox, web: int, browser: httpx.Client
) -> None:
    """What listens is the agent's: a key or cookie that reaches it is stolen."""
    url = served.port_url(web).url
    path = httpx.URL(url).path
    sent = {
        "Authorization": "Bearer cf_secret",
        "Proxy-Authorization": "Basic secret",
        "Cookie": "service=secret; other=secret",
        "Coldframe-Protocol": "1",
        "X-Forwarded-For": "203.0.113.9",
        "Connection": "X-Hop, close",
        "X-Hop": "secret",
        "Origin": "http://service.example",
        "Referer": f"{url}page",
        "X-Kept": "yes",
    }
    answer = browser.get(url, headers=sent)
    told, headers = _seen(answer)

    assert "secret" not in answer.text
    assert path.split("/")[2] not in answer.text
    assert headers["host"] == f"localhost:{web}"
    assert headers["origin"] == f"http://localhost:{web}"
    assert headers["referer"] == f"http://localhost:{web}/page"
    assert headers["x-kept"] == "yes"
    assert not headers.keys() & {"x-forwarded-for", "coldframe-protocol", "cookie"}
    assert told["path"] == "/"
    assert "service-worker-allowed" not in answer.headers
    assert "x-named" not in answer.headers
    cookies = answer.headers.get_list("set-cookie")
    assert [f"Path={path}" in cookie for cookie in cookies] == [True, True]
    assert "example.com" not in str(cookies)
    _, headers = _seen(browser.get(url))
    assert headers["cookie"] == "session=abc; theme=dark"
    other = served.port_url(web, ttl_s=99).url
    assert "cookie" not in _seen(browser.get(other))[1]


def test_url_that_is_guessed_expired_or_of_the_dead_leads_nowhere(
    service: Service, remote: SandboxClient, browser: httpx.Client
) -> None:
    """All in the same words, so that none tells what there is."""
    sandbox = remote.create_sandbox("any")
    port = _serve(sandbox, SERVER)
    url, short = sandbox.port_url(port).url, sandbox.port_url(port, ttl_s=0.1)
    other = sandbox.port_url(port + 1 if port < 65535 else 1).url
    assert browser.get(url).status_code == 200
    token = httpx.URL(url).path.split("/")[2]
    assert len(token) >= 60
    guesses = [
        token[:-1] + ("A" if token[-1] != "A" else "B"),
        ("B" if token[0] == "A" else "A") + token[1:],
        token[:20],
        "",
        "%00",
        "x" * 5000,
        httpx.URL(other).path.split("/")[2][:40] + token[40:],
    ]
    wait_until(lambda: browser.get(short.url).status_code != 200)
    answers = [browser.get(short.url)]
    answers += [browser.get(f"{service.tcp}/p/{guess}/") for guess in guesses]
    sandbox.delete()
    answers.append(browser.get(url))

    assert {(one.status_code, one.json()["code"]) for one in answers} == {(404, "port_url_invalid")}
    assert len({one.json()["message"] for one in answers}) == 1
    with pytest.raises(InvalidStatus):
        connect(url.replace("http", "ws"))
    assert not any(token in line for line in service.log)
    refused = [line for line in audit_lines(service.home) if line["route"] == "/p/{token}"]
    assert {(line["method"], line["status"]) for line in refused} == {
        *(("GET", 404), ("WEBSOCKET", 404))
    }
    assert len(refused) >= len(answers)
    assert token not in (service.home / "audit" / "audit.jsonl").read_text()
    key = service.home / "ports.key"
    assert (key.stat().st_mode & 0o077, key.stat().st_size) == (0, 32)


def test_url_needs_the_scope_and_the_owner_to_be_made_and_no_key_to_be_used(
    served: Sandbox, service: Service, browser: httpx.Client
) -> None:
    """It is as good as the port itself, and no better."""
    with http(service.unix) as caller, kept_port() as port:
        where = f"/v1/sandboxes/{served.id}/ports/{port}/url"
        made = caller.post(where, json={})
        assert (made.status_code, made.json()["origin"]) == (201, service.tcp)
        assert made.json()["url"] == service.tcp + made.json()["path"]
        for wrong in ({"ttl_s": 0}, {"ttl_s": 1e9}, {"ttl_s": "1"}, {"x": 1}, []):
            assert caller.post(where, json=wrong).status_code == 400, wrong
        gone = caller.post("/v1/sandboxes/sb-000000-0000000000/ports/80/url", json={})
        assert gone.status_code == 404
    nobody = browser.get(service.tcp + made.json()["path"])
    assert (nobody.status_code, nobody.json()["code"]) == (502, "port_unreachable")


@pytest.mark.parametrize(
    "raw",
    [
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 7\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: a\x00b\r\n\r\n",
        b"HTTP/1.1 99 Low\r\n\r\n",
        b"HTTP/1.1 999 High\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
        b"",
    ],
)
def test_answer_that_is_none_is_a_bad_gateway(
    service: Service, served: Sandbox, browser: httpx.Client, raw: bytes
) -> None:
    """What listens may say anything; it must not come out as an answer of the service's."""
    served.files.write("/raw", raw)
    port = _serve(
        served,
        "import socket, sys\n"
        "s = socket.create_server(('127.0.0.1', int(sys.argv[1])))\n"
        "while True:\n"
        "    c, _ = s.accept()\n"
        "    c.recv(65536)\n"
        "    c.sendall(open('raw', 'rb').read())\n"
        "    c.close()\n",
    )

    answer = browser.get(served.port_url(port).url)

    assert (answer.status_code, answer.json()["code"]) == (502, "port_unreachable")


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
def test_answer_without_a_body_may_state_a_length(
    service: Service, served: Sandbox, web: int, browser: httpx.Client, status: bytes
) -> None:
    """Servers of files say with 304 how long the file is; that is no fault of the service's."""
    raw = b"HTTP/1.1 " + status + b'\r\nETag: "x"\r\nContent-Length: 10\r\n\r\n'
    url = served.port_url(web).url + "raw/" + base64.urlsafe_b64encode(raw).decode()
    before = len(service.log)

    answer = browser.get(url)

    assert (answer.status_code, answer.content) == (int(status.split()[0]), b"")
    assert answer.headers["etag"] == '"x"'
    assert "content-length" not in answer.headers
    assert not [line for line in service.log[before:] if "ERROR" in line]


def test_answer_that_is_cut_short_does_not_look_whole(
    served: Sandbox, web: int, browser: httpx.Client
) -> None:
    """Half a file must not be taken for a whole one."""

    for raw in (
        b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nhalf",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n",
    ):
        url = served.port_url(web).url + "raw/" + base64.urlsafe_b64encode(raw).decode()
        with pytest.raises(httpx.RemoteProtocolError):
            browser.get(url)


@pytest.mark.parametrize(
    ("said", "heard"),
    [
        ("/next?a=1", "{prefix}/next?a=1"),
        ("http://localhost:{port}/next", "{prefix}/next"),
        ("http://127.0.0.1:{port}", "{prefix}/"),
        ("next", "next"),
        ("//evil.example/", "//evil.example/"),
        ("https://example.org/", "https://example.org/"),
        ("http://localhost.evil.example/", "http://localhost.evil.example/"),
    ],
)
def test_redirect_to_itself_stays_below_the_url(
    served: Sandbox, web: int, browser: httpx.Client, said: str, heard: str
) -> None:
    """Else the browser asks the service for what only the sandbox has."""

    url = served.port_url(web).url
    prefix = httpx.URL(url).path.rstrip("/")
    there = said.format(port=web)
    raw = f"HTTP/1.1 302 Found\r\nLocation: {there}\r\nContent-Length: 0\r\n\r\n".encode()

    answer = browser.get(f"{url}raw/{base64.urlsafe_b64encode(raw).decode()}")

    assert answer.headers["location"] == heard.format(prefix=prefix, port=web)


def test_websocket_passes_text_bytes_large_frames_and_closes(served: Sandbox, echo: int) -> None:
    """Both kinds of frames stay what they are, up to 16 MiB, and codes of closes too."""
    url = served.port_url(echo).url.replace("http", "ws")
    with connect(
        f"{url}told?q=1",
        subprotocols=["first", "second"],
        additional_headers={"Authorization": "secret", "Cookie": "a=secret"},
        max_size=None,
    ) as tied:
        told = tied.recv(timeout=20)
        assert "secret" not in told
        assert "/told?q=1" in told
        assert tied.subprotocol == "second"
        data = os.urandom(4 << 20)
        for message in ("text ä", b"\x00\xff", "", b"", data, "x" * (4 << 20)):
            tied.send(message)
            assert tied.recv(timeout=30) == message
    with connect(f"{url}close") as tied:
        with pytest.raises(ConnectionClosed):
            tied.recv(timeout=20)
        assert (tied.close_code, tied.close_reason) == (4321, "so it is")


SMALL_SOCKETS = r"""
import asyncio, base64, hashlib, re, sys

async def handle(reader, writer):
    head = await reader.readuntil(b"\r\n\r\n")
    key = re.search(rb"(?i)sec-websocket-key: *(\S+)", head)[1]
    proof = hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()
    writer.write(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n"
                 b"Connection: Upgrade\r\nSec-WebSocket-Accept: "
                 + base64.b64encode(proof) + b"\r\n\r\n")
    while True:
        first, size = await reader.readexactly(2)
        mask = await reader.readexactly(4)
        data = await reader.readexactly(size & 127)
        plain = bytes(byte ^ mask[i % 4] for i, byte in enumerate(data))
        writer.write(bytes([first, size & 127]) + plain)

async def main():
    async with await asyncio.start_server(handle, "127.0.0.1", 8000, backlog=500) as server:
        print("ready", flush=True)
        await server.serve_forever()

asyncio.run(main())
"""


@pytest.mark.root
async def test_a_thousand_idle_websockets_cost_little_and_end_with_the_sandbox(
    tmp_path: Path, image_store: ImageStore, debian_image: Image
) -> None:
    """Open tabs that nobody looks at."""
    images = image_store.layers_directory.parent
    with serving(tmp_path, "native", images=images) as service:
        async with (
            AsyncSandboxClient(url=service.tcp) as client,
            await client.create_sandbox(debian_image.name) as sandbox,
        ):
            await sandbox.files.write("/server.py", SMALL_SOCKETS)
            server = await sandbox.start(["python3", "/server.py"])
            assert (await server.read(wait=True)).data == b"ready\n"
            url = (await sandbox.port_url(8000)).url.replace("http", "ws")
            before, tied = _memory_mib(service), []
            for _ in range(20):
                tied += await asyncio.gather(
                    *(aconnect(url, open_timeout=60, compression=None) for _ in range(50))
                )
            held, ticks = _memory_mib(service) - before, _ticks(service)
            await asyncio.sleep(2)
            spent = _ticks(service) - ticks
            await tied[500].send("still there")
            assert await tied[500].recv() == "still there"
            assert held < 100
            assert spent < 20  # a tenth of a processor
            await sandbox.delete()
            async with asyncio.timeout(30):
                for one in tied:
                    with pytest.raises(ConnectionClosed):
                        await one.recv()


def _memory_mib(service: Service) -> float:
    text = Path(f"/proc/{service.process.pid}/status").read_text()
    line = next(line for line in text.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024


def _ticks(service: Service) -> int:
    fields = Path(f"/proc/{service.process.pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_gateway_before_the_node_passes_urls_on(
    service: Service, tmp_path: Path, browser: httpx.Client
) -> None:
    """Who reaches the one must reach ports by it too."""
    with (
        serving(tmp_path, "fake", "--node", service.unix) as gateway,
        SandboxClient(url=gateway.tcp) as client,
        client.create_sandbox("any") as sandbox,
    ):
        url = sandbox.port_url(_serve(sandbox, SERVER)).url
        assert url.startswith(gateway.tcp)
        told, headers = _seen(browser.post(f"{url}x", content=b"ab", headers={"X-Kept": "yes"}))
        assert (told["path"], told["size"], headers["x-kept"]) == ("/x", 2, "yes")
        tied_url = sandbox.port_url(_serve(sandbox, SOCKETS)).url.replace("http", "ws")
        with connect(tied_url) as tied:
            tied.send(b"bytes")
            assert tied.recv(timeout=20) == b"bytes"


def test_node_without_a_service_names_the_remedy(client: SandboxClient) -> None:
    """There is no address that a URL could begin with."""
    sandbox = client.create_sandbox("any")
    with pytest.raises(CapabilityError, match="coldframe serve"):
        sandbox.port_url(80)
    assert PortUrlInvalidError("x").code == "port_url_invalid"
