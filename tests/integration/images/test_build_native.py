"""Dockerfiles whose RUN steps run in real sandboxes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coldframe.images.bootstrap import bootstrap
from coldframe.images.store import ImageStore
from coldframe.images.view import MergedView
from coldframe.node.node import Node
from coldframe.node.settings import NodeSettings
from coldframe.protocol.errors import BuildStepError
from coldframe.protocol.models import ExecRequest, SandboxSpec

pytestmark = pytest.mark.root


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    """A node with a store of its own that holds busybox."""
    with ImageStore(tmp_path / "home" / "images") as store:
        bootstrap(store, "busybox")
    async with Node(NodeSettings(home=tmp_path / "home")) as node:
        yield node
        ledger = await node.ledger()
        assert (ledger.live, ledger.leaks) == (0, ())


def _write(context: Path, text: str) -> Path:
    context.mkdir(exist_ok=True)
    (context / "file").write_text("content")
    (context / "Dockerfile").write_text(text)
    return context


async def test_build_on_a_node_runs_steps_in_sandboxes(node: Node, tmp_path: Path) -> None:
    """What a step deletes, replaces and owns must come out as it was inside; the network, not."""
    context = _write(
        tmp_path / "context",
        "FROM busybox\n"
        "ENV WHERE=/srv/app\n"
        "WORKDIR $WHERE\n"
        "COPY file .\n"
        "RUN echo agent:x:1234:1234::/:/bin/sh >> /etc/passwd \\\n"
        "  && chown agent $WHERE && chmod 2750 $WHERE\n"
        "RUN rm /etc/hosts && rm -r /home && mkdir /home && echo $PWD > /home/pwd\n"
        "USER agent\n"
        'RUN ["/bin/sh", "-c", "id -un > who; ! wget -T 2 -q http://127.0.0.1/"]\n',
    )

    image = await node.build_image("built", context)

    assert isinstance(node.images, ImageStore)
    view = MergedView([node.images.layer_root(layer) for layer in image.layers])
    status = view.resolve(b"srv/app").stat
    assert status is not None
    assert (status.st_uid, status.st_mode & 0o7777) == (1234, 0o2750)
    assert view.read(b"srv/app/who") == b"agent\n"
    assert view.read(b"srv/app/file") == b"content"
    assert view.read(b"home/pwd") == b"/srv/app\n"
    assert view.resolve(b"etc/hosts").stat is None
    tmp = view.resolve(b"tmp").stat
    assert tmp is not None
    assert tmp.st_mode & 0o7777 == 0o1777


async def test_build_again_on_a_node_makes_no_sandbox(node: Node, tmp_path: Path) -> None:
    """A second build runs nothing: counted by the ledger, not by the builder."""
    context = _write(tmp_path / "context", "FROM busybox\nRUN echo 1 > /one\nRUN echo 2 > /two\n")
    first = await node.build_image("built", context)
    created = (await node.ledger()).created

    again = await node.build_image("built", context)

    assert again == first
    assert (await node.ledger()).created == created == 2


async def test_built_image_runs(node: Node, tmp_path: Path) -> None:
    """The point of building it."""
    context = _write(tmp_path / "context", "FROM busybox\nRUN echo hello > /greeting\n")
    await node.build_image("built", context)

    sandbox = await node.create_sandbox(SandboxSpec(image="built"))
    result = await node.exec(sandbox.id, ExecRequest(command="cat /greeting"))
    await node.delete(sandbox.id)

    assert result.stdout == b"hello\n"


async def test_image_removed_under_a_live_sandbox_stays_whole_for_it(
    node: Node, tmp_path: Path
) -> None:
    """Files that vanish in the middle of an episode would be booked as the agent's failure."""
    context = _write(tmp_path / "context", "FROM busybox\nCOPY file /f\n")
    image = await node.build_image("used", context)
    sandbox = await node.create_sandbox(SandboxSpec(image="used"))

    with ImageStore(tmp_path / "home" / "images") as other:
        removal = other.remove("used")
        swept = other.gc()
    result = await node.exec(sandbox.id, ExecRequest(command="cat /f && ls /bin | wc -l"))
    await node.delete(sandbox.id)

    assert removal.in_use == image.layers[:1]
    assert image.layers[0] in swept.in_use
    assert result.ok
    assert result.stdout.startswith(b"content")


async def test_failed_and_overlong_steps_leave_nothing(node: Node, tmp_path: Path) -> None:
    """A step that daemonises and hangs must not live on, nor its half-written layer."""
    failing = _write(tmp_path / "a", "FROM busybox\nRUN echo why >&2; exit 7\n")
    hanging = _write(tmp_path / "b", "FROM busybox\nRUN (setsid sleep 600 &) ; sleep 600\n")

    with pytest.raises(BuildStepError, match=r"Dockerfile:2: `RUN .*` failed with .* 7: why"):
        await node.build_image("a", failing)
    with pytest.raises(BuildStepError, match=r"Dockerfile:2: `RUN .*` did not end within"):
        await node.build_image("b", hanging, deadline_s=0.5)

    assert isinstance(node.images, ImageStore)
    assert [record.name for record in node.images.list()] == ["busybox:latest"]
    assert list((node.images.root / "tmp").iterdir()) == []
