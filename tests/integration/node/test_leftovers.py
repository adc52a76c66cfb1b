"""Commands that leave something running, many of them, in one sandbox that lives long."""

from __future__ import annotations

from pathlib import Path

import pytest

from coldframe.node.life import LINGERING_LOOK
from coldframe.node.node import Node
from coldframe.protocol.errors import OutputNotKeptError
from coldframe.protocol.models import ExecRequest, SandboxSpec
from tests.fixtures.waiting import until_asked

pytestmark = pytest.mark.root


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_leftovers_that_have_ended_hold_no_descriptors(
    native_node: Node, spec: SandboxSpec
) -> None:
    """An agent that starts things in the background would else use up what all share."""
    sandbox = await native_node.create_sandbox(spec)
    record = native_node._works.register.find(sandbox.id)
    request = ExecRequest(command="sleep 0.01 & echo early")
    await native_node.exec(sandbox.id, request)
    before = _open_files()

    for _ in range(8 * LINGERING_LOOK):
        await native_node.exec(sandbox.id, request)
        await _alone(native_node, sandbox.id)

    assert len(record.lingering) <= LINGERING_LOOK
    assert _open_files() - before <= 2 * LINGERING_LOOK
    assert record.spool_bytes <= LINGERING_LOOK * 2 * request.spool_bytes


_LATE = "(while [ ! -e go ]; do sleep 0.02; done; echo late) & echo early"


async def _leave_and_end(node: Node, sandbox_id: str, count: int, spool_bytes: int) -> list[str]:
    """Operations that left something running, which wrote and has ended."""
    request = ExecRequest(command=_LATE, spool_bytes=spool_bytes)
    asked = [await node.start_exec(sandbox_id, request) for _ in range(count)]
    for operation_id in asked:
        assert (await node.wait_exec(operation_id)).stdout == b"early\n"
    await node.exec(sandbox_id, ExecRequest(command="touch go"))
    await _alone(node, sandbox_id)
    return asked


async def _alone(node: Node, sandbox_id: str) -> None:
    async def nobody_else() -> bool:
        return not await node.processes(sandbox_id)

    await until_asked(nobody_else)


async def test_late_output_can_be_read_after_its_writer_ended(
    native_node: Node, spec: SandboxSpec
) -> None:
    """Whether anybody had read before, and whatever else left something running since."""
    sandbox = await native_node.create_sandbox(spec)
    before = _open_files()
    asked = await _leave_and_end(native_node, sandbox.id, 40, 1 << 20)
    for _ in range(2 * LINGERING_LOOK):
        await native_node.exec(sandbox.id, ExecRequest(command="sleep 0.01 & :", spool_bytes=8192))
        await _alone(native_node, sandbox.id)  # what still runs rightly holds its descriptors

    for operation_id in asked:
        chunk = await native_node.read_output(operation_id, "stdout", 0, 100)
        assert chunk.data == b"early\nlate\n"
    assert _open_files() - before <= 2 * (len(asked) + LINGERING_LOOK)  # one for each stream


async def test_late_output_that_is_dropped_is_refused(native_node: Node, spec: SandboxSpec) -> None:
    """A log without its end must not look whole."""
    sandbox = await native_node.create_sandbox(spec)
    (asked,) = await _leave_and_end(native_node, sandbox.id, 1, 1 << 20)
    await native_node._works.execs._outputs.settle(native_node._works.register.find(sandbox.id))
    await native_node.forget(asked)

    chunk = await native_node.read_output(asked, "stdout", 0, 100)
    assert (chunk.data, chunk.eof) == (b"early\n", False)
    with pytest.raises(OutputNotKeptError, match="bytes 6 to 11"):
        await native_node.read_output(asked, "stdout", 6, 100)
