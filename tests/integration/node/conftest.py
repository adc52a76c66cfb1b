"""Nodes on the native runtime, on the machine's own images."""

from __future__ import annotations

import resource
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coldframe.images.base import Image
from coldframe.images.store import ImageStore
from coldframe.node.node import Node
from coldframe.node.settings import NodeSettings
from coldframe.protocol.models import SandboxSpec

DEEP = """
import os, sys
top = os.open("/srv", os.O_RDONLY)
for level in range(int(sys.argv[1])):
    os.mkdir("d", dir_fd=top)
    below = os.open("d", os.O_RDONLY | os.O_DIRECTORY, dir_fd=top)
    os.close(top)
    top = below
os.close(os.open("f", os.O_CREAT | os.O_WRONLY, dir_fd=top))
"""
"""Makes so many directories in one another, and a file in the last."""


def peak_rss_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.fixture
async def native_node(tmp_path: Path, image_store: ImageStore) -> AsyncIterator[Node]:
    """A node of a home of its own; at its end the ledger balances and nothing is left."""
    node = Node(NodeSettings(home=tmp_path, quarantine_s=0.3), images=image_store)
    await node.start()
    try:
        yield node
        for info in await node.list():
            await node.delete(info.id)
        ledger = await node.ledger()
        assert ledger.balanced, ledger
        assert ledger.live == 0
    finally:
        report = await node.close()
    assert report.failures == ()
    assert list((tmp_path / "nodes").iterdir()) == []


@pytest.fixture
def spec(busybox_image: Image) -> SandboxSpec:
    """A small sandbox on busybox."""
    return SandboxSpec(image=busybox_image.name, memory_bytes=256 << 20)
