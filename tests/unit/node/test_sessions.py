"""Sessions as the node keeps them: noted for the next process, and ended with their sandbox."""

from __future__ import annotations

import asyncio
import json
import os
import time
from functools import partial
from pathlib import Path

import pytest

from coldframe.node import session as session_of_node
from coldframe.node import shellscript
from coldframe.node.node import Node
from coldframe.protocol import wire
from coldframe.protocol.errors import (
    CapacityError,
    Execution,
    InvalidRequestError,
    SandboxGoneError,
    SessionEndedError,
)
from coldframe.protocol.models import (
    ExecRequest,
    Reason,
    SessionExecRequest,
    SessionRequest,
)
from tests.fixtures.waiting import until, until_asked, wait_until
from tests.unit.node.conftest import SPEC


async def _runs(node: Node, session_id: str) -> bool:
    return (await node.sessions().get(session_id)).running == "runs"


def _left(node: Node, sandbox_id: str, session_id: str, request: ExecRequest) -> None:
    """Have a session anew from its note, with a command that was noted in the last moment."""
    sandbox = node._works.register.find(sandbox_id)
    note = sandbox.sessions.pop(session_id).noted()
    note["last"] = {
        "request": wire.dump(request).decode(),
        "result": None,
        "nonce": "s0123456789abcdef",
        "began": note["at"],
        "ooms_before": 0,
        "ended": (0, 0),
        "began_at": time.time(),
        "queued_s": 0.0,
        "trace_id": None,
    }
    node.sessions().go_on(session_id, json.dumps(note).encode())


async def test_session_command_that_was_noted_and_never_written_runs_then(node: Node) -> None:
    """Killed between the two, a service must neither lose the command nor wait for it for ever."""
    sandbox = await node.create_sandbox(SPEC)
    session = await node.sessions().create(sandbox.id, SessionRequest())
    await node.sessions().exec(session.id, SessionExecRequest(command="x=kept; echo before"))
    request = ExecRequest(command="echo $x >> ran; echo $x", operation_id="noted")
    _left(node, sandbox.id, session.id, request)

    result = await node.wait_exec("noted")

    assert (result.stdout, result.exit_code, result.request) == (b"kept\n", 0, request)
    counted = await node.sessions().exec(session.id, SessionExecRequest(command="cat ran"))
    assert counted.result.stdout == b"kept\n"


async def test_session_command_whose_shell_ended_meanwhile_ends_with_it(node: Node) -> None:
    """Nobody reports any more: what waits for the command must be told, and how."""
    sandbox = await node.create_sandbox(SPEC)
    session = await node.sessions().create(sandbox.id, SessionRequest())
    await node.sessions().close(session.id, kill=True)
    _left(node, sandbox.id, session.id, ExecRequest(command="true", operation_id="noted"))

    assert (await node.wait_exec("noted")).signal == 9


async def test_sessions_commands_end_with_their_sandbox(node: Node) -> None:
    """The one that runs is cut short; the one that waits never ran, and says so."""
    sandbox = await node.create_sandbox(SPEC)
    sessions = node.sessions()
    session = await sessions.create(sandbox.id, SessionRequest())
    asked = [
        SessionExecRequest(command="sleep 60", operation_id=name) for name in ("runs", "waits")
    ]
    running, waiting = (asyncio.ensure_future(sessions.exec(session.id, one)) for one in asked)
    await until_asked(partial(_runs, node, session.id))
    await node.delete(sandbox.id)

    assert (await running).result.reason is Reason.SANDBOX_GONE
    with pytest.raises(SandboxGoneError) as refused:
        await waiting
    assert refused.value.execution is Execution.NOT_EXECUTED
    with pytest.raises(SessionEndedError, match="sandbox_gone"):
        await sessions.exec(session.id, SessionExecRequest(command="true"))


async def test_session_takes_no_more_waiting_commands_than_it_can_hold(node: Node) -> None:
    """Each holds memory: who only asks must be refused in words."""
    sandbox = await node.create_sandbox(SPEC)
    sessions = node.sessions()
    session = await sessions.create(sandbox.id, SessionRequest())
    asked = SessionExecRequest(command="sleep 60")
    waiting = [asyncio.ensure_future(sessions.exec(session.id, asked)) for _ in range(258)]
    done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)

    assert all(isinstance(one.exception(), CapacityError) for one in done)
    await sessions.close(session.id, kill=True)
    ends = await asyncio.gather(*waiting, return_exceptions=True)
    assert sum(isinstance(one, SessionEndedError) for one in ends) >= 255


async def test_session_command_line_has_a_size_and_says_what_to_do(node: Node) -> None:
    """It is noted and quoted on the event loop: a large one would hold up everybody."""
    sandbox = await node.create_sandbox(SPEC)
    session = await node.sessions().create(sandbox.id, SessionRequest())
    most = "true " + "x" * (shellscript.MOST_BYTES - 5)
    assert (await node.sessions().exec(session.id, SessionExecRequest(command=most))).result.ok
    for request in (
        SessionExecRequest(command=most + "x"),
        SessionExecRequest(command="true", env={"A": most}),
    ):
        with pytest.raises(InvalidRequestError, match="write it to a file and source that"):
            await node.sessions().exec(session.id, request)


class _FakeOutliving:
    """Keeps what is noted of sessions."""

    def __init__(self) -> None:
        self.noted: list[tuple[str, bytes]] = []

    def note_exec(self, operation_id: str, more: bytes, due_at: float | None = None) -> None:
        del due_at
        self.noted.append((operation_id, more))


