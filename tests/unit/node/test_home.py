"""A node's directory says whether its owner lives."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from coldframe.host import gc
from coldframe.images.base import ImageConfig
from coldframe.images.store import ImageStore
from coldframe.node.home import NodeHome
from coldframe.node.node import Node
from coldframe.node.settings import NodeSettings
from coldframe.protocol.errors import CapabilityError, InvalidRequestError
from coldframe.runtimes.fake import FakeRuntime


def test_home_that_is_held_cannot_be_taken(tmp_path: Path) -> None:
    """Two owners of one node would reap each other's sandboxes."""
    first, second = NodeHome(tmp_path, "abcdef"), NodeHome(tmp_path, "abcdef")
    first.acquire()

    with pytest.raises(CapabilityError, match="another node"):
        second.acquire()
    assert gc.hold_node(first.directory) is None
    first.release()
    first.release()

    assert not first.directory.exists()
    second.acquire()
    second.release()


def test_home_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """The message says which variable helps."""
    (tmp_path / "file").write_text("")

    with pytest.raises(CapabilityError, match="COLDFRAME_HOME"):
        NodeHome(tmp_path / "file", "abcdef").acquire()


async def test_node_of_unknown_runtime_names_those_there_are(tmp_path: Path) -> None:
    """And gives its lock back."""
    node = Node(NodeSettings(home=tmp_path, runtime="docker"))

    with pytest.raises(InvalidRequestError, match="fake, native"):
        await node.start()

    assert not (tmp_path / "nodes" / node.id).exists()


async def test_node_closes_the_image_store_that_it_has_made(tmp_path: Path) -> None:
    """A process that opens a client after another would hold layers for all of them."""
    with ImageStore(tmp_path / "images") as store, store.workspace() as work:
        (work / "tree").mkdir()
        store.tag("small", [store.add_layer(work / "tree")], ImageConfig())
    node = Node(NodeSettings(home=tmp_path), runtime=_Unlike())
    await node.start()
    assert isinstance(node.images, ImageStore)
    digest = node.images.resolve("small").layers[0]
    lock = tmp_path / "images" / "layers" / digest / "lock"
    assert _is_held(lock)

    await node.close()

    assert not _is_held(lock)


class _Unlike(FakeRuntime):
    """A runtime that runs images of the store."""

    @property
    def name(self) -> str:
        return "unlike"


def _is_held(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@pytest.mark.root
def test_home_on_a_full_disk_is_named_and_kills_nobody(tmp_path: Path) -> None:
    """Counts are mapped from a file: without room for it, the first one would be a SIGBUS."""
    code = """
        import subprocess, sys; from pathlib import Path
        from coldframe.node.home import NodeHome
        from coldframe.protocol.errors import StorageFullError
        home = Path(sys.argv[1])
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", home], check=True)
        subprocess.run("head -c 2M /dev/zero > fill 2>&-", shell=True, cwd=home)
        try:
            NodeHome(home, "abcdef").acquire()
        except StorageFullError as error:
            print("full:", error)
        (home / "fill").unlink()
        node = NodeHome(home, "abcdef"); node.acquire()
        node.counts["created"] += 1
        print(dict(node.counts)["created"])
    """
    done = subprocess.run(
        ["unshare", "-m", sys.executable, "-c", textwrap.dedent(code), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done
    first, second = done.stdout.splitlines()
    assert first.startswith("full: no space is left for a node's state in ")
    assert second == "1"
