"""Nodes on the native runtime, on the machine's own images."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coldframe.images.base import Image
from coldframe.images.store import ImageStore
from coldframe.node.node import Node
from coldframe.node.settings import NodeSettings
from coldframe.protocol.models import SandboxSpec


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
