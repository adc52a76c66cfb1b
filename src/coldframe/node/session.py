"""A shell that lives on between commands, with the true exit code of each.

The shell is one long exec that reads its script from an open stdin (`shellscript.py`) and reports
by its status pipe. What a command wrote is bounded by the totals that the runtime gives once the
status is there, when the pipes have been drained.

A program that took the shell's place (`exec`), or a shell that lost its status pipe, cannot
report: the command then ends with it, or at its deadline.
"""

from __future__ import annotations

import asyncio
import signal as signals
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from coldframe.host.outcome import Undertaking
from coldframe.node import shellscript
from coldframe.node.execs import Execs
from coldframe.node.operations import ExecOperation, never_ran
from coldframe.node.session_command import SessionCommand, heard
from coldframe.node.session_reports import Reports, stop
from coldframe.node.windows import Window
from coldframe.protocol.errors import (
    ColdframeError,
    Execution,
    OutputNotKeptError,
    SandboxGoneError,
    SandboxStateError,
    SessionEndedError,
)
from coldframe.protocol.following import between
from coldframe.protocol.models import (
    MIB,
    ExecResult,
    OutputChunk,
    Reason,
    SessionInfo,
    SignalScope,
    Stream,
)

START_DEADLINE_S = 5.0
"""How long a shell that runs may take to answer the first line; what takes longer is none."""

GRACE_S = 2.0
"""How long a shell may take to report after its command was killed at the deadline."""

KILL_S = 30.0
"""How long the kernel may take to end what was killed."""

SETTLE_S = 0.01
"""Output of longer commands is read while they run; 10 ms cannot overrun the spool."""


