"""A Go program, curl and a browser as their makers ship them, without any setting of ours."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from coldframe.images.base import Image
from coldframe.images.store import ImageStore
from coldframe.protocol.ids import new_sandbox_id
from coldframe.protocol.models import SandboxSpec
from coldframe.protocol.network import EgressDecision, EgressKind, NetworkPolicy
from tests.fixtures.egress import WEB, Fenced, inside, two_networks
from tests.fixtures.runtime import native_runtime_in
from tests.integration.egress.test_packages import trust_bundle

CLIENT = """
package main
import ("crypto/tls"; "fmt"; "io"; "net"; "net/http"; "os")
func main() {
    way := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}
    way.ForceAttemptHTTP2 = true
    for _, url := range os.Args[1:] {
        answer, err := (&http.Client{Transport: way}).Get(url)
        if err != nil { fmt.Println("ERROR", err); continue }
        text, _ := io.ReadAll(answer.Body)
        fmt.Println(answer.Proto, answer.StatusCode, len(text) > 0)
    }
    link, _ := net.Dial("udp", "203.0.113.10:443")
    link.Write([]byte("quic"))
    _, err := link.Read(make([]byte, 1))
    fmt.Println(err)
}
"""
SERVER = """
package main
import ("fmt"; "net/http"; "os")
const page = `<html><body>%s %s<script>
fetch("/more").then(r => r.text()).then(t => document.body.append("fetched"))
</script><img src="//forbidden.example/x.png"></body></html>`
func main() {
    answer := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
        w.Header().Set("Content-Type", "text/html")
        fmt.Fprintf(w, page, r.Host, r.Proto)
    })
    go http.ListenAndServe("203.0.113.10:80", answer)
    fmt.Println(http.ListenAndServeTLS("203.0.113.10:443", os.Args[1], os.Args[1], answer))
}
"""
BROWSE = (
    "chromium-headless-shell --no-sandbox --disable-gpu --ignore-certificate-errors "
    "--virtual-time-budget=5000 --dump-dom {}"
)
INSTALL = (
    "export DEBIAN_FRONTEND=noninteractive; apt-get -q update && "
    "apt-get -qy --no-install-recommends install golang-go chromium-headless-shell curl"
)


async def resolve(name: str) -> Sequence[str]:
    """The test's names, and the machine's."""
    if name.endswith(".example"):
        return [WEB]
    found = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


@contextmanager
def running(network: str, *argv: str) -> Iterator[None]:
    """A program in a named network, once it listens."""
    process = subprocess.Popen(["ip", "netns", "exec", network, *argv])
    try:
        yield
    finally:
        process.kill()
        process.wait()


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_go_curl_and_a_browser_reach_what_is_allowed_without_settings(
    tmp_path: Path, image_store: ImageStore, debian_image: Image, certificate: Path
) -> None:
    """Go resolves by itself, curl and the browser speak HTTP/2, the browser tries everything."""
    layers = image_store.layers_directory
    async with native_runtime_in(tmp_path, layers, workers=1, resolve=resolve) as runtime:
        policy = NetworkPolicy.parse("presets:apt", "web.example:80,443")
        spec = SandboxSpec(image=debian_image.name, network=policy, memory_bytes=4 << 30)
        box = Fenced(await runtime.create(new_sandbox_id(runtime.node_id), spec, debian_image))
        trust = await trust_bundle(box)
        said = await box.run("sh", "-c", INSTALL, deadline_s=400.0, env=trust)
        if box.events(kind=EgressKind.TCP, decision=EgressDecision.CLOSED) == []:
            pytest.skip(f"this machine reaches no Debian mirror: {said[-200:]}")
        for name, source in (("client", CLIENT), ("server", SERVER)):
            await box.run("sh", "-c", f"cat > /tmp/{name}.go <<'END'\n{source}\nEND")
            build = f"cd /tmp && HOME=/tmp CGO_ENABLED=0 go build -o {name} {name}.go"
            assert await box.run("sh", "-c", build, deadline_s=200.0) == ""
        server = tmp_path / "server"
        server.write_bytes(
            b"".join([piece async for piece in box.sandbox.files.read("/tmp/server")])
        )
        server.chmod(0o755)

        with (
            two_networks() as (here, there),
            inside(here),
            running(there, os.fspath(server), os.fspath(certificate)),
        ):
            await asyncio.sleep(1)
            urls = ("http://web.example/", "https://web.example/", "http://forbidden.example/")
            go = (await box.run("/tmp/client", *urls, "https://203.0.113.10/")).splitlines()
            curl = await box.run("curl", "-sk", urls[1])
            pages = [await box.run("sh", "-c", BROWSE.format(url)) for url in urls[:2]]

    assert go[:2] == ["HTTP/1.1 200 true", "HTTP/2.0 200 true"]
    assert "no such host" in go[2]
    assert "connection reset" in go[3]  # TLS that shows no name
    assert "connection refused" in go[4]
    assert "web.example HTTP/2.0" in curl
    for page, protocol in zip(pages, ("HTTP/1.1", "HTTP/2.0"), strict=True):
        assert f"web.example {protocol}" in page
        assert "fetched</body>" in page
    refused = box.events(decision=EgressDecision.REFUSED)
    assert {event.name for event in refused if event.kind == "dns"} >= {"forbidden.example"}
    assert {event.port for event in refused if event.kind == "udp"} == {443}
