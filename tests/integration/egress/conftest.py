"""Programs that run in sandboxes, and servers with certificates."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from tests.fixtures.certificates import self_signed
from tests.fixtures.egress import METADATA, OTHER, PRIVATE, SHARED, WEB, WEB6, Internet, hello, web

TALK = """
import socket, sys
host, port, said = sys.argv[1], int(sys.argv[2]), bytes.fromhex(sys.argv[3])
try:
    link = socket.create_connection((host, port), 5)
    if said: link.sendall(said)
    try: link.shutdown(socket.SHUT_WR)
    except OSError: pass
    while data := link.recv(65536): sys.stdout.write(data.decode("latin-1"))
except OSError as error:
    print("ERROR", type(error).__name__)
"""
"""Says bytes to a port, and prints what comes back or why nothing does."""

SWAP = """
import os, socket, sys, threading
link = socket.create_connection(("203.0.113.10", 7))
said = os.urandom(int(sys.argv[1]) << 20)
def send():
    link.sendall(said)
    link.shutdown(socket.SHUT_WR)
threading.Thread(target=send).start()
heard = b"".join(iter(lambda: link.recv(1 << 20), b""))
print(heard == b"hello\\n" + said)
"""
"""Sends so many MiB to the echo server while it reads them, and says whether all came back."""

TLS = """
import socket, ssl, sys
host, port, shown = sys.argv[1], int(sys.argv[2]), sys.argv[3] or None
context = ssl.create_default_context()
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
context.set_alpn_protocols(["h2"])
try:
    link = socket.create_connection((host, port), 5)
    link = context.wrap_socket(link, server_hostname=shown)
    link.sendall(b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n")
    print(link.selected_alpn_protocol(), link.recv(100))
except OSError as error: print("ERROR", type(error).__name__)
"""
"""Opens TLS to a port under a name, offers HTTP/2 and says its first words."""


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate for web.example and other.example with its key, in one file."""
    cert, key = self_signed(tmp_path, "DNS:web.example", "DNS:other.example")
    both = tmp_path / "certificate.pem"
    both.write_bytes(key.read_bytes() + cert.read_bytes())
    return both


@pytest.fixture
def tls_server(certificate: Path) -> ssl.SSLContext:
    """What a server with that certificate needs; it speaks HTTP/2 too."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    context.set_alpn_protocols(["h2", "http/1.1"])
    return context


@pytest.fixture
async def servers(internet: Internet) -> Internet:
    """`hello` on port 7 and `web` on port 80 of every address, and names for two of them."""
    internet.names |= {"web.example": [WEB], "six.example": [WEB6], "other.example": [OTHER]}
    for address in (WEB, OTHER, WEB6, PRIVATE, METADATA, SHARED):
        await internet.serve(address, 7, hello)
        await internet.serve(address, 80, web)
    return internet
