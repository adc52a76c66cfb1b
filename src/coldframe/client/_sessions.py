r"""A shell that lives on between commands, with the true exit code of each.

The shell is one long exec that reads its script from an open stdin. Each command goes in as
`command eval '<quoted>'`, followed by a line that writes `$?` to the status pipe: descriptor 3,
which is closed for the command itself. No prompt is scraped and nothing is put into the output;
what a command wrote is bounded by the totals that the node gives once the status is there, when
the pipes have been drained.

A program that took the shell's place (`exec`), or a shell that lost its status pipe, cannot
report: the command then ends with it, or at its deadline.

`command` keeps POSIX shells alive on syntax errors. At a deadline a trap makes the shell give up
the rest of the command line before its children are killed: in dash and busybox by an expansion
error, which `command` catches; in bash by `return` from a script that is read from descriptor 9
(inside a function that would return from the function alone, so there the shell exits).
"""

from __future__ import annotations

import asyncio
import re
import secrets
import signal as signals
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from coldframe.client._core import kill_quietly
from coldframe.client._requests import checked, exec_request
from coldframe.client._windows import Window
from coldframe.protocol.errors import InvalidRequestError, SandboxStateError, SessionEndedError
from coldframe.protocol.following import between
from coldframe.protocol.models import (
    MIB,
    ExecRequest,
    ExecResult,
    Output,
    OutputChunk,
    Reason,
    SignalScope,
    Stream,
)
from coldframe.protocol.text import encoded

if TYPE_CHECKING:
    from coldframe.client._core import ClientCore
    from coldframe.client._link import NodeLink

START_DEADLINE_S = 5.0
"""How long a shell that runs may take to answer the first line; what takes longer is none."""

GRACE_S = 2.0
"""How long a shell may take to report after its command was killed at the deadline."""

KILL_S = 30.0
"""How long the kernel may take to end what was killed."""

SETTLE_S = 0.01
"""Output of longer commands is read while they run; 10 ms cannot overrun the spool."""

