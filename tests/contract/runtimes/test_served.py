"""What a runtime promises holds through a service too: on its socket, and over TCP with a key."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coldframe.client._address import parse
from coldframe.client._remote import RemoteNode
from coldframe.images.base import Image
from coldframe.runtimes.fake import FakeImages
from coldframe.runtimes.self_check import CHECKS, Check, run_check, run_self_check
from tests.contract.runtimes.served import ServedRuntime
from tests.fixtures.service import Service, serving

NOT_OF_A_NODE = {
    "status_pipe_is_a_stream_apart": "a node keeps no status once the command has ended",
    "stdin_is_closed_by_default": "a node says first that the command has ended",
    "upper_can_be_exported": "no node exports uppers",
    "strays_are_described": "a node's ledger is compared with the sandboxes that it made",
    "destroy_meets_commands_that_start": "a node that ends a sandbox refuses by SandboxStateError",
    "policy_that_cannot_be_enforced_is_refused": "the native runtime enforces it",
}
"""Checks of what a runtime does, and a node in the process does not either."""

THROUGH_A_NODE = tuple(check for check in CHECKS if check.name not in NOT_OF_A_NODE)


async def keeps_every_promise(service: Service, image: Image) -> None:
    """Run over TCP all that a node keeps."""
    opened = await RemoteNode.open(parse(service.tcp), None)

    report = await run_self_check(
        ServedRuntime(opened), image, only={check.name for check in THROUGH_A_NODE}
    )

    await opened.close()
    assert report.ok, str(report)
    assert len(report.outcomes) - len(report.skipped) > 40


@pytest.fixture
async def link(native_service: Service) -> AsyncIterator[RemoteNode]:
    """A node that is reached by its socket."""
    opened = await RemoteNode.open(parse(native_service.unix), None)
    yield opened
    assert (await opened.close()).failures == ()


@pytest.mark.root
@pytest.mark.parametrize("check", THROUGH_A_NODE, ids=lambda check: check.name)
async def test_native_runtime_keeps_promise_through_the_socket(
    link: RemoteNode, busybox_image: Image, check: Check
) -> None:
    """Who joins a node must get what a node in the process gives."""
    outcome = await run_check(check, ServedRuntime(link), busybox_image)

    if outcome.status == "skipped":
        pytest.skip(outcome.detail)
    assert outcome.status == "passed", outcome.detail


async def test_fake_runtime_keeps_every_promise_over_tcp(service: Service) -> None:
    """The network is no other contract."""
    await keeps_every_promise(service, FakeImages().resolve("any"))


@pytest.mark.root
async def test_native_runtime_keeps_every_promise_over_tcp(
    native_service: Service, busybox_image: Image
) -> None:
    """Nor is the network another contract for real sandboxes."""
    await keeps_every_promise(native_service, busybox_image)


async def test_fake_runtime_keeps_every_promise_through_a_gateway_before_its_node(
    service: Service, tmp_path: Path
) -> None:
    """A request that is passed on is the same request."""
    with serving(tmp_path, "fake", "--node", service.unix) as gateway:
        await keeps_every_promise(gateway, FakeImages().resolve("any"))
