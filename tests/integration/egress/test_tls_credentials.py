"""Credentials for hosts that are asked by HTTPS: the node ends TLS, and checks the host's."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Sequence
from pathlib import Path

import pytest

from coldframe.host.egress.certificates import Authority
from coldframe.host.egress.subject import hashed_name
from coldframe.images.base import Image
from coldframe.images.store import ImageStore
from coldframe.protocol.ids import new_sandbox_id
from coldframe.protocol.models import SandboxSpec
from coldframe.protocol.network import Credential, EgressDecision, EgressKind, NetworkPolicy
from tests.fixtures.egress import (
    WEB,
    Fenced,
    Internet,
    MakeFenced,
    inside,
    two_networks,
)
from tests.fixtures.runtime import native_runtime_in
from tests.fixtures.waiting import until
from tests.integration.egress.test_packages import trust_bundle

SECRET = "Bearer of-the-operator"
PROXY = "http://127.0.0.53:3128"
REFS = b"1111111111111111111111111111111111111111\trefs/heads/main\n"
FETCH = """
import sys, urllib.request
request = urllib.request.Request(sys.argv[1], headers={"Authorization": "mine"})
try:
    body = sys.argv[2].encode() if len(sys.argv) > 2 else None
    with urllib.request.urlopen(request, body) as answer:
        print(answer.status, answer.read().decode())
except Exception as error:
    print("ERROR", error)
"""
KEPT_OPEN = """
import http.client
link = http.client.HTTPSConnection("web.example", timeout=10)
for number in range(3):
    link.request("GET", f"/{number}")
    answer = link.getresponse()
    print(answer.status, "said" if b"Authorization: Bearer" in answer.read() else "lost")
"""
GREETING = """
import socket, ssl, sys
context = ssl.create_default_context()
context.set_alpn_protocols(sys.argv[2:] or ["http/1.1"])
with socket.create_connection((sys.argv[1], 443), 10) as plain:
    try:
        with context.wrap_socket(plain, server_hostname=sys.argv[1]) as link:
            issuer = dict(one[0] for one in link.getpeercert()["issuer"])
            print(link.selected_alpn_protocol(), issuer["commonName"])
    except OSError as error:
        print("ERROR", error)
"""


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serve requests of one connection; each is answered by its own head and body."""
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = next(
                (
                    int(line[15:])
                    for line in head.split(b"\r\n")
                    if line.lower().startswith(b"content-length:")
                ),
                0,
            )
            said = head + await reader.readexactly(length)
            if b"/r.git/info/refs" in head:
                said = REFS if SECRET.encode() in head else b""
            kind = b"text/plain" if said != REFS else b"application/octet-stream"
            writer.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n"
                % (kind, len(said))
                + said
            )
            await writer.drain()
    except (asyncio.IncompleteReadError, OSError):
        pass
    finally:
        writer.close()