class Session:
    """One session. Its commands run one after another."""

    def __init__(self, execs: Execs, shell: ExecOperation, note: Callable[[Session], None]) -> None:
        """Take the operation that the shell is; `note` is called when what is to be kept changes.

        That is `kind`, `at`, `code` and `last`.
        """
        self._execs, self.shell, self._note = execs, shell, note
        self.id = shell.id
        self.kind = shellscript.POSIX
        self.at = (0, 0)
        """How much of stdout and stderr belongs to commands that have ended."""
        self.code = 0
        """Of the last command."""
        self.last: SessionCommand | None = None
        """The command that has begun last."""
        self.greeted: Undertaking[None] | None = None
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the shell has ended."""
        shell.ended.then(lambda _: self._end.set_result(None))
        self._turn = asyncio.Lock()
        self._reports = Reports(execs, shell.id, self._end)

    async def greet(self) -> None:
        """Wait until the shell answers.

        Raises:
            NotExecutedError and its kin: there is no such shell, directory or user.
            SessionEndedError: it did not answer within `START_DEADLINE_S`: no POSIX shell.
        """
        nonce = shellscript.new_nonce()
        answer, silence = None, "ended at once"
        with suppress(BrokenPipeError):
            await self._execs.write_stdin(self.id, shellscript.greeting(nonce))
            status = asyncio.ensure_future(self._reports.next(nonce))
            try:
                if await heard(status, at_most_s=START_DEADLINE_S):
                    answer = status.result()
                else:
                    silence = f"gave no answer within {START_DEADLINE_S:g} s"
            finally:
                await stop(status)
        if answer is None:
            await self.kill()
            self.shell.ended.result()
            shell = str((self.shell.request.argv or ("?",))[0])
            raise SessionEndedError(f"{shell} {silence}: is it a POSIX shell?")
        self.kind = shellscript.kind_of(answer[1])
        self._note(self)

    # --- looking ----------------------------------------------------------------------

    @property
    def ended(self) -> ExecResult | None:
        """How the shell ended, once it has.

        Raises:
            SpawnerLostError: nothing is known of its end.
        """
        return self.shell.ended.result() if self.shell.ended.done() else None

    def info(self) -> SessionInfo:
        """What the world may know of it."""
        last = self.last
        return SessionInfo(
            id=self.id,
            sandbox_id=self.shell.sandbox.id,
            shell=str((self.shell.request.argv or ("?",))[0]),
            started_at=self.shell.began_at,
            running=None if last is None or last.over.done() else last.operation.id,
            ended=self.ended,
        )

    def require_open(self) -> None:
        """Refuse what a shell that has ended cannot do.

        Raises:
            SessionEndedError: it has.
        """
        if (ended := self.ended) is not None:
            raise SessionEndedError(
                f"session {self.id!r}: its shell has ended ({ended.reason}, status "
                f"{ended.returncode})"
            )

    @property
    def due_at(self) -> float | None:
        """Unix seconds at which the command that runs is to end; None: none, or never."""
        last = self.last
        return None if last is None or last.over.done() else last.due_at

    def noted(self) -> dict[str, Any]:
        """Return what the next process needs to go on with it, as JSON values."""
        return {
            "kind": self.kind,
            "at": self.at,
            "code": self.code,
            "last": None if self.last is None else self.last.noted(),
        }

    # --- one command ------------------------------------------------------------------

    async def run(self, command: SessionCommand) -> ExecResult:
        """Run a command in its turn, or go on with one that another process had begun.

        Raises:
            SessionEndedError: the shell had ended before.
            SandboxGoneError: the sandbox ended, and nothing was heard of the command.
        """
        operation = command.operation
        asked = time.monotonic()
        try:
            async with self._turn:
                if not operation.dispatched:
                    self.require_open()
                    operation.sandbox.require_ready(operation.request.expected_version)
                    operation.queued_s = time.monotonic() - asked
                return await self._carry_out(command)
        except asyncio.CancelledError:
            if operation.cancelled:
                return never_ran(operation)
            if not operation.abandoned:
                raise
            raise SandboxGoneError(
                f"sandbox {operation.sandbox.id!r} ended before the command did",
                execution=Execution.UNKNOWN if operation.dispatched else Execution.NOT_EXECUTED,
            ) from None
        except ColdframeError:
            if operation.dispatched:
                # Where the shell stands in its script is not known: it cannot go on.
                await self.kill()
            raise

    async def _carry_out(self, command: SessionCommand) -> ExecResult:
        operation = command.operation
        adopted = operation.dispatched
        if not adopted:
            command.begin(self.at)
            self.last = command
            self._note(self)
        operation.running = command
        operation.started.set_result(None)
        reading: dict[Stream, int] = dict(zip(("stdout", "stderr"), command.began, strict=True))
        windows = {stream: Window(operation.request.window_bytes) for stream in reading}
        status = asyncio.ensure_future(self._answer(command, adopted=adopted))
        reader: asyncio.Task[None] | None = None
        try:
            killed = None
            if not await command.waits_for(status, SETTLE_S):
                reader = asyncio.ensure_future(self._follow(reading, windows))
                if not await command.waits_for(status):
                    killed = Reason.SIGNAL if command.stop.done() else Reason.DEADLINE
                    await self._give_up(status)
            answer = status.result()
        finally:
            await stop(status, reader)
        command.end(await self._totals(answer))
        for stream, end in zip(reading, command.ended, strict=True):
            async for chunk in between(self, self.id, stream, reading[stream], end):
                windows[stream].add(chunk)
        return self._done(command, answer, windows, killed)

    async def _answer(self, command: SessionCommand, *, adopted: bool) -> bytes | None:
        """Run a command and return what the shell reports; None once it has ended instead.

        `exec PROGRAM` takes the shell's place and runs on: its end is the command's.
        """
        script = shellscript.script(command.request, self.kind, command.nonce, self.code)
        try:
            if not adopted:
                await self._execs.write_stdin(self.id, script)
            elif not self._reports.over:
                # Whether the other process came to write it: an idle shell answers this at once,
                # a busy one reports the command first.
                probe = shellscript.new_nonce()
                await self._execs.write_stdin(self.id, shellscript.ask(probe))
                told = await self._reports.next_or_end(command.nonce, probe)
                if told is None or told[0] == command.nonce:
                    return None if told is None else told[1]
                await self._execs.write_stdin(self.id, script)
        except BrokenPipeError:
            pass  # it has ended; what it reported before can still be heard
        told = await self._reports.next_or_end(command.nonce)
        return None if told is None else told[1]

    async def read_output(
        self, operation_id: str, stream: Stream, cursor: int, max_bytes: int, wait: bool, /
    ) -> OutputChunk:
        """See `Readable`: what all commands of the session have written."""
        try:
            return await self._execs.read(operation_id, stream, cursor, max_bytes, wait)
        except OutputNotKeptError:
            return OutputChunk(stream=stream, offset=cursor, data=b"", eof=True)

    async def signal(self, signum: int) -> int:
        """Send a signal to what the shell runs; return how many processes it reached."""
        return await self._execs.signal(self.id, signum, SignalScope.CHILDREN)

    async def mark(self) -> tuple[int, int]:
        """Drain what is in the pipes; return how much all commands have written."""
        return await self._execs.mark(self.id)

    async def _follow(self, at: dict[Stream, int], windows: Mapping[Stream, Window]) -> None:
        async def follow(stream: Stream) -> None:
            while True:
                chunk = await self.read_output(self.id, stream, at[stream], MIB, True)
                at[stream] = chunk.next_cursor
                windows[stream].add(chunk)
                if chunk.eof:
                    return

        await asyncio.gather(*map(follow, windows))

    async def _give_up(self, status: asyncio.Task[bytes | None]) -> None:
        """Stop the command; end the shell too if it does not come back.

        Raises:
            SandboxStateError: it cannot be ended.
        """
        give_up = time.monotonic() + GRACE_S
        while not (self._reports.over or status.done()) and time.monotonic() < give_up:
            await self._execs.signal(self.id, shellscript.GIVE_UP_SIGNAL, SignalScope.LEADER)
            await self.signal(signals.SIGKILL)
            await asyncio.wait({status}, timeout=0.1)
        if not status.done():
            await self._execs.signal(self.id, signals.SIGKILL, SignalScope.TREE)
            await self._require_end(status)

    async def _totals(self, answer: bytes | None) -> tuple[int, int]:
        """Return where the output of a command that has just ended ends."""
        if answer is not None:
            return await self.mark()
        ended = self.shell.ended.result()
        return ended.out.total_bytes, ended.err.total_bytes

    def _done(
        self,
        command: SessionCommand,
        answer: bytes | None,
        windows: Mapping[Stream, Window],
        killed: Reason | None,
    ) -> ExecResult:
        self.at = command.ended
        code: int | None = None
        signal: int | None = None
        reason = Reason.EXIT
        if answer is not None:
            self.code = code = shellscript.code_of(answer)
            reason = command.reason(code)
        elif (ended := self.ended) is not None:
            code, signal, reason = ended.exit_code, ended.signal, ended.reason
        if killed is not None:
            code, signal, reason = None, int(signals.SIGKILL), killed
        result = command.conclude(
            reason=reason,
            exit_code=code,
            signal=signal,
            out=windows["stdout"].output(),
            err=windows["stderr"].output(),
        )
        self._note(self)
        return result

    # --- its end ----------------------------------------------------------------------

    async def close(self) -> None:
        """End the shell by end of file, after its last command. What these left running lives on.

        Raises:
            SandboxStateError: it does not end.
        """
        async with self._turn:
            if self.ended is not None:
                return
            await self._execs.close_stdin(self.id)
            if not await _ends(self._end, GRACE_S):
                await self._execs.signal(self.id, signals.SIGKILL, SignalScope.LEADER)
                await self._require_end(self._end)

    async def kill(self) -> None:
        """Kill the shell and everything that it started.

        Raises:
            SandboxStateError: it does not end.
        """
        await self._execs.cancel(self.id)
        await self._require_end(self._end)

    async def _require_end(self, task: asyncio.Future[Any]) -> None:
        """Wait for what ends with the shell, which has been killed."""
        if not await _ends(task, KILL_S):
            raise SandboxStateError(
                f"session {self.id!r}: its shell did not end within {KILL_S:g} s of its kill"
            )


async def _ends(task: asyncio.Future[Any], timeout_s: float) -> bool:
    await asyncio.wait({task}, timeout=timeout_s)
    return task.done()
