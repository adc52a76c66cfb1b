"""Nodes on the fake runtime, and runtimes that fail on purpose."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from coldframe.images.base import Image
from coldframe.node.life import ENDED
from coldframe.node.node import Node
from coldframe.node.settings import NodeSettings
from coldframe.protocol.models import ExecRequest, SandboxInfo, SandboxSpec
from coldframe.runtimes.fake import FakeRuntime, FakeSandbox
from tests.fixtures.waiting import until_asked

SPEC = SandboxSpec(image="any")


class HeldRuntime(FakeRuntime):
    """A fake runtime whose creates, destroys and starts can be held up and made to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.sandbox_class = HeldSandbox
        self.gate = asyncio.Event()
        self.gate.set()
        self.create_error: Exception | None = None
        self.destroy_error: Exception | None = None
        self.creates = 0
        self.starts = 0

    async def create(self, sandbox_id: str, spec: SandboxSpec, image: Image) -> FakeSandbox:
        self.creates += 1
        await self.gate.wait()
        if self.create_error is not None:
            raise self.create_error
        return await super().create(sandbox_id, spec, image)


class HeldSandbox(FakeSandbox):
    """Its destroys and starts obey its runtime's gate and errors."""

    @property
    def _held(self) -> HeldRuntime:
        assert isinstance(self._runtime, HeldRuntime)
        return self._runtime

    async def start_exec(self, request: ExecRequest, operation_id: str):
        self._held.starts += 1
        await self._held.gate.wait()
        return await super().start_exec(request, operation_id)

    async def destroy(self) -> None:
        if self._held.destroy_error is not None:
            raise self._held.destroy_error
        await super().destroy()


NodeMaker = Callable[..., Awaitable[Node]]


@pytest.fixture
async def make_node(tmp_path: Path) -> AsyncIterator[NodeMaker]:
    """Start nodes with settings of choice; all are closed at the end."""
    async with AsyncExitStack() as stack:

        async def make(runtime: FakeRuntime | None = None, **settings: object) -> Node:
            chosen = NodeSettings(home=tmp_path / "home", runtime="fake", quarantine_s=0)
            node = Node(dataclasses.replace(chosen, **settings), runtime=runtime)
            return await stack.enter_async_context(node)

        yield make


@pytest.fixture
async def node(make_node: NodeMaker) -> Node:
    """A node on the fake runtime with default settings."""
    return await make_node()


@pytest.fixture
async def held() -> HeldRuntime:
    """A runtime to be held up."""
    return HeldRuntime()


async def ended(node: Node, sandbox_id: str) -> SandboxInfo:
    """Wait until a sandbox is in a final state."""
    await until_asked(lambda: _has_ended(node, sandbox_id))
    return await node.get(sandbox_id)


async def _has_ended(node: Node, sandbox_id: str) -> bool:
    return (await node.get(sandbox_id)).state in ENDED


def handle_of(node: Node, sandbox_id: str) -> FakeSandbox:
    """The runtime's side of a sandbox."""
    assert isinstance(node.runtime, FakeRuntime)
    return node.runtime._sandboxes[sandbox_id]
