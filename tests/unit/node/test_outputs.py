"""Output beyond results is kept within bounds, and what is kept no longer is refused by name."""

from __future__ import annotations

import asyncio

import pytest

from coldframe.node.node import Node
from coldframe.protocol.errors import Execution, OperationExpiredError, OutputNotKeptError, Side
from coldframe.protocol.models import ExecRequest, ExecResult
from tests.unit.node.conftest import SPEC, NodeMaker

KIB = 1 << 10


def writing(size: int, **more: object) -> ExecRequest:
    """A command that writes so much, of which its result holds little."""
    command = f"head -c {size} /dev/zero"
    return ExecRequest.model_validate({"command": command, "window_bytes": 100, **more})


async def is_kept(node: Node, result: ExecResult) -> bool:
    try:
        chunk = await node.read_output(result.operation_id, "stdout", 50, 10)
    except OutputNotKeptError:
        return False
    return chunk.offset == 50


@pytest.mark.parametrize("bound", [{"spool_bytes": 500 * KIB}, {"spool_count": 2}])
async def test_output_of_whoever_ended_first_goes_first(
    make_node: NodeMaker, bound: dict[str, int]
) -> None:
    """By bytes as by number; how the command ended can be had all the same."""
    node = await make_node(**bound)
    sandboxes = [await node.create_sandbox(SPEC) for _ in range(2)]

    results = [await node.exec(sandboxes[n % 2].id, writing(200 * KIB)) for n in range(5)]

    assert [await is_kept(node, one) for one in results] == [False, False, False, True, True]
    first = results[0]
    with pytest.raises(
        OutputNotKeptError, match=r"bytes 50 to 204750 .* COLDFRAME_SPOOL"
    ) as caught:
        await node.read_output(first.operation_id, "stdout", 50, 1000)
    assert (caught.value.side, caught.value.execution) == (Side.OBSERVATION, Execution.EXECUTED)
    head = await node.read_output(first.operation_id, "stdout", 0, 1000)
    tail = await node.read_output(first.operation_id, "stdout", 200 * KIB - 50, 1000)
    assert (head.data, tail.data, tail.eof) == (first.out.head, first.out.tail, True)


async def test_output_of_expired_result_is_given_back(make_node: NodeMaker) -> None:
    """Nobody can ask for it any more; on the disk it would stay for as long as the node lives."""
    node = await make_node(result_count=1)
    sandbox = await node.create_sandbox(SPEC)
    results = [await node.exec(sandbox.id, writing(200 * KIB)) for _ in range(3)]

    with pytest.raises(OperationExpiredError):
        await node.read_output(results[0].operation_id)
    assert node._works.execs._outputs._kept.held == 200 * KIB


async def test_output_of_one_owner_pushes_out_nobody_elses(make_node: NodeMaker) -> None:
    """Who runs much has less of its own; what another has not yet read stays."""
    node = await make_node(spool_count=4)
    amber, blue = [
        await node.create_sandbox(SPEC.model_copy(update={"labels": {"owner": owner}}))
        for owner in ("amber", "blue")
    ]
    mine = [await node.exec(amber.id, writing(200 * KIB)) for _ in range(2)]
    others = [await node.exec(blue.id, writing(200 * KIB)) for _ in range(6)]

    assert all([await is_kept(node, one) for one in mine])
    assert [await is_kept(node, one) for one in others] == [False] * 4 + [True] * 2


async def test_output_of_one_sandbox_never_takes_the_room_of_others(make_node: NodeMaker) -> None:
    """A chatty one loses its own oldest output."""
    node = await make_node(sandbox_spool_bytes=4 << 20)
    quiet, chatty = [await node.create_sandbox(SPEC) for _ in range(2)]
    mine = await node.exec(quiet.id, writing(200 * KIB, spool_bytes=256 * KIB))
    others = [
        await node.exec(chatty.id, writing(500 * KIB, spool_bytes=256 * KIB)) for _ in range(12)
    ]

    assert await is_kept(node, mine)
    kept = [await is_kept(node, one) for one in others]
    assert kept == sorted(kept)
    assert 0 < sum(kept) <= (2 << 20) // (256 * KIB)


async def test_spools_of_concurrent_commands_fit_their_sandbox(make_node: NodeMaker) -> None:
    """A hundred times what was asked for would fill the disk; the record says what each got."""
    share = 64 << 20
    node = await make_node(sandbox_spool_bytes=share)
    sandbox = await node.create_sandbox(SPEC)
    requests = [
        ExecRequest(command="read x", stdin_open=True, spool_bytes=4 << 20, operation_id=f"op-{n}")
        for n in range(100)
    ]
    await asyncio.gather(*(node.start_exec(sandbox.id, request) for request in requests))
    record = node._works.register.find(sandbox.id)
    assert record.spool_bytes <= share

    for request in requests:
        await node.close_stdin(request.operation_id or "")
    results = await asyncio.gather(*(node.wait_exec(f"op-{n}") for n in range(100)))
    spools = [result.request.spool_bytes for result in results]
    assert spools[0] == 4 << 20
    assert sorted(spools, reverse=True) == spools
    assert spools[-1] >= share // 2 // 2048
    assert record.spool_bytes == 0


async def test_output_of_leftovers_counts_until_they_are_gone(make_node: NodeMaker) -> None:
    """They may still fill their spool; then they count for what they wrote."""
    node = await make_node()
    sandbox = await node.create_sandbox(SPEC)
    record = node._works.register.find(sandbox.id)
    request = ExecRequest(command="echo on; (sleep 60 & )", spool_bytes=1 << 20, window_bytes=2)
    result = await node.exec(sandbox.id, request)
    assert result.leftovers
    assert record.spool_bytes == 2 << 20

    await node.delete(sandbox.id)

    assert record.spool_bytes == 3
    assert node._works.execs._outputs._kept.held == 3
