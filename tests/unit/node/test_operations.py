"""What is asked under one operation id runs once, and how long its answer is kept."""

from __future__ import annotations

import asyncio

import pytest

from coldframe.node.effects import Reply
from coldframe.node.node import Node
from coldframe.protocol.errors import (
    InvalidRequestError,
    OperationExpiredError,
    OperationMismatchError,
    OperationNotFoundError,
    ProgramNotFoundError,
    StorageFullError,
)
from coldframe.protocol.models import (
    ExecRequest,
)
from coldframe.runtimes.fake import FakeSandbox
from tests.fixtures.waiting import until_asked
from tests.unit.node.conftest import SPEC, HeldRuntime, NodeMaker

# `echo x >> ran` leaves a trace of every run.
TRACE = "echo x >> ran; echo out"


async def runs(node: Node, sandbox_id: str) -> int:
    """How often TRACE was run."""
    result = await node.exec(sandbox_id, ExecRequest(command="cat ran 2>/dev/null | wc -l"))
    return int(result.text)


async def test_exec_with_same_id_runs_once(node: Node) -> None:
    """A retry returns the first result."""
    sandbox = await node.create_sandbox(SPEC)
    request = ExecRequest(command=TRACE, operation_id="op-1")

    first = await node.exec(sandbox.id, request)
    again = await node.exec(sandbox.id, request)

    assert again is first
    assert await runs(node, sandbox.id) == 1


async def test_exec_with_same_id_at_the_same_time_runs_once(node: Node) -> None:
    """A retry that is sent while the first still runs waits for it."""
    sandbox = await node.create_sandbox(SPEC)
    request = ExecRequest(command=TRACE, operation_id="op-1")

    results = await asyncio.gather(*(node.exec(sandbox.id, request) for _ in range(5)))

    assert len({id(result) for result in results}) == 1
    assert await runs(node, sandbox.id) == 1


async def test_exec_whose_answer_was_lost_is_not_run_again(
    make_node: NodeMaker, held: HeldRuntime
) -> None:
    """The caller was cancelled in the middle; the command went on."""
    node = await make_node(held)
    sandbox = await node.create_sandbox(SPEC)
    request = ExecRequest(command=TRACE, operation_id="op-1")
    held.gate.clear()
    lost = asyncio.ensure_future(node.exec(sandbox.id, request))
    await until_asked(lambda: _started(held, 1))

    lost.cancel()
    await asyncio.wait([lost])
    held.gate.set()
    result = await node.exec(sandbox.id, request)

    assert result.stdout == b"out\n"
    assert await runs(node, sandbox.id) == 1


async def _started(held: HeldRuntime, number: int) -> bool:
    return held.starts == number


async def test_exec_result_outlives_its_sandbox(node: Node) -> None:
    """The answer was lost, and the sandbox was deleted since."""
    sandbox = await node.create_sandbox(SPEC)
    request = ExecRequest(command="echo out", operation_id="op-1")
    first = await node.exec(sandbox.id, request)
    await node.delete(sandbox.id)

    assert await node.exec(sandbox.id, request) is first
    assert await node.wait_exec("op-1") is first


async def test_exec_with_used_id_and_other_request_is_refused(node: Node) -> None:
    """Two requests under one id are a fault of the caller's that must not pass."""
    sandbox = await node.create_sandbox(SPEC)
    other = await node.create_sandbox(SPEC)
    request = ExecRequest(command="echo one", operation_id="op-1")
    await node.exec(sandbox.id, request)

    with pytest.raises(OperationMismatchError, match="op-1"):
        await node.exec(sandbox.id, ExecRequest(command="echo two", operation_id="op-1"))
    with pytest.raises(OperationMismatchError):
        await node.exec(other.id, request)
    with pytest.raises(OperationMismatchError):
        await node.create_sandbox(SPEC, operation_id="op-1")


async def test_exec_replayed_after_a_transition_ignores_the_expected_version(node: Node) -> None:
    """It ran at the version that it expected; that is the answer."""
    sandbox = await node.create_sandbox(SPEC)
    request = ExecRequest(command="echo x", operation_id="op-1", expected_version=3)
    first = await node.exec(sandbox.id, request)

    again = request.model_copy(update={"expected_version": 99})

    assert await node.exec(sandbox.id, again) is first


