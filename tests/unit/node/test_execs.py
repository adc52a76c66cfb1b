"""Commands run in their turn, are reached by their ids, and always end."""

from __future__ import annotations

import asyncio
import signal

import pytest

from coldframe.node.node import Node
from coldframe.protocol.errors import (
    CapacityError,
    Execution,
    InvalidRequestError,
    OperationExpiredError,
    OperationNotFoundError,
    ProgramNotFoundError,
    SandboxGoneError,
    SandboxStateError,
    StdinClosedError,
)
from coldframe.protocol.models import (
    ExecRequest,
    PtySize,
    Reason,
    SessionExecRequest,
    SessionRequest,
    SignalScope,
)
from coldframe.runtimes.fake import FakeRuntime, FakeSandbox
from tests.fixtures.runtime import open_descriptors
from tests.fixtures.waiting import until_asked
from tests.unit.node.conftest import SPEC, NodeMaker

# --- in turn --------------------------------------------------------------------------


async def test_exec_in_a_burst_waits_its_turn_and_says_how_long(make_node: NodeMaker) -> None:
    """A burst never piles up on the machine."""
    node = await make_node(exec_slots=1, exec_hold_s=60.0)
    sandbox = await node.create_sandbox(SPEC)

    results = await asyncio.gather(
        *(node.exec(sandbox.id, ExecRequest(command="echo x")) for _ in range(4))
    )

    queued = [result.queued_s for result in results]
    assert queued[0] == 0.0
    assert 0 < queued[1] < queued[2] < queued[3]


async def test_exec_that_runs_long_gives_its_slot_back(make_node: NodeMaker) -> None:
    """Background servers must not keep others from starting."""
    node = await make_node(exec_slots=1, exec_hold_s=0.01)
    sandbox = await node.create_sandbox(SPEC)

    await node.start_exec(sandbox.id, ExecRequest(command="sleep 60"))
    await node.start_exec(sandbox.id, ExecRequest(command="sleep 60"))

    assert (await node.exec(sandbox.id, ExecRequest(command="echo x"))).ok


async def test_exec_beyond_limits_is_refused(make_node: NodeMaker) -> None:
    """Running ones are bounded, and so are those that wait."""
    node = await make_node(exec_slots=1, exec_hold_s=60.0, queue_limit=1, max_running_execs=3)
    sandbox = await node.create_sandbox(SPEC)
    await node.start_exec(sandbox.id, ExecRequest(command="sleep 60"))
    waiting = asyncio.ensure_future(node.exec(sandbox.id, ExecRequest(command="echo x")))
    await asyncio.sleep(0.01)

    with pytest.raises(CapacityError, match="waiting"):
        await node.exec(sandbox.id, ExecRequest(command="echo y"))

    await node.delete(sandbox.id)
    with pytest.raises(SandboxGoneError):
        await waiting


# --- to the end -----------------------------------------------------------------------


async def test_exec_in_flight_at_delete_ends_as_sandbox_gone(node: Node) -> None:
    """With its output, for the one who waits and for the one who asks later."""
    sandbox = await node.create_sandbox(SPEC)
    request = ExecRequest(command="echo there; sleep 60", operation_id="op-1")
    running = asyncio.ensure_future(node.exec(sandbox.id, request))
    await until_asked(lambda: _has_output(node, "op-1"))

    await node.delete(sandbox.id)

    result = await running
    assert (result.reason, result.stdout) == (Reason.SANDBOX_GONE, b"there\n")
    assert await node.wait_exec("op-1") is result


async def _has_output(node: Node, operation_id: str) -> bool:
    try:
        return bool((await node.read_output(operation_id, wait=False)).data)
    except OperationNotFoundError:
        return False


async def test_exec_that_waits_when_its_sandbox_ends_was_not_executed(
    make_node: NodeMaker,
) -> None:
    """The three outcomes of a failure are told apart."""
    node = await make_node(exec_slots=1, exec_hold_s=60.0)
    sandbox = await node.create_sandbox(SPEC)
    await node.start_exec(sandbox.id, ExecRequest(command="sleep 60"))
    waiting = asyncio.ensure_future(node.exec(sandbox.id, ExecRequest(command="echo x")))
    await asyncio.sleep(0)

    await node.delete(sandbox.id)

    with pytest.raises(SandboxGoneError) as caught:
        await waiting
    assert caught.value.execution is Execution.NOT_EXECUTED