async def test_session_command_notes_its_own_session_alone(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ten sessions have run last must not be written with each command of one."""
    sandbox = await node.create_sandbox(SPEC)
    sessions = node.sessions()
    one = await sessions.create(sandbox.id, SessionRequest())
    large = await sessions.create(sandbox.id, SessionRequest())
    await sessions.exec(large.id, SessionExecRequest(command="true " + "x" * 100_000))
    outliving = _FakeOutliving()
    with monkeypatch.context() as patch:
        patch.setattr(node._works.legacy, "keeps", outliving)
        await sessions.exec(one.id, SessionExecRequest(command="true"))
    assert [session_id for session_id, _ in outliving.noted] == [one.id, one.id]
    assert all(len(note) < 4096 for _, note in outliving.noted)


async def test_session_command_has_no_stdin_and_no_terminal(node: Node) -> None:
    """It reads end of file: what is written to it must be refused, not lost."""
    sandbox = await node.create_sandbox(SPEC)
    session = await node.sessions().create(sandbox.id, SessionRequest())
    asked = SessionExecRequest(command="sleep 60", operation_id="runs")
    running = asyncio.ensure_future(node.sessions().exec(session.id, asked))
    await until_asked(partial(_runs, node, session.id))
    with pytest.raises(InvalidRequestError, match="no stdin"):
        await node.write_stdin("runs", b"x")
    with pytest.raises(InvalidRequestError, match="status"):
        await node.read_output("runs", "status")
    assert await node.mark("runs") == (0, 0)
    await node.cancel_exec("runs")
    assert (await running).result.reason is Reason.SIGNAL
    await node.sessions().close(session.id)


FORGE = """command() {
  if [ "$1" = printf ]; then /usr/bin/printf "$3 %s\\n" >&3; else "$@"; fi
}"""


@pytest.mark.parametrize("word", ["abc", "-1", "1_0", "", "9" * 5000])
async def test_report_that_is_no_exit_code_is_none(
    node: Node, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command has the shell's functions in its hand, and must not break the service by them."""
    monkeypatch.setattr(session_of_node, "GRACE_S", 0.1)
    sandbox = await node.create_sandbox(SPEC)
    session = await node.sessions().create(sandbox.id, SessionRequest())
    forging = SessionExecRequest(command=FORGE % word, deadline_s=0.2)
    result = (await node.sessions().exec(session.id, forging)).result
    assert (result.reason, result.exit_code) == (Reason.DEADLINE, None)


async def test_report_is_what_a_process_could_have_ended_with(node: Node) -> None:
    """dash lets a function return 300; so does nobody else."""
    sandbox = await node.create_sandbox(SPEC)
    session = await node.sessions().create(sandbox.id, SessionRequest())
    forging = SessionExecRequest(command=FORGE % "300")
    assert (await node.sessions().exec(session.id, forging)).result.exit_code == 44


async def test_cancelled_while_it_waits_for_its_turn_never_runs(node: Node) -> None:
    """To wait for the command before it, run, and then be killed is no cancelling."""
    sandbox = await node.create_sandbox(SPEC)
    session = await node.sessions().create(sandbox.id, SessionRequest())
    await node.sessions().exec(session.id, SessionExecRequest(command="mkfifo gate"))
    first = asyncio.ensure_future(
        node.sessions().exec(session.id, SessionExecRequest(command="cat gate"))
    )
    request = SessionExecRequest(command="touch ran", operation_id="second")
    second = asyncio.ensure_future(node.sessions().exec(session.id, request))
    await asyncio.sleep(0)  # both have asked

    await node.cancel_exec("second")
    await node.cancel_exec("second")
    result = (await second).result
    assert (result.reason, result.signal, result.duration_s) == (Reason.SIGNAL, 9, 0)
    assert (await node.sessions().exec(session.id, request)).result == result
    assert not first.done()

    await node.exec(sandbox.id, ExecRequest(command="echo open > gate"))
    assert (await first).result.ok
    after = await node.sessions().exec(session.id, SessionExecRequest(command="test -e ran"))
    assert after.result.exit_code == 1


async def test_deadline_before_the_shell_has_begun_leaves_it_alive(node: Node) -> None:
    """The shell is told to give up while it still runs nothing; that must not end it."""
    sandbox = await node.create_sandbox(SPEC)
    session = await node.sessions().create(sandbox.id, SessionRequest())
    for _ in range(30):
        late = SessionExecRequest(command="sleep 10", deadline_s=1e-6)
        told = await node.sessions().exec(session.id, late)
        assert (told.result.reason, told.ended) == (Reason.DEADLINE, None)
    assert (await node.sessions().exec(session.id, SessionExecRequest(command=":"))).result.ok


async def test_command_that_ended_while_the_node_stood_still_is_told_as_it_ended(
    node: Node, tmp_path: Path
) -> None:
    """A node that was stopped, or had no turn, finds the deadline over and the report unread."""
    sandbox = await node.create_sandbox(SPEC)
    session = await node.sessions().create(sandbox.id, SessionRequest())
    begun, gate, done = (tmp_path / name for name in ("begun", "gate", "done"))
    os.mkfifo(gate)
    command = f"touch {begun}; read line < {gate}; touch {done}; echo in time; (exit 3)"
    request = SessionExecRequest(command=command, deadline_s=1)
    asked = asyncio.ensure_future(node.sessions().exec(session.id, request))
    await until(begun.exists)
    over_at = time.monotonic() + 1.5

    with gate.open("w") as opened:  # from here on the loop has no turn
        opened.write("go\n")
    wait_until(done.exists)
    wait_until(lambda: time.monotonic() > over_at)

    result = (await asked).result
    assert (result.reason, result.exit_code, result.stdout) == (Reason.EXIT, 3, b"in time\n")