GIVE_UP_SIGNAL = 50
"""A real-time signal, so that a command's own traps are not in the way."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Nothing here opens a path that the sandbox could have replaced, /dev/null least of all: it would
# stand in every command's way. End of file is an empty here-document, where bash opens /dev/null
# itself and gets one that has been read already. Traces (set -x) go where only the host reads.
_READY = b"""{ \\command printf '%s %s %s\\n' NONCE 0 "${BASH_VERSION:+bash}" >&3; } 2>&3\n"""
_TRAP = {
    b"bash": b"trap 'if [ \"${#FUNCNAME[@]}\" -gt 1 ]; then exit 137; else return 137; fi' 50\n",
    b"": b"trap '{ : \"${coldframe_deadline:?}\"; } 2>&-' 50\n",
}
_REPORT = b"""{ \\command printf '%s %s\\n' NONCE "$?" >&3; } 2>&3\n"""
_EVAL = {
    b"bash": b"{ { \\command read -r _; } 2>&3\n%(before)s"
    b"%(env)s\\command . /proc/self/fd/9 3>&- 9<<'%(nonce)s'\n"
    b"\\command eval %(command)s 9<&-\n%(nonce)s\n"
    b"} <<'%(nonce)s'\n\n%(nonce)s\n",
    b"": b"%(before)s%(env)s\\command eval %(command)s 3>&- <<'%(nonce)s'\n%(nonce)s\n",
}


class SessionCore:
    """One session. Its commands run one after another."""

    def __init__(
        self, core: ClientCore, sandbox_id: str, request: ExecRequest, window_bytes: int
    ) -> None:
        self._core, self._sandbox_id, self._request = core, sandbox_id, request
        self._window_bytes = window_bytes
        self.operation_id = request.operation_id or ""
        self._turn = asyncio.Lock()
        self._kind = b""
        self._at: dict[Stream, int] = {"stdout": 0, "stderr": 0, "status": 0}
        self._pending = b""
        self._code = 0
        self._count = 0
        self._settled = True
        self._deaf = False
        """Whether nothing can report any more: the shell has ended, or is another program now."""
        self._end: asyncio.Task[ExecResult] | None = None

    async def start(self) -> None:
        """Start the shell and wait until it answers.

        Raises:
            NotExecutedError and its kin: there is no such shell, directory or user.
            SessionEndedError: it did not answer within `START_DEADLINE_S`: no POSIX shell.
        """
        await self._core.start(self._sandbox_id, self._request)
        link = await self._core.link()
        self._end = asyncio.ensure_future(link.wait_exec(self.operation_id))
        nonce = _new_nonce()
        silence = "ended at once"
        try:
            await link.write_stdin(self.operation_id, _READY.replace(b"NONCE", nonce))
            async with asyncio.timeout(START_DEADLINE_S):
                answer = await self._status(link, nonce)
        except TimeoutError:
            answer, silence = None, f"gave no answer within {START_DEADLINE_S:g} s"
        except BrokenPipeError:
            answer = None
        except BaseException:
            await self.kill()
            raise
        if answer is None:
            await self.kill()
            raise SessionEndedError(f"{self._shell} {silence}: is it a POSIX shell?")
        self._kind = b"bash" if b"bash" in answer else b""
        await link.write_stdin(self.operation_id, _TRAP[self._kind])

    @property
    def ended(self) -> ExecResult | None:
        """How the shell ended, once it has."""
        if self._end is None or not self._end.done() or self._end.cancelled():
            return None
        return self._end.result()

    @property
    def _shell(self) -> str:
        return str((self._request.argv or ("?",))[0])

    async def exec(
        self,
        command: str | bytes,
        env: Mapping[str, str] | None,
        deadline_s: float | None,
        window_bytes: int | None,
    ) -> ExecResult:
        """Run one command line in the shell.

        Raises:
            SessionEndedError: the shell had ended before.
            InvalidRequestError: a NUL in the command, or a name that no shell variable can have.
        """
        request = checked(
            ExecRequest,
            {
                "command": command,
                "shell": self._shell,
                "env": dict(env or {}),
                "deadline_s": deadline_s,
                "window_bytes": self._window_bytes if window_bytes is None else window_bytes,
            },
        )
        nonce = _new_nonce()
        text = self._text(request, nonce)
        link = await self._core.link()
        async with self._turn:
            if self.ended is not None or self._end is None:
                raise SessionEndedError(self._ended_message())
            self._settled = False
            try:
                return await self._run(link, request, text, nonce)
            finally:
                if not self._settled:
                    # Where the shell stands in its script is not known: it cannot go on.
                    await self.kill()

    def _text(self, request: ExecRequest, nonce: bytes) -> bytes:
        command = encoded(request.command or b"", "the command")
        if b"\0" in command:
            raise InvalidRequestError("command: a NUL cannot stand in a command line")
        settings = (_assignment(name, value) + b" " for name, value in request.env.items())
        # `$?` of the command before is what the user expects to find; the report has reset it.
        before = b""
        if self._code:
            before = b"case $- in *e*) ;; *) (exit %d) ;; esac\n" % self._code
        script = _EVAL[self._kind] % {
            b"nonce": nonce,
            b"before": before,
            b"env": b"".join(settings),
            b"command": _quoted(command),
        }
        return script + _REPORT.replace(b"NONCE", nonce)

    async def _run(
        self, link: NodeLink, request: ExecRequest, text: bytes, nonce: bytes
    ) -> ExecResult:
        assert self._end is not None
        began, tick = time.time(), time.monotonic()
        windows: dict[Stream, Window] = {
            "stdout": Window(request.window_bytes),
            "stderr": Window(request.window_bytes),
        }
        status = asyncio.ensure_future(self._answer(link, text, nonce))
        reader: asyncio.Task[None] | None = None
        late = request.deadline_s
        try:
            if not await _done(status, SETTLE_S if late is None else min(SETTLE_S, late)):
                reader = asyncio.ensure_future(self._follow(link, windows))
            left = None if late is None else max(0.0, tick + late - time.monotonic())
            deadline = not await _done(status, left)
            answer = await (self._give_up(link, status) if deadline else status)
        except asyncio.CancelledError:
            answer = await self._give_up(link, status)
            await _stop(reader)
            await self._settle(link, answer, windows)
            raise
        finally:
            await _stop(status, reader)
        await self._settle(link, answer, windows)
        return self._result(request, answer, windows, (began, tick), deadline=deadline)

    async def _settle(
        self, link: NodeLink, answer: bytes | None, windows: Mapping[Stream, Window]
    ) -> None:
        """Take the output up to where the command ended, and know how the shell is."""
        if answer is None:
            assert self._end is not None
            ended = self._end.result()
            totals = (ended.out.total_bytes, ended.err.total_bytes)
        else:
            self._code = int(answer)
            totals = await link.mark(self.operation_id)
        await self._collect(link, windows, totals)
        self._settled = True

    async def _answer(self, link: NodeLink, text: bytes, nonce: bytes) -> bytes | None:
        """Run `text` and return what the shell reports; None once it has ended instead.

        `exec PROGRAM` takes the shell's place and runs on: its end is the command's.
        """
        assert self._end is not None
        try:
            await link.write_stdin(self.operation_id, text)
            answer = await self._status(link, nonce)
        except BrokenPipeError:
            answer = None
        if answer is None:
            self._deaf = True
            await asyncio.wait({self._end})
        return answer

    async def _status(self, link: NodeLink, nonce: bytes) -> bytes | None:
        """Return what the shell reports under `nonce`, or None when nothing reports any more."""
        assert self._end is not None
        while True:
            while b"\n" in self._pending:
                line, _, self._pending = self._pending.partition(b"\n")
                if line.startswith(nonce + b" "):
                    return line[len(nonce) + 1 :]
            read = asyncio.ensure_future(_read_status(link, self.operation_id, self._at["status"]))
            try:
                await asyncio.wait({read, self._end}, return_when=asyncio.FIRST_COMPLETED)
                if not read.done():
                    return None
                chunk = read.result()
            finally:
                await _stop(read)
            self._at["status"] = chunk.next_cursor
            self._pending = (self._pending + chunk.data)[-4096:]
            if chunk.eof and not chunk.data:
                return None

    async def _follow(self, link: NodeLink, windows: Mapping[Stream, Window]) -> None:
        await asyncio.gather(*(self._follow_one(link, name, windows[name]) for name in windows))

    async def _follow_one(self, link: NodeLink, stream: Stream, window: Window) -> None:
        while True:
            chunk = await link.read_output(self.operation_id, stream, self._at[stream], MIB, True)
            self._at[stream] = chunk.next_cursor
            window.add(chunk)
            if chunk.eof:
                return

    async def _collect(
        self, link: NodeLink, windows: Mapping[Stream, Window], totals: tuple[int, int]
    ) -> None:
        for stream, end in zip(windows, totals, strict=True):
            async for chunk in between(link, self.operation_id, stream, self._at[stream], end):
                windows[stream].add(chunk)
                self._at[stream] = chunk.next_cursor

    async def _give_up(self, link: NodeLink, status: asyncio.Task[bytes | None]) -> bytes | None:
        """Stop the command; end the shell too if it does not come back.

        Returns what `status` does.

        Raises:
            SandboxStateError: it cannot be ended.
        """
        operation = self.operation_id
        give_up = time.monotonic() + GRACE_S
        while not self._deaf and time.monotonic() < give_up:
            await link.signal(operation, GIVE_UP_SIGNAL, SignalScope.LEADER)
            await link.signal(operation, signals.SIGKILL, SignalScope.CHILDREN)
            if await _done(status, 0.1):
                break
        if not status.done():
            await link.signal(operation, signals.SIGKILL, SignalScope.TREE)
            await self._require_end(status)
        return status.result()

    async def _require_end(self, task: asyncio.Task[Any]) -> None:
        """Wait for what ends with the shell, which has been killed."""
        if not await _done(task, KILL_S):
            raise SandboxStateError(
                f"session {self.operation_id!r}: its shell did not end within {KILL_S:g} s of "
                "its kill"
            )

    def _result(
        self,
        request: ExecRequest,
        answer: bytes | None,
        windows: Mapping[Stream, Window],
        began: tuple[float, float],
        *,
        deadline: bool,
    ) -> ExecResult:
        self._count += 1
        code: int | None = None
        signal: int | None = None
        reason = Reason.EXIT
        if answer is not None:
            code = int(answer)
        elif (ended := self.ended) is not None:
            code, signal, reason = ended.exit_code, ended.signal, ended.reason
        if deadline:
            code, signal, reason = None, int(signals.SIGKILL), Reason.DEADLINE
        outputs = {stream: window.output() for stream, window in windows.items()}
        return ExecResult(
            operation_id=f"{self.operation_id}.{self._count}",
            sandbox_id=self._sandbox_id,
            reason=reason,
            exit_code=code,
            signal=signal,
            out=outputs.get("stdout", Output()),
            err=outputs.get("stderr", Output()),
            started_at=began[0],
            ended_at=time.time(),
            duration_s=time.monotonic() - began[1],
            request=request,
        )

    def _ended_message(self) -> str:
        how = ""
        if (ended := self.ended) is not None:
            how = f" ({ended.reason}, status {ended.returncode})"
        return f"session {self.operation_id!r}: its shell has ended{how}"

    async def close(self) -> None:
        """End the shell by end of file. What its commands left running lives on."""
        async with self._turn:
            if self.ended is not None or self._end is None:
                return
            link = await self._core.link()
            await link.close_stdin(self.operation_id)
            if not await _done(self._end, GRACE_S):
                await link.signal(self.operation_id, signals.SIGKILL, SignalScope.LEADER)
                await self._require_end(self._end)

    async def kill(self) -> None:
        """Kill the shell and everything that it started."""
        if self._end is None:
            return
        await kill_quietly(await self._core.link(), self._sandbox_id, self.operation_id)
        await self._require_end(self._end)


async def _read_status(link: NodeLink, operation_id: str, cursor: int) -> OutputChunk:
    return await link.read_output(operation_id, "status", cursor, 4096, True)


async def _done(task: asyncio.Task[Any], timeout_s: float | None) -> bool:
    await asyncio.wait({task}, timeout=timeout_s)
    return task.done()


async def _stop(*tasks: asyncio.Task[Any] | None) -> None:
    for task in tasks:
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait({task})


def _new_nonce() -> bytes:
    return b"s" + secrets.token_hex(8).encode()


def _quoted(text: bytes) -> bytes:
    return b"'" + text.replace(b"'", b"'\\''") + b"'"


def _assignment(name: str | bytes, value: str | bytes | None) -> bytes:
    text = name.decode("utf-8", "replace") if isinstance(name, bytes) else name
    if _NAME.fullmatch(text) is None:
        raise InvalidRequestError(f"env: {text!r} is not a name that a shell variable can have")
    if value is None:
        raise InvalidRequestError(f"env: {text!r} has no value; unset it in the command")
    return (
        encoded(name, "an environment name")
        + b"="
        + _quoted(encoded(value, f"the value of {name!r}"))
    )


def session_request(
    shell: str,
    *,
    env: Mapping[str, str | None] | None,
    cwd: str | bytes | None,
    user: str | int | None,
    spool_bytes: int,
) -> ExecRequest:
    """Make the request of a session's shell."""
    return exec_request(
        [shell],
        stdin_open=True,
        env=env,
        cwd=cwd,
        user=user,
        deadline_s=None,
        window_bytes=0,
        spool_bytes=spool_bytes,
        status_pipe=True,
    )
