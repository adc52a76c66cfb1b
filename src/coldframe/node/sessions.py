"""All sessions of a node: shells that live on, known by the operation ids of these.

A command of a session is an operation like any other: it runs once, and whoever lost its answer
asks again. So that this holds for the process that comes next too, with each shell goes a note of
the command that it began last; ids of older ones are refused there.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

from coldframe.host.outcome import Outcome, Undertaking
from coldframe.node import shellscript
from coldframe.node.execs import Execs
from coldframe.node.legacy import Legacy
from coldframe.node.life import Sandbox
from coldframe.node.operations import ExecOperation, Operations, mismatch
from coldframe.node.session import Session
from coldframe.node.session_command import SessionCommand
from coldframe.node.windows import Window
from coldframe.protocol import wire
from coldframe.protocol.errors import (
    CapacityError,
    InvalidRequestError,
    OperationNotFoundError,
)
from coldframe.protocol.following import between
from coldframe.protocol.ids import check_operation_id, new_operation_id
from coldframe.protocol.models import (
    ExecRequest,
    ExecResult,
    Output,
    SessionExecRequest,
    SessionInfo,
    SessionRequest,
    SessionResult,
    Stream,
)
from coldframe.protocol.text import excerpt

_MOST_WAITING = 256
"""Commands of one session that wait for their turn."""
_MOST_ENDED = 64
"""Sessions of one sandbox whose shell has ended that can still be asked for; the newest."""


class Sessions:
    """See the module. Methods that name a session may also raise what `Node` says of ids."""

    def __init__(
        self,
        find: Callable[[str], Sandbox],
        execs: Execs,
        operations: Operations,
        legacy: Legacy,
    ) -> None:
        self._find_sandbox, self._execs = find, execs
        self._operations, self._legacy = operations, legacy

    async def create(self, id_or_name: str, request: SessionRequest) -> SessionInfo:
        """Start a shell and wait until it answers. The same id again gives the same session.

        Raises:
            NotExecutedError and its kin: there is no such shell, directory or user.
            SessionEndedError: it is no POSIX shell.
            CapacityError, OperationMismatchError, OperationExpiredError: see `Node.exec`.
        """
        sandbox = self._find_sandbox(id_or_name)
        shell = self._execs.begin(sandbox, _shell_request(request))
        await self._execs.until_started(shell)
        session = sandbox.sessions.get(shell.id) or self._add(shell)
        if session.greeted is None:
            session.greeted = Undertaking(session.greet())
            session.greeted.then(partial(self._on_greeted, session))
        await session.greeted
        return session.info()

    def _add(self, shell: ExecOperation) -> Session:
        sandbox = shell.sandbox
        session = Session(self._execs, shell, self._legacy.note_session)
        sandbox.sessions[session.id] = session
        ended = [one.id for one in sandbox.sessions.values() if one.shell.ended.done()]
        for session_id in ended[:-_MOST_ENDED]:
            del sandbox.sessions[session_id]
        return session

    @staticmethod
    def _on_greeted(session: Session, greeted: Outcome[None]) -> None:
        if greeted.exception() is not None:
            session.shell.sandbox.sessions.pop(session.id, None)

    async def list(self, id_or_name: str) -> tuple[SessionInfo, ...]:
        """Return the sessions of a sandbox whose shell lives, oldest first."""
        known = self._find_sandbox(id_or_name).sessions.values()
        return tuple(one.info() for one in known if not one.shell.ended.done())

    async def get(self, session_id: str) -> SessionInfo:
        """Return what is known of a session, also when its shell has ended."""
        return self._find(session_id).info()

    def _find(self, session_id: str) -> Session:
        try:
            session = self._operations.get(session_id).sandbox.sessions.get(session_id)
        except OperationNotFoundError:
            session = None
        if session is None:
            raise OperationNotFoundError(f"no session has the id {excerpt(session_id)}")
        return session

    async def exec(self, session_id: str, asked: SessionExecRequest) -> SessionResult:
        """Run one command line in its turn; it goes on when the caller is cancelled.

        Raises:
            SessionEndedError: the shell had ended before.
            InvalidRequestError: a NUL in the command, a name that no shell variable can have, or
                a command line of more than 1 MiB.
            CapacityError: too many wait for their turn.
            OperationMismatchError, OperationExpiredError: see `Operations`.
        """
        session = self._find(session_id)
        operation = self._begin(session, asked)
        result = await operation.ended
        return SessionResult(result=result, ended=session.ended)

    def _begin(self, session: Session, asked: SessionExecRequest) -> ExecOperation:
        sandbox = session.shell.sandbox
        request = ExecRequest(
            command=asked.command,
            shell=session.info().shell,
            env={**asked.env},
            deadline_s=asked.deadline_s,
            window_bytes=asked.window_bytes,
            operation_id=check_operation_id(asked.operation_id or new_operation_id()),
        )
        known = self._operations.find_exec(sandbox, request)
        if known is not None:
            if isinstance(known.running, SessionCommand) and known.running.session is not session:
                raise mismatch(known.id)
            return known
        shellscript.parts(request)  # what cannot be run is refused now
        session.require_open()
        waiting = sum(1 for one in sandbox.execs.values() if not one.dispatched)
        if waiting >= _MOST_WAITING:
            raise CapacityError(f"{waiting} commands are waiting in sandbox {sandbox.id!r} already")
        assert request.operation_id is not None
        operation = ExecOperation(request.operation_id, sandbox, request)
        self._execs.hold(operation)
        before = session.last
        if before is not None and self._legacy.keeps is not None:
            self._operations.refuse(before.operation.id, sandbox.owner)  # by the next process
        self._undertake(session, operation, SessionCommand(session, operation))
        return operation

    def _undertake(
        self, session: Session, operation: ExecOperation, command: SessionCommand
    ) -> None:
        operation.sandbox.execs[operation.id] = operation
        self._follow(operation, Undertaking(session.run(command), at_once=True))

    def _follow(self, operation: ExecOperation, ended: Undertaking[ExecResult]) -> None:
        self._operations.add(operation)
        operation.ended, operation.task = ended, ended.task
        ended.then(partial(self._on_end, operation))

    def _on_end(self, operation: ExecOperation, ended: Outcome[ExecResult]) -> None:
        operation.sandbox.execs.pop(operation.id, None)
        operation.ended, operation.task = ended.settled(), None
        self._execs.let_go(operation)
        if not operation.started.done():
            operation.started.set_result(None)
        if operation.dispatched or operation.cancelled:
            self._operations.settle(operation, ended)
        else:
            self._operations.drop(operation)

    async def close(self, session_id: str, *, kill: bool = False) -> SessionInfo:
        """End a shell; with `kill` and all that it started, at once. Twice is fine.

        Raises:
            SandboxStateError: it does not end.
        """
        session = self._find(session_id)
        await (session.kill() if kill else session.close())
        return session.info()

    # --- from and to another process --------------------------------------------------

    def go_on(self, session_id: str, note: bytes) -> None:
        """Have a session that another process has left, whose shell is gone on with already."""
        told = json.loads(note)
        session = self._add(self._operations.get(session_id))
        session.greeted = Undertaking(_nothing())
        session.kind, session.at = told["kind"], tuple(told["at"])
        session.code = told["code"]
        if told["last"] is not None:
            self._go_on_with(session, told["last"])

    def _go_on_with(self, session: Session, told: dict[str, Any]) -> None:
        result = None
        if told["result"] is not None:
            result = wire.load(ExecResult, told["result"].encode())
        request = (
            wire.load(ExecRequest, told["request"].encode()) if result is None else (result.request)
        )
        assert request.operation_id is not None
        operation = ExecOperation(request.operation_id, session.shell.sandbox, request)
        operation.began_at = told["began_at"]
        operation.queued_s, operation.trace_id = told["queued_s"], told["trace_id"]
        command = SessionCommand(session, operation, adopted=True)
        command.go_on(told)
        session.last = command
        if result is None:
            self._undertake(session, operation, command)
            return
        operation.ended_unix = result.ended_at
        operation.running = command
        operation.started.set_result(None)
        command.end(tuple(told["ended"]))
        command.result = result
        self._follow(operation, Undertaking(_read_again(session, command, result)))


async def _read_again(session: Session, command: SessionCommand, said: ExecResult) -> ExecResult:
    """Return a result with the output that its window had."""
    outputs: list[Output] = []
    pieces: tuple[tuple[Stream, Output], ...] = (("stdout", said.out), ("stderr", said.err))
    for (stream, output), begin, end in zip(pieces, command.began, command.ended, strict=True):
        window = Window(command.request.window_bytes)
        async for chunk in between(session, session.id, stream, begin, end):
            window.add(chunk)
        again = window.output()
        outputs.append(output.model_copy(update={"head": again.head, "tail": again.tail}))
    return said.model_copy(update={"out": outputs[0], "err": outputs[1]})


async def _nothing() -> None:
    pass


def _shell_request(request: SessionRequest) -> ExecRequest:
    if not request.shell:
        raise InvalidRequestError("shell: name a program of the sandbox's")
    return ExecRequest(
        argv=(request.shell,),
        stdin_open=True,
        env=request.env,
        cwd=request.cwd,
        user=request.user,
        deadline_s=None,
        window_bytes=0,
        spool_bytes=request.spool_bytes,
        status_pipe=True,
        operation_id=request.operation_id,
    )