class _Silent(FakeSandbox):
    """Never reports the end of a command; one that is named `hold` it never even starts."""

    async def start_exec(self, request: ExecRequest, operation_id: str):
        running = await super().start_exec(request, operation_id)
        running.wait = asyncio.Event().wait  # type: ignore[method-assign, assignment]
        if request.operation_id == "hold":
            await asyncio.Event().wait()
        return running


async def test_exec_asked_in_the_moment_of_delete_ends_by_type(node: Node) -> None:
    """Its task has not taken its first step when the sandbox ends."""
    for steps in range(4):
        sandbox = await node.create_sandbox(SPEC)
        deleting = asyncio.ensure_future(node.delete(sandbox.id))
        for _ in range(steps):
            await asyncio.sleep(0)
        try:
            result = await node.exec(sandbox.id, ExecRequest(command="echo x"))
        except (SandboxGoneError, SandboxStateError) as error:
            assert error.execution is Execution.NOT_EXECUTED
        else:
            assert result.reason in {Reason.EXIT, Reason.SANDBOX_GONE}
        await deleting


async def test_exec_of_runtime_that_never_reports_ends_all_the_same(
    make_node: NodeMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A runtime's fault must not hang a rollout for ever."""
    monkeypatch.setattr("coldframe.node.execs._SETTLE_S", 0.05)
    runtime = FakeRuntime()
    runtime.sandbox_class = _Silent
    node = await make_node(runtime)
    sandbox = await node.create_sandbox(SPEC)
    operation = await node.start_exec(sandbox.id, ExecRequest(command="echo there; sleep 60"))
    await node.read_output(operation)
    held = ExecRequest(argv=("true",), operation_id="hold")
    starting = asyncio.ensure_future(node.exec(sandbox.id, held))
    await asyncio.sleep(0)

    await node.delete(sandbox.id)

    result = await node.wait_exec(operation)
    assert (result.reason, result.stdout) == (Reason.SANDBOX_GONE, b"there\n")
    with pytest.raises(SandboxGoneError) as caught:
        await starting
    assert caught.value.execution is Execution.UNKNOWN


# --- reading and control --------------------------------------------------------------


async def test_output_of_ended_exec_can_be_read_from_any_cursor(node: Node) -> None:
    """From the result when it holds all, from the spool when it does not."""
    sandbox = await node.create_sandbox(SPEC)
    small = await node.exec(sandbox.id, ExecRequest(command="printf 0123456789; printf e >&2"))
    large = await node.exec(sandbox.id, ExecRequest(command="seq 1 100000", window_bytes=100))

    chunk = await node.read_output(small.operation_id, "stdout", 3, 4)
    assert (chunk.offset, chunk.data, chunk.eof) == (3, b"3456", False)
    chunk = await node.read_output(small.operation_id, "stdout", 7, 100)
    assert (chunk.data, chunk.eof) == (b"789", True)
    assert (await node.read_output(small.operation_id, "stderr")).data == b"e"
    chunk = await node.read_output(large.operation_id, "stdout", 300_000, 7)
    assert len(chunk.data) == 7
    assert chunk.dropped_bytes == 0


async def test_background_exec_is_controlled_by_its_id(node: Node) -> None:
    """stdin, signals, marks and the terminal's size, from any connection."""
    sandbox = await node.create_sandbox(SPEC)
    cat = await node.start_exec(sandbox.id, ExecRequest(argv=("cat",), stdin_open=True))
    await node.write_stdin(cat, b"hello\n")
    assert (await node.read_output(cat)).data == b"hello\n"
    assert await node.mark(cat) == (6, 0)
    with pytest.raises(InvalidRequestError, match="terminal"):
        await node.resize(cat, 10, 10)
    assert await node.signal(cat, signal.SIGTERM, SignalScope.LEADER) == 1
    result = await node.wait_exec(cat)
    assert (result.reason, result.signal) == (Reason.SIGNAL, signal.SIGTERM)

    assert await node.signal(cat, signal.SIGTERM) == 0
    assert await node.mark(cat) == (6, 0)
    await node.close_stdin(cat)
    with pytest.raises(StdinClosedError) as closed:
        await node.write_stdin(cat, b"x")
    assert isinstance(closed.value, BrokenPipeError), "what Python calls it, too"

    terminal = await node.start_exec(
        sandbox.id, ExecRequest(command="read x; stty size", pty=PtySize(), stdin_open=True)
    )
    await node.resize(terminal, 40, 132)
    await node.write_stdin(terminal, b"\n")
    assert b"40 132" in (await node.wait_exec(terminal)).stdout


async def test_control_of_exec_in_ended_sandbox_says_that_it_ended(node: Node) -> None:
    """Its sandbox is gone, but the questions have answers."""
    sandbox = await node.create_sandbox(SPEC)
    command = "seq 1 100000; sleep 60 &"
    request = ExecRequest(command=command, window_bytes=100, stdin_open=True)
    result = await node.exec(sandbox.id, request)
    await node.delete(sandbox.id)

    assert await node.signal(result.operation_id, signal.SIGTERM, SignalScope.TREE) == 0
    assert await node.mark(result.operation_id) == (result.out.total_bytes, 0)
    assert len((await node.read_output(result.operation_id, "stdout", 1000, 77)).data) == 77
    await node.close_stdin(result.operation_id)
    with pytest.raises(StdinClosedError):
        await node.write_stdin(result.operation_id, b"x")
    await node.forget(result.operation_id)


async def test_leftovers_of_ended_exec_are_still_reached(node: Node) -> None:
    """Their output goes on, a signal finds them, and forget drops only output."""
    sandbox = await node.create_sandbox(SPEC)
    command = "(while [ ! -e go ]; do sleep 0.02; done; echo late; sleep 60) & echo early"
    result = await node.exec(sandbox.id, ExecRequest(command=command))
    assert len(result.leftovers) >= 1

    await node.exec(sandbox.id, ExecRequest(command=": > go"))

    assert (await node.read_output(result.operation_id, "stdout", 6)).data == b"late\n"
    await node.forget(result.operation_id)
    assert await node.processes(sandbox.id) != ()
    assert await node.signal(result.operation_id, signal.SIGKILL, SignalScope.TREE) >= 1


async def test_read_of_exec_that_failed_to_start_raises_why(node: Node) -> None:
    """Not an empty stream, which would look like a command that printed nothing."""
    sandbox = await node.create_sandbox(SPEC)
    request = ExecRequest(argv=("no-such",), operation_id="op-1")
    with pytest.raises(ProgramNotFoundError):
        await node.start_exec(sandbox.id, request)

    with pytest.raises(ProgramNotFoundError):
        await node.read_output("op-1")
    with pytest.raises(ProgramNotFoundError):
        await node.write_stdin("op-1", b"x")


async def test_unknown_operation_is_said(node: Node) -> None:
    """By type, for every call."""
    for call in (
        node.wait_exec("op-no"),
        node.read_output("op-no"),
        node.signal("op-no", 9),
        node.mark("op-no"),
        node.forget("op-no"),
        node.write_stdin("op-no", b""),
        node.close_stdin("op-no"),
        node.resize("op-no", 1, 1),
    ):
        with pytest.raises(OperationNotFoundError, match="op-no"):
            await call


async def test_execs_leave_no_descriptors_behind(node: Node) -> None:
    """A descriptor per command would end the node after some thousands."""
    sandbox = await node.create_sandbox(SPEC)
    request = ExecRequest(command="echo x; sleep 60 & echo y >&2", stdin=b"in")

    async def round_trip() -> int:
        for _ in range(5):
            await node.exec(sandbox.id, request)
            await node.kill_processes(sandbox.id)
        return len(open_descriptors())

    await round_trip()
    before = await round_trip()
    terminal = ExecRequest(command="sleep 60 &", pty=PtySize(), stdin_open=True)
    await node.exec(sandbox.id, terminal)
    await node.exec(sandbox.id, request.model_copy(update={"stdin_open": True}))

    async def back_to_before() -> bool:
        return await round_trip() <= before

    await until_asked(back_to_before)


async def test_requests_that_are_kept_count_by_what_they_hold(make_node: NodeMaker) -> None:
    """Any number of refused commands of 30 MiB must not be kept for an hour."""
    node = await make_node(result_bytes=3 << 20)
    sandbox = (await node.create_sandbox(SPEC)).id
    for number in range(3):
        large = ExecRequest(
            argv=("/no/such",), env={"X": "x" * (1 << 20)}, operation_id=f"large{number}"
        )
        with pytest.raises(ProgramNotFoundError):
            await node.exec(sandbox, large)
    with pytest.raises(OperationExpiredError):
        await node.wait_exec("large0")
    with pytest.raises(ProgramNotFoundError):
        await node.wait_exec("large2")


async def test_command_that_is_cancelled_before_its_turn_never_runs(make_node: NodeMaker) -> None:
    """Who gives up a thousand waiting commands must not have to see each of them begin."""
    node = await make_node(exec_slots=1, exec_hold_s=60)
    sandbox = (await node.create_sandbox(SPEC)).id
    await node.exec(sandbox, ExecRequest(command="mkfifo gate"))
    first = await node.start_exec(sandbox, ExecRequest(command="cat gate"))
    request = ExecRequest(command="touch ran", operation_id="second")
    second = asyncio.ensure_future(node.exec(sandbox, request))
    await asyncio.sleep(0)  # it has asked
    assert node.load().waiting["commands"] == 1

    await node.cancel_exec("second")
    result = await second
    assert (result.reason, result.signal) == (Reason.SIGNAL, 9)
    assert node.load().waiting["commands"] == 0
    assert await node.exec(sandbox, request) == result
    await node.cancel_exec(first)
    assert not (await node.exec(sandbox, ExecRequest(command="test -e ran"))).ok


async def test_windows_of_one_owner_are_bounded_while_they_may_fill(make_node: NodeMaker) -> None:
    """A command of no output costs nothing to ask for: a thousand must not promise 128 GiB."""
    node = await make_node(owner_window_bytes=8 << 20)
    amber, blue = [
        (await node.create_sandbox(SPEC.model_copy(update={"labels": {"owner": owner}}))).id
        for owner in ("amber", "blue")
    ]
    large = ExecRequest(command="cat gate", window_bytes=4 << 20)
    await node.exec(amber, ExecRequest(command="mkfifo gate"))
    operation = await node.start_exec(amber, large)

    with pytest.raises(CapacityError, match="'amber' hold 8388608 bytes"):
        await node.exec(amber, large)
    assert (await node.exec(amber, ExecRequest(command="echo usual"))).text == "usual\n"
    session = await node.sessions().create(amber, SessionRequest())
    with pytest.raises(CapacityError):
        asked = SessionExecRequest(command="true", window_bytes=4 << 20)
        await node.sessions().exec(session.id, asked)
    assert (await node.exec(blue, ExecRequest(command="echo b", window_bytes=4 << 20))).ok

    with pytest.raises(CapacityError):
        await node.exec(amber, ExecRequest(command="cat", stdin=bytes(2 << 20)))

    await node.exec(amber, ExecRequest(command="echo open > gate"))
    await node.wait_exec(operation)
    assert (await node.exec(amber, ExecRequest(command="cat", stdin=bytes(2 << 20)))).ok
    assert (await node.exec(amber, ExecRequest(command="echo a", window_bytes=4 << 20))).ok


async def test_commands_of_one_owner_leave_room_for_others(make_node: NodeMaker) -> None:
    """Else one key that starts commands which never end shuts out every other."""
    node = await make_node(max_running_execs=8)
    amber, blue = [
        (await node.create_sandbox(SPEC.model_copy(update={"labels": {"owner": owner}}))).id
        for owner in ("amber", "blue")
    ]
    await node.exec(amber, ExecRequest(command="mkfifo gate"))
    waiting = ExecRequest(command="cat gate")
    started = [await node.start_exec(amber, waiting) for _ in range(4)]
    session = await node.sessions().create(amber, SessionRequest())
    asked = SessionExecRequest(command="cat gate")
    asking = asyncio.ensure_future(node.sessions().exec(session.id, asked))
    await asyncio.sleep(0)  # it has asked

    assert node.load().running == 6
    with pytest.raises(CapacityError, match="'amber' runs 6 commands"):
        await node.exec(amber, waiting)
    with pytest.raises(CapacityError, match="'amber' runs 6 commands"):
        await node.sessions().exec(session.id, asked)
    assert (await node.exec(blue, ExecRequest(command="echo b"))).text == "b\n"

    await node.cancel_exec(started[0])
    await node.wait_exec(started[0])
    assert (await node.exec(amber, ExecRequest(command="echo a"))).text == "a\n"
    await node.delete(amber)
    await asyncio.wait([asking])
    assert node.load().running == 0


async def test_requests_of_one_owner_are_bounded_while_they_run(make_node: NodeMaker) -> None:
    """Thousands of waiting commands of just under a MiB each would be the node's memory."""
    node = await make_node(owner_window_bytes=4 << 20)
    labels = {"labels": {"owner": "amber"}}
    amber = (await node.create_sandbox(SPEC.model_copy(update=labels))).id
    await node.exec(amber, ExecRequest(command="mkfifo gate"))
    large = ExecRequest(command="cat gate", stdin=bytes(900 << 10))
    for _ in range(4):
        await node.start_exec(amber, large)
    with pytest.raises(CapacityError, match="'amber' hold"):
        await node.start_exec(amber, large)
