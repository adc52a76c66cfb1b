"""Package managers, unmodified and without settings, through the presets of this machine."""

from __future__ import annotations

import asyncio
import io
import os
import re
import shutil
import ssl
import subprocess
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coldframe.host.egress.presets import preset_rules
from coldframe.images.base import Image
from coldframe.images.store import ImageStore
from coldframe.protocol.ids import new_sandbox_id
from coldframe.protocol.models import SandboxSpec
from coldframe.protocol.network import EgressDecision, NetworkPolicy
from coldframe.runtimes.native import NativeRuntime
from tests.fixtures.egress import WEB, Fenced, Internet, MakeFenced
from tests.fixtures.runtime import native_runtime_in

BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
TRUST = dict.fromkeys(
    ("SSL_CERT_FILE", "PIP_CERT", "NODE_EXTRA_CA_CERTS", "GIT_SSL_CAINFO"), BUNDLE
)
OTHERS = "unrelated.example"

pytestmark = pytest.mark.timeout(300)


def _reachable(preset: str) -> bool:
    """Whether this machine reaches its own package index at all."""
    import socket

    for rule in preset_rules([preset]):  # type: ignore[list-item]
        try:
            socket.create_connection((rule.host or "", rule.ports[0][0]), 10).close()
        except OSError:
            continue
        return True
    return False


def _tar(*members: tuple[Path, str]) -> bytes:
    """Host files as an archive, links followed, owned by root."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", dereference=True) as archive:
        for path, name in members:
            archive.add(path, name)
    return buffer.getvalue()


async def _pieces(data: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(data), 1 << 20):
        yield data[at : at + (1 << 20)]


@pytest.fixture
async def runtime(tmp_path: Path, image_store: ImageStore) -> AsyncIterator[NativeRuntime]:
    """A runtime in the machine's own network, which resolves as the machine does."""
    layers = image_store.layers_directory
    async with native_runtime_in(tmp_path, layers, workers=1) as started:
        yield started


async def _sandbox(runtime: NativeRuntime, image: Image, *rules: str) -> Fenced:
    spec = SandboxSpec(image=image.name, network=NetworkPolicy.parse(*rules))
    box = Fenced(await runtime.create(new_sandbox_id(runtime.node_id), spec, image))
    await trust_bundle(box)
    return box


async def trust_bundle(box: Fenced) -> dict[str, str]:
    """Give a sandbox the certificates that this machine trusts, and return what names them."""
    bundle = os.environ.get("SSL_CERT_FILE") or ssl.get_default_verify_paths().cafile
    if bundle:
        content = Path(bundle).read_bytes()  # noqa: ASYNC240
        await box.sandbox.files.write(BUNDLE, _pieces(content))
    return TRUST


def _assert_said(box: Fenced) -> None:
    refused = box.events(decision=EgressDecision.REFUSED)
    assert refused, box.events()
    assert all(event.name and event.reason == "no rule names this host" for event in refused)


async def test_apt_installs_through_the_preset_and_is_refused_without(
    runtime: NativeRuntime, debian_image: Image
) -> None:
    """Most Dockerfiles begin with it."""
    if not _reachable("apt"):
        pytest.skip("this machine reaches no Debian mirror")
    install = "apt-get -q update && apt-get -qy --no-install-recommends install hello && hello"
    box = await _sandbox(runtime, debian_image, "presets:apt")
    bare = await _sandbox(runtime, debian_image, OTHERS)

    said = await box.run("sh", "-c", install, deadline_s=200, env=TRUST)
    failed = await bare.run("sh", "-c", install, deadline_s=200, env=TRUST)

    assert "Hello, world!" in said, said
    assert "Hello, world!" not in failed
    _assert_said(bare)


async def test_pip_installs_through_the_preset_and_is_refused_without(
    runtime: NativeRuntime, debian_image: Image
) -> None:
    """Index and files are on two hosts; the preset must know both."""
    if not _reachable("pip"):
        pytest.skip("this machine reaches no Python package index")
    import pip

    program = _tar((Path(pip.__file__).parent, "pip"))
    install = "python3 -m pip install -q --retries 0 --target /tmp/it --no-deps six"
    install += " && PYTHONPATH=/tmp/it python3 -c 'import six; print(six.__name__)'"
    env = {**TRUST, "PYTHONPATH": "/opt/pip"}
    box = await _sandbox(runtime, debian_image, "presets:pip")
    bare = await _sandbox(runtime, debian_image, OTHERS)
    for one in (box, bare):
        await one.sandbox.files.tar_up("/opt/pip", _pieces(program), owner=(0, 0))

    said = await box.run("sh", "-c", install, deadline_s=100, env=env)
    failed = await bare.run("sh", "-c", install, deadline_s=100, env=env)

    assert said.splitlines()[0] == "six", said
    assert "No matching distribution" in failed, failed
    _assert_said(bare)


