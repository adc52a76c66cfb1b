"""Package managers, unmodified and without settings, through the presets of this machine."""

from __future__ import annotations

import asyncio
import io
import os
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
    bundle = os.environ.get("SSL_CERT_FILE") or ssl.get_default_verify_paths().cafile
    if bundle:
        content = Path(bundle).read_bytes()  # noqa: ASYNC240
        await box.sandbox.files.write(BUNDLE, _pieces(content))
    return box


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
    """A repository as plain files below `served`."""
    script = """
set -e
git init -q work; cd work
git config user.name tester; git config user.email tester@example.invalid
echo content > file; git add file; git commit -q -m first
cd ..; git clone -q --bare work served/it.git
git -C served/it.git update-server-info
"""
    subprocess.run(["sh", "-c", script], check=True, capture_output=True, cwd=where)


async def test_git_clones_through_the_policy_and_is_refused_without(
    servers: Internet, fenced: MakeFenced, tmp_path: Path
) -> None:
    """Version control over HTTP, with redirects of its own and kept connections."""
    _make_repository(tmp_path)

    async def files(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            name = head.split()[1].split(b"?")[0].decode().lstrip("/")
            path = tmp_path / "served" / name
            found = path.is_file()
            body = path.read_bytes() if found else b""
            status = b"200 OK" if found else b"404 Not Found"
            writer.write(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body)

    await servers.serve(WEB, 8080, files)
    clone = ["git", "clone", "-q", "http://web.example:8080/it.git", "/tmp/it"]
    box = await fenced("web.example:8080")
    other = await fenced("other.example:8080")

    said = await box.run(*clone) + await box.run("cat", "/tmp/it/file")
    failed = await other.run(*clone)

    assert said.endswith("content\n"), said
    assert "Could not resolve host" in failed
    _assert_said(other)
