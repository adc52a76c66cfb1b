"""A node's directory says whether its owner lives."""

from __future__ import annotations

from pathlib import Path

import pytest

from coldframe.host import gc
from coldframe.node.home import NodeHome
from coldframe.node.node import Node
from coldframe.node.settings import NodeSettings
from coldframe.protocol.errors import CapabilityError, InvalidRequestError


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