async def test_exec_that_was_not_executed_answers_the_same_again(node: Node) -> None:
    """The first answer holds, also when it is an error."""
    sandbox = await node.create_sandbox(SPEC)
    request = ExecRequest(argv=("./later",), operation_id="op-1")

    with pytest.raises(ProgramNotFoundError):
        await node.exec(sandbox.id, request)
    await node.exec(sandbox.id, ExecRequest(command="echo '#!/bin/sh' > later; chmod +x later"))

    with pytest.raises(ProgramNotFoundError):
        await node.exec(sandbox.id, request)


async def test_exec_refused_before_it_ran_may_be_asked_again(
    make_node: NodeMaker, held: HeldRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk or a full queue is no answer to keep: nothing ran."""
    node = await make_node(held)
    sandbox = await node.create_sandbox(SPEC)
    request = ExecRequest(command="echo x", operation_id="op-1")

    async def full(self: FakeSandbox, request: ExecRequest, operation_id: str) -> None:
        raise StorageFullError("no space for the spool")

    with monkeypatch.context() as patch:
        patch.setattr(held.sandbox_class, "start_exec", full)
        with pytest.raises(StorageFullError):
            await node.exec(sandbox.id, request)

    assert (await node.exec(sandbox.id, request)).stdout == b"x\n"


async def test_exec_id_that_is_too_old_is_refused_and_not_run(make_node: NodeMaker) -> None:
    """Running it again would be worse than no answer."""
    node = await make_node(result_count=2)
    sandbox = await node.create_sandbox(SPEC)
    requests = [ExecRequest(command=TRACE, operation_id=f"op-{n}") for n in range(4)]
    for request in requests:
        await node.exec(sandbox.id, request)

    with pytest.raises(OperationExpiredError, match="op-0"):
        await node.exec(sandbox.id, requests[0])
    with pytest.raises(OperationExpiredError):
        await node.wait_exec("op-1")

    assert await runs(node, sandbox.id) == 4


async def test_exec_results_expire_by_time(make_node: NodeMaker) -> None:
    """They are kept for a stated time."""
    node = await make_node(result_ttl_s=0.01)
    sandbox = await node.create_sandbox(SPEC)
    request = ExecRequest(command="echo x", operation_id="op-1")
    await node.exec(sandbox.id, request)

    async def refused() -> bool:
        try:
            await node.wait_exec("op-1")
        except OperationExpiredError:
            return True
        return False

    await until_asked(refused)
    with pytest.raises(OperationExpiredError):
        await node.exec(sandbox.id, request)


async def test_exec_results_are_bounded_by_bytes(make_node: NodeMaker) -> None:
    """Twenty thousand windows of a MiB would be the node's death."""
    node = await make_node(result_bytes=300_000)
    sandbox = await node.create_sandbox(SPEC)
    for n in range(3):
        command = "head -c 120000 /dev/zero"
        await node.exec(sandbox.id, ExecRequest(command=command, operation_id=f"op-{n}"))

    with pytest.raises(OperationExpiredError):
        await node.wait_exec("op-0")
    assert (await node.wait_exec("op-2")).out.total_bytes == 120_000


@pytest.mark.parametrize("bound", [{"result_count": 6}, {"result_bytes": 100_000}])
async def test_results_of_one_owner_push_out_nobody_elses(
    make_node: NodeMaker, bound: dict[str, int]
) -> None:
    """Whoever lost an answer and asks again must get it, however much others run meanwhile."""
    node = await make_node(**bound)
    amber, blue = [
        await node.create_sandbox(
            SPEC.model_copy(update={"labels": {"owner": owner}}), operation_id=f"{owner}-create"
        )
        for owner in ("amber", "blue")
    ]
    request = ExecRequest(command=TRACE, operation_id="amber-0")
    first = await node.exec(amber.id, request)
    for n in range(20):
        command = "head -c 10000 /dev/zero"
        await node.exec(blue.id, ExecRequest(command=command, operation_id=f"blue-{n}"))

    assert await node.exec(amber.id, request) == first
    assert (await node.create_sandbox(amber.spec, operation_id="amber-create")).id == amber.id
    assert await runs(node, amber.id) == 1
    with pytest.raises(OperationExpiredError):
        await node.wait_exec("blue-10")
    assert (await node.wait_exec("blue-19")).out.total_bytes == 10_000


async def test_expired_ids_are_remembered_up_to_the_bound(make_node: NodeMaker) -> None:
    """The bound is stated: the id that falls out of it is unknown again."""
    node = await make_node(result_count=1, expired_ids=2)
    sandbox = await node.create_sandbox(SPEC)
    for n in range(5):
        await node.exec(sandbox.id, ExecRequest(command="true", operation_id=f"op-{n}"))

    with pytest.raises(OperationNotFoundError):
        await node.wait_exec("op-0")
    with pytest.raises(OperationExpiredError):
        await node.wait_exec("op-3")


async def test_flood_of_one_owner_lets_nobody_elses_operation_run_again(
    make_node: NodeMaker,
) -> None:
    """Ids are fairly shared too: a result may be lost, a second execution never comes of it."""
    node = await make_node(result_ttl_s=0.01, expired_ids=8)
    amber, blue = [
        await node.create_sandbox(SPEC.model_copy(update={"labels": {"owner": owner}}))
        for owner in ("amber", "blue")
    ]
    request = ExecRequest(command=TRACE, operation_id="amber-0")
    await node.exec(amber.id, request)
    for n in range(20):
        await node.exec(blue.id, ExecRequest(command="true", operation_id=f"blue-{n}"))

    with pytest.raises(OperationExpiredError):
        await node.exec(amber.id, request)
    assert await runs(node, amber.id) == 1


async def test_flood_of_changes_lets_no_command_of_their_owner_run_again(
    make_node: NodeMaker,
) -> None:
    """A program that is fed line by line makes thousands of changes for each command."""
    node = await make_node(result_ttl_s=0.01, expired_ids=8)
    labels = {"labels": {"owner": "amber"}}
    sandbox = await node.create_sandbox(SPEC.model_copy(update=labels))
    request = ExecRequest(command=TRACE, operation_id="command")
    await node.exec(sandbox.id, request)

    async def change() -> Reply:
        return Reply(204, None, b"")

    for n in range(30):
        await node.once(f"change-{n}", "stdin", "amber", change)
        await asyncio.sleep(0.002)  # so that they end one after the other

    with pytest.raises(OperationExpiredError):
        await node.exec(sandbox.id, request)
    assert await runs(node, sandbox.id) == 1


async def test_create_with_same_id_makes_one_sandbox(
    make_node: NodeMaker, held: HeldRuntime
) -> None:
    """Also when the first caller was cancelled: with an id the create goes on."""
    node = await make_node(held)
    held.gate.clear()
    lost = asyncio.ensure_future(node.create_sandbox(SPEC, operation_id="op-1"))
    await until_asked(lambda: _created(held, 1))
    lost.cancel()
    await asyncio.wait([lost])
    held.gate.set()

    first = await node.create_sandbox(SPEC, operation_id="op-1")
    again = await node.create_sandbox(SPEC, operation_id="op-1")

    assert first is again
    assert held.creates == 1
    with pytest.raises(OperationMismatchError):
        await node.create_sandbox(SPEC.model_copy(update={"cpu": 1.0}), operation_id="op-1")


async def _created(held: HeldRuntime, number: int) -> bool:
    return held.creates == number


@pytest.mark.parametrize("operation_id", ["", "a b", "-x", "x" * 129, "a\n"])
async def test_operation_id_of_bad_form_is_refused(node: Node, operation_id: str) -> None:
    """It goes into paths, logs and URLs."""
    sandbox = await node.create_sandbox(SPEC)

    with pytest.raises(InvalidRequestError, match="operation id"):
        await node.exec(sandbox.id, ExecRequest(argv=("true",), operation_id=operation_id))