async def test_npm_installs_through_the_preset_and_is_refused_without(
    runtime: NativeRuntime, debian_image: Image
) -> None:
    """Node resolves and connects in ways of its own."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None or not _reachable("npm"):
        pytest.skip("this machine has no npm, or reaches no registry")
    home = Path(npm).resolve().parents[1]  # noqa: ASYNC240
    program = await asyncio.to_thread(_tar, (Path(node).resolve(), "node"), (home, "npm"))  # noqa: ASYNC240
    install = "cd /tmp && /opt/node /opt/npm/bin/npm-cli.js install --no-audit --no-fund "
    install += "--fetch-retries=0 is-number && ls node_modules"
    box = await _sandbox(runtime, debian_image, "presets:npm")
    bare = await _sandbox(runtime, debian_image, OTHERS)
    for one in (box, bare):
        await one.sandbox.files.tar_up("/opt", _pieces(program), owner=(0, 0))
    if "not found" in await box.run("/opt/node", "--version"):
        pytest.skip("this machine's node does not run on the image")

    said = await box.run("sh", "-c", install, deadline_s=100, env=TRUST)
    failed = await bare.run("sh", "-c", install, deadline_s=100, env=TRUST)

    assert "is-number" in said.split(), said
    assert "is-number" not in failed.split()
    _assert_said(bare)


def _make_repository(where: Path) -> None:
    """A bare repository below `served`, with more in it than fits one buffer."""
    script = """
set -e
git init -q work; cd work
git config user.name tester; git config user.email tester@example.invalid
head -c 3000000 /dev/urandom > big; echo content > file
git add .; git commit -q -m first
cd ..; git clone -q --bare work served/it.git
git -C served/it.git config http.receivepack true
git -C served/it.git update-server-info
"""
    subprocess.run(["sh", "-c", script], check=True, capture_output=True, cwd=where)


class GitServer:
    """git's own server program behind HTTP/1.1: kept connections, chunks, gzip, `Expect`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.asked: list[str] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not reader.at_eof():
            try:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
            except asyncio.IncompleteReadError:
                return
            lines = head.split("\r\n")
            fields = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines[1:])}
            self.asked.append(lines[0])
            if fields.get("expect"):
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            await self._answer(lines[0], fields, await _body(reader, fields), writer)

    async def _answer(
        self, line: str, fields: dict[str, str], body: bytes, writer: asyncio.StreamWriter
    ) -> None:
        method, target, _ = line.split()
        path, _, query = target.partition("?")
        program = await asyncio.create_subprocess_exec(
            "git",
            "http-backend",
            stdin=-1,
            stdout=-1,
            env={
                **os.environ,
                "GIT_PROJECT_ROOT": str(self._root),
                "GIT_HTTP_EXPORT_ALL": "1",
                "REQUEST_METHOD": method,
                "PATH_INFO": path,
                "QUERY_STRING": query,
                "CONTENT_TYPE": fields.get("content-type", ""),
                "CONTENT_LENGTH": str(len(body)),
                "HTTP_CONTENT_ENCODING": fields.get("content-encoding", ""),
                "GIT_PROTOCOL": fields.get("git-protocol", ""),
                "REMOTE_USER": "tester",
            },
        )
        answer, _ = await program.communicate(body)
        head, _, content = answer.partition(b"\r\n\r\n")
        found = re.search(rb"(?m)^Status: (.*?)\r?$", head)
        status = found[1] if found else b"200 OK"
        writer.write(b"HTTP/1.1 %s\r\n%s\r\n" % (status, head))
        writer.write(b"Content-Length: %d\r\n\r\n" % len(content) + content)
        await writer.drain()


async def _body(reader: asyncio.StreamReader, fields: dict[str, str]) -> bytes:
    if fields.get("transfer-encoding") != "chunked":
        return await reader.readexactly(int(fields.get("content-length", 0)))
    body = b""
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        await reader.readline()
    await reader.readline()
    return body


@pytest.mark.parametrize("tls", [False, True])
async def test_git_clones_and_pushes_through_the_policy_and_is_refused_without(
    servers: Internet,
    fenced: MakeFenced,
    tls_server: ssl.SSLContext,
    tmp_path: Path,
    tls: bool,
) -> None:
    """Version control over HTTP and HTTPS, as its own client and server speak it."""
    await asyncio.to_thread(_make_repository, tmp_path)
    tls_server.set_alpn_protocols(["http/1.1"])
    server = GitServer(tmp_path / "served")
    await servers.serve(WEB, 8080, server, **({"ssl": tls_server} if tls else {}))
    url = f"{'https' if tls else 'http'}://web.example:8080/it.git"
    clone = ["git", "-c", "http.sslVerify=false", "clone", "-q", url, "/tmp/it"]
    push = """
set -e; cd /tmp/it
git config user.name tester; git config user.email tester@example.invalid
git config http.sslVerify false; git config http.postBuffer 65536
head -c 1000000 /dev/urandom > more; git add more; git commit -q -m second
git push -q origin HEAD; git fetch -q; git status -sb | head -1
"""
    box = await fenced("web.example:8080")
    other = await fenced("other.example:8080")

    said = await box.run(*clone, deadline_s=60.0) + await box.run("cat", "/tmp/it/file")
    pushed = await box.run("sh", "-c", push, deadline_s=60.0)
    failed = await other.run(*clone)

    assert said == "content\n"
    assert pushed.startswith("## "), pushed
    assert "ahead" not in pushed
    assert any("git-receive-pack" in line for line in server.asked)
    assert "Could not resolve host" in failed
    _assert_said(other)