@pytest.fixture
async def https(
    servers: Internet,
    tls_server: ssl.SSLContext,
    certificate: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Internet:
    """web.example by TLS on port 443, by a certificate that the node trusts."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate.with_name("cert.pem")))
    tls_server.set_alpn_protocols(["http/1.1"])
    await servers.serve(WEB, 443, answer, ssl=tls_server)
    return servers


SECRETS = (Credential(host="web.example", value=SECRET),)


async def test_credential_is_added_where_the_client_speaks_tls(
    https: Internet, fenced: MakeFenced
) -> None:
    """Unmodified programs ask https:// addresses, and know nothing of a credential."""
    box = await fenced("web.example:443", credentials=SECRETS)

    asked = await box.python(FETCH, "https://web.example/path?x=1")
    posted = await box.python(FETCH, "https://web.example/", "a body " * 10_000)
    kept = await box.python(KEPT_OPEN)
    tunnelled = await box.python(FETCH, "https://web.example/", env={"https_proxy": PROXY})
    refs = await box.run("git", "ls-remote", "https://web.example/r.git", env={"HOME": "/root"})

    assert asked.startswith("200 GET /path?x=1 HTTP/1.1")
    for said in (asked, posted, tunnelled):
        assert f"Authorization: {SECRET}" in said
        assert "mine" not in said
    assert posted.count("a body ") == 10_000
    assert kept.split() == ["200", "said"] * 3
    assert "refs/heads/main" in refs
    seen = await box.run("sh", "-c", "env; cat /etc/ssl/certs/*; cat /proc/*/environ")
    assert SECRET not in seen
    assert SECRET not in str(box.sandbox.egress_events(0, 1000))
    wanted = {"decision": EgressDecision.CLOSED, "name": "web.example", "port": 443}
    await until(lambda: len(box.events(**wanted)) == 5)
    assert sum(one.bytes_out for one in box.events(**wanted)) > 70_000


async def test_only_hosts_with_a_credential_are_spoken_for_and_only_in_http1(
    https: Internet, fenced: MakeFenced, tls_server: ssl.SSLContext
) -> None:
    """What the client encrypts for others stays between them."""
    await https.serve(WEB.replace(".10", ".11"), 443, answer, ssl=tls_server)
    box = await fenced("web.example:443", "other.example:443", credentials=SECRETS)

    ours = await box.python(GREETING, "web.example", "h2", "http/1.1")
    none = await box.python(GREETING, "web.example", "h2")
    theirs = await box.python(GREETING, "other.example")

    assert ours.split(None, 1)[0] == "http/1.1"
    assert "coldframe sandbox" in ours
    assert "coldframe" not in none.replace("None coldframe sandbox", "")
    assert "self-signed certificate" in theirs


async def test_credential_by_tls_goes_to_no_host_that_cannot_show_who_it_is(
    https: Internet, fenced: MakeFenced, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client trusts us; so we must not trust strangers in its place."""
    monkeypatch.delenv("SSL_CERT_FILE")
    box = await fenced("web.example:443", credentials=SECRETS)

    said = await box.python(FETCH, "https://web.example/")

    assert said.startswith("ERROR")
    assert SECRET not in said


async def test_trust_in_the_node_ends_with_the_credential(
    https: Internet, fenced: MakeFenced
) -> None:
    """A sandbox trusts its own authority alone, and not for longer than there is a use for it."""
    box = await fenced("web.example:443", credentials=SECRETS)
    other = await fenced("web.example:443", credentials=SECRETS)
    look = ("sh", "-c", f"cat /etc/ssl/certs/{hashed_name()}")
    first, second = await box.run(*look), await other.run(*look)
    before = await box.python(FETCH, "https://web.example/")
    await box.set("web.example:443")
    after = await box.python(FETCH, "https://web.example/")
    left = await box.run("sh", "-c", "grep -rl CERTIFICATE /etc/ssl/certs 2>/dev/null | wc -l")

    assert "BEGIN CERTIFICATE" in first
    assert first != second
    assert before.startswith("200")
    assert "CERTIFICATE_VERIFY_FAILED" in after
    assert first not in left


def test_hashed_name_is_what_openssl_computes(tmp_path: Path) -> None:
    """Python finds a certificate in a directory by this name alone."""
    import subprocess

    path = tmp_path / "ca.pem"
    path.write_bytes(Authority().pem)
    words = ["openssl", "x509", "-noout", "-subject_hash", "-in", str(path)]
    told = subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()

    assert hashed_name() == f"{told}.0"


async def names_here_and_there(name: str) -> Sequence[str]:
    """The test's names, and the machine's."""
    if name == "web.example":
        return [WEB]
    found = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_curl_as_it_is_asks_by_https_with_the_credential(
    tmp_path: Path,
    image_store: ImageStore,
    debian_image: Image,
    certificate: Path,
    tls_server: ssl.SSLContext,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Installed from Debian's index, with the bundle that its package makes."""
    layers = image_store.layers_directory
    async with native_runtime_in(
        tmp_path, layers, workers=1, resolve=names_here_and_there
    ) as runtime:
        spec = SandboxSpec(image=debian_image.name, network=NetworkPolicy.parse("presets:apt"))
        box = Fenced(await runtime.create(new_sandbox_id(runtime.node_id), spec, debian_image))
        trust = await trust_bundle(box)
        install = (
            "apt-get -q update && DEBIAN_FRONTEND=noninteractive apt-get -qy "
            "--no-install-recommends install curl ca-certificates"
        )
        said = await box.run("sh", "-c", install, deadline_s=300.0, env=trust)
        if box.events(kind=EgressKind.TCP, decision=EgressDecision.CLOSED) == []:
            pytest.skip(f"this machine reaches no Debian mirror: {said[-200:]}")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate.with_name("cert.pem")))
        tls_server.set_alpn_protocols(["http/1.1"])
        with two_networks() as (here, there), inside(here):
            server = Internet(there)
            await server.serve(WEB, 443, answer, ssl=tls_server)
            await box.set("web.example:443", credentials=SECRETS)
            asked = await box.run("curl", "-sS", "https://web.example/")
            await server.close()

    assert f"Authorization: {SECRET}" in asked
