"""Egress that is opened while the rest of its sandbox is made, of a blank."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coldframe.host.spawner import Created
from coldframe.images.base import Image
from coldframe.images.store import ImageStore
from coldframe.protocol.errors import CreateError
from coldframe.protocol.ids import new_sandbox_id
from coldframe.protocol.models import SandboxSpec
from coldframe.protocol.network import NetworkPolicy
from coldframe.runtimes.native import NativeRuntime
from coldframe.runtimes.native_egress import NativeEgress
from tests.fixtures.egress import WEB, Fenced, Internet, fenced_runtime
from tests.fixtures.runtime import open_descriptors
from tests.fixtures.waiting import until
from tests.integration.egress.conftest import TALK


@pytest.fixture
async def runtime(
    servers: Internet, tmp_path: Path, image_store: ImageStore, debian_image: Image
) -> AsyncIterator[NativeRuntime]:
    """One that has blanks, because a sandbox was made and has ended."""
    async with fenced_runtime(tmp_path, image_store, servers) as started:
        spec = SandboxSpec(image=debian_image.name, network=NetworkPolicy.parse(WEB))
        first = await started.create(new_sandbox_id(started.node_id), spec, debian_image)
        await first.destroy()
        await until(lambda: started._blanks.ready == 2)
        yield started


def spec(image: Image, *rules: str) -> SandboxSpec:
    """A sandbox with a policy."""
    return SandboxSpec(image=image.name, network=NetworkPolicy.parse(*rules))


async def make(runtime: NativeRuntime, image: Image, *rules: str) -> Fenced:
    """A sandbox of a blank."""
    sandbox_id = runtime.offer_id()
    assert sandbox_id is not None
    return Fenced(await runtime.create(sandbox_id, spec(image, *rules), image))


async def test_policy_of_a_blank_holds_from_the_first_command_on(
    runtime: NativeRuntime, debian_image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is opened ahead must be all that is opened otherwise."""
    begun = []
    begin = NativeEgress.begin
    monkeypatch.setattr(
        NativeEgress, "begin", lambda self, *a: (begun.append(1), begin(self, *a))[1]
    )
    box = await make(runtime, debian_image, "web.example:7")
    other = await make(runtime, debian_image)

    assert begun == [1]
    assert await box.python(TALK, "web.example", "7", "") == "hello\n"
    assert (await box.python(TALK, WEB, "80", "")).startswith("ERROR")
    assert await other.python(TALK, WEB, "7", "") == "ERROR OSError\n"
    assert not other.sandbox.parts.egress.active
    await box.set()
    assert await box.python(TALK, WEB, "7", "") == "ERROR OSError\n"
    assert "127.0.0.53" not in await box.run("cat", "/etc/resolv.conf")


async def test_egress_of_a_sandbox_that_is_not_made_after_all_leaves_nothing(
    runtime: NativeRuntime, debian_image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its listeners would hold the blank's network for as long as the node lives."""
    before = open_descriptors()

    def opened(*kinds: str) -> list[str]:
        return [one for one in open_descriptors() - before if any(kind in one for kind in kinds)]

    async def fail(*_: object) -> Created:
        raise CreateError("it cannot be made")

    async def fail_late(*_: object) -> Created:
        await until(lambda: len(opened("socket")) > 8)
        monkeypatch.setattr(runtime._maker, "_create", fail)  # it is tried again without a blank
        return await fail()

    monkeypatch.setattr(runtime._maker, "_create", fail_late)
    with pytest.raises(CreateError):
        await make(runtime, debian_image, WEB)

    assert opened("socket", "net:[") == []


async def test_create_that_is_cancelled_ends_its_egress_too(
    runtime: NativeRuntime, debian_image: Image
) -> None:
    """Whoever asked has gone; nobody else would end it."""
    sandbox_id = runtime.offer_id()
    assert sandbox_id is not None
    making = asyncio.ensure_future(
        runtime.create(sandbox_id, spec(debian_image, WEB), debian_image)
    )
    await asyncio.sleep(0.0005)
    making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making

    await until(lambda: not runtime._making)
    assert await runtime.leaks(()) == ()
