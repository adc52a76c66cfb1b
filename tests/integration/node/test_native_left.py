"""Nodes that go on with what another has left, in one process: what services do in two."""

from __future__ import annotations

from pathlib import Path

import pytest

from coldframe.host import orphans
from coldframe.images.store import ImageStore
from coldframe.node.node import Node
from coldframe.node.settings import NodeSettings
from coldframe.protocol import wire
from coldframe.protocol.errors import ColdframeError
from coldframe.protocol.models import ExecRequest, SandboxSpec

ODD = (
    ExecRequest(command="pwd", cwd="/\udcff", operation_id="text"),
    ExecRequest(command="pwd", cwd=b"/\xff", operation_id="bytes"),
    ExecRequest(argv=(b"\xff", "x"), operation_id="missing"),
    ExecRequest(command="echo $A", env={"A": b"\xfe"}, operation_id="variable"),
    ExecRequest(command="wc -c", stdin=b"\0\xff" * 200_000, operation_id="input"),
    ExecRequest(command="cat", stdin=b"small", user="0", deadline_s=None, operation_id="small"),
    ExecRequest(argv=("echo", "x" * 100_000), operation_id="long"),
)


async def _answers(node: Node, sandbox_id: str) -> list[bytes | tuple[type, str]]:
    """As a service's clients see them."""
    found: list[bytes | tuple[type, str]] = []
    for request in ODD:
        try:
            sent = wire.load(ExecRequest, wire.dump(request))
            found.append(wire.dump(await node.exec(sandbox_id, sent)))
        except ColdframeError as error:
            found.append((type(error), str(error)))
    return found


async def test_odd_requests_have_their_first_answers_from_the_next_node(
    tmp_path: Path, image_store: ImageStore, spec: SandboxSpec
) -> None:
    """What cannot be written down whole would be another request, and be refused or run again."""
    settings = NodeSettings(home=tmp_path)
    first = Node(settings, images=image_store, outlive=True)
    await first.start()
    try:
        info = await first.create_sandbox(spec, operation_id="made")
        await first.exec(info.id, ExecRequest(argv=("mkdir", b"/\xff")))
        answers = await _answers(first, info.id)
        daemon = await first.leave()
        assert daemon is not None

        second = Node(settings, images=image_store, outlive=True, daemon=daemon)
        await second.start()
        assert second.id == first.id
        assert await _answers(second, info.id) == answers
        assert await second.create_sandbox(spec, operation_id="made") == info
        await second.delete(info.id)
        assert (await second.ledger()).balanced
        assert (await second.close()).failures == ()
        assert list((tmp_path / "nodes").iterdir()) == []
    finally:
        orphans.end_left(tmp_path)


async def test_node_that_has_nothing_to_leave_leaves_nothing(
    tmp_path: Path, image_store: ImageStore
) -> None:
    """A service that fails to start must not leave a spawner that waits for a day."""
    node = Node(NodeSettings(home=tmp_path), images=image_store, outlive=True)
    await node.start()
    assert await node.leave() is None
    assert list((tmp_path / "nodes").iterdir()) == []


async def test_spool_that_no_longer_fits_is_refused_and_not_run_again(
    tmp_path: Path, image_store: ImageStore, spec: SandboxSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was dropped for want of room must be known to have run."""
    monkeypatch.setattr("coldframe.runtimes.native_keeping._MOST_SPOOLED", 1)
    settings = NodeSettings(home=tmp_path)
    first = Node(settings, images=image_store, outlive=True)
    await first.start()
    try:
        info = await first.create_sandbox(spec, operation_id="made")
        large = [
            ExecRequest(command=f"echo {number} >> /ran; yes | head -c 200000", operation_id=name)
            for number, name in enumerate(("older", "newer"))
        ]
        results = [await first.exec(info.id, request) for request in large]
        daemon = await first.leave()

        second = Node(settings, images=image_store, outlive=True, daemon=daemon)
        await second.start()
        with pytest.raises(ColdframeError, match="not run again"):
            await second.exec(info.id, large[0])
        assert await second.exec(info.id, large[1]) == results[1]
        ran = await second.exec(info.id, ExecRequest(argv=("cat", "/ran")))
        assert ran.stdout == b"0\n1\n"
        assert (await second.close()).failures == ()
    finally:
        orphans.end_left(tmp_path)


async def test_spools_of_one_owner_push_out_nobody_elses_result(
    tmp_path: Path, image_store: ImageStore, spec: SandboxSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks again after a restart must get the answer, whatever others had printed."""
    monkeypatch.setattr("coldframe.runtimes.native_keeping._MOST_SPOOLED", 3)
    settings = NodeSettings(home=tmp_path)
    first = Node(settings, images=image_store, outlive=True)
    await first.start()
    try:
        amber, blue = [
            await first.create_sandbox(
                spec.model_copy(update={"labels": {"owner": owner}}), operation_id=owner
            )
            for owner in ("amber", "blue")
        ]

        def large(name: str) -> ExecRequest:
            return ExecRequest(command="yes | head -c 200000", operation_id=name)

        result = await first.exec(amber.id, large("hers"))
        for number in range(6):
            await first.exec(blue.id, large(f"his{number}"))
        daemon = await first.leave()

        second = Node(settings, images=image_store, outlive=True, daemon=daemon)
        await second.start()
        assert await second.exec(amber.id, large("hers")) == result
        assert (await second.exec(blue.id, large("his5"))).out.total_bytes == 200_000
        with pytest.raises(ColdframeError, match="not run again"):
            await second.exec(blue.id, large("his3"))
        assert (await second.close()).failures == ()
    finally:
        orphans.end_left(tmp_path)
