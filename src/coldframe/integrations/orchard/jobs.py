"""Commands as Orchard's client knows them: jobs that go on whether anybody waits or not.

Its client sends a command again when the connection is lost before the answer, without a word that
says so. A command whose answer is known not to have arrived is therefore taken up again by the same
command from the same caller, once, and not run a second time.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
import shlex
import time
import uuid
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import ClientDisconnect

from coldframe.gateway.tenants import Tenant
from coldframe.integrations.orchard.words import COMMAND_S, Command
from coldframe.protocol import wire
from coldframe.protocol.errors import (
    ColdframeError,
    InvalidRequestError,
    OperationNotFoundError,
    ProgramNotFoundError,
)
from coldframe.protocol.ids import new_operation_id
from coldframe.protocol.models import MIB, ExecRequest, ExecResult, Reason

KEPT_S = 3600.0
"""How long a job that has ended can be asked for, from its end on."""
_MOST = 20_000
"""Of one owner's, that have ended; the oldest go."""
_UNDELIVERED_S = 600.0
_NOTICED_S = 0.05
_WINDOW_BYTES = 8 * MIB
"""How much of each stream an answer carries; the middle of what is longer is left out, and said."""
_NO_TERMINAL = re.compile("cannot set terminal process group|no job control in this shell")
"""What bash says when it is to be interactive without a terminal."""
_TIMED_OUT = 124
_NO_PROGRAM = 127


@dataclass(eq=False)
class Job:
    """One command."""

    tenant: Tenant
    sandbox_id: str
    """As the caller calls it."""
    command: str
    login: bool = False
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    operation_id: str = ""
    """The node's: it has the result, for as long as it keeps results."""
    created_at: float = field(default_factory=time.time)
    started_at: float | None = None
    completed_at: float | None = None
    error: ColdframeError | None = None
    """Why there is no result."""
    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def shown(self) -> dict[str, Any]:
        """Return it as JSON values.

        Raises:
            OperationExpiredError: its result is kept no longer.
        """
        told: dict[str, Any] = {
            "job_id": self.id,
            "sandbox_id": self.sandbox_id,
            "command": self.command,
            "status": "queued" if self.started_at is None else "running",
            "stdout": "",
            "stderr": "",
            "exit_code": None,
            "created_at": self.created_at,
            "started_at": self.started_at,
            "completed_at": self.completed_at,
            "error": None,
        }
        if self.error is not None:
            missing = isinstance(self.error, ProgramNotFoundError)
            told |= {
                "status": "failed",
                "stderr": str(self.error),
                "exit_code": _NO_PROGRAM if missing else None,
                "error": str(self.error),
            }
        elif self.over.is_set():
            told |= _ended(await self.tenant.node.wait_exec(self.operation_id), login=self.login)
        return told


def _ended(result: ExecResult, *, login: bool) -> dict[str, Any]:
    code = result.exit_code
    if code is None and result.signal is not None:
        code = -result.signal
    error, stderr = None, result.stderr.decode("utf-8", "replace")
    if login:
        lines = stderr.splitlines(keepends=True)
        stderr = "".join(line for line in lines if not _NO_TERMINAL.search(line))
    if result.reason is Reason.DEADLINE:
        limit = f"{result.request.deadline_s:g}s"
        code, error = _TIMED_OUT, f"Command timed out after {limit}"
        stderr += f"\nCommand timed out after {limit} and was killed"
    elif result.reason not in {Reason.EXIT, Reason.SIGNAL}:
        error = f"the command was cut short: {result.reason}"
    return {
        "status": "succeeded" if code == 0 and error is None else "failed",
        "stdout": result.text,
        "stderr": stderr,
        "exit_code": code,
        "started_at": result.started_at,
        "completed_at": result.ended_at,
        "error": error,
    }


class Jobs:
    """The jobs of one service, of every owner."""

    def __init__(self) -> None:
        self._jobs: dict[str, Job] = {}
        self._ended: dict[str | None, deque[Job]] = {}
        """By owner, in the order of their ends."""
        self._undelivered: dict[bytes, tuple[Job, float]] = {}
        self._waited_for: Counter[bytes] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    async def submit(self, tenant: Tenant, sandbox_id: str, asked: Command) -> Job:
        """Begin a command, or return the one whose answer did not arrive.

        Raises:
            SandboxNotFoundError: the caller has no such sandbox.
            InvalidRequestError: the command is empty.
        """
        inner = tenant.sandbox(sandbox_id)
        digest = _digest(tenant, sandbox_id, asked)
        if self._waited_for[digest]:
            # Whoever sends it again does that before its lost connection has been noticed here.
            await asyncio.sleep(_NOTICED_S)
        self._forget_old()
        job, at = self._undelivered.pop(digest, (None, 0.0))
        if job is not None and time.time() - at < _UNDELIVERED_S:
            return job
        lines = argvs(asked.command, login=asked.login_shell)
        words = asked.command if isinstance(asked.command, str) else shlex.join(asked.command)
        job = Job(tenant, sandbox_id, words, asked.login_shell)
        self._jobs[job.id] = job
        task = asyncio.ensure_future(self._run(job, inner, asked, lines))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return job

    def get(self, tenant: Tenant, job_id: str) -> Job:
        """Return a job of the caller's.

        Raises:
            OperationNotFoundError: there is none.
        """
        job = self._jobs.get(job_id)
        if job is None or job.tenant.identity.owner != tenant.identity.owner:
            raise OperationNotFoundError(f"Job {job_id[:64]} not found")
        return job

    @contextlib.contextmanager
    def waited_for(self, job: Job, asked: Command) -> Iterator[None]:
        """Within the block the caller waits for its answer; it may go away."""
        digest = _digest(job.tenant, job.sandbox_id, asked)
        self._waited_for[digest] += 1
        try:
            yield
        except (ClientDisconnect, asyncio.CancelledError):
            self._undelivered[digest] = (job, time.time())
            raise
        finally:
            self._waited_for[digest] -= 1
            if not self._waited_for[digest]:
                del self._waited_for[digest]

    async def _run(
        self, job: Job, inner: str, asked: Command, lines: list[tuple[str, ...]]
    ) -> None:
        job.started_at = time.time()
        try:
            for argv in lines:
                job.operation_id = job.tenant.operation(new_operation_id())
                try:
                    await job.tenant.node.exec(inner, _request(argv, asked, job.operation_id))
                except ProgramNotFoundError:
                    if argv == lines[-1]:
                        raise
                else:
                    break
        except ColdframeError as error:
            job.error = error
        finally:
            job.completed_at = time.time()
            job.over.set()
            self._ended.setdefault(job.tenant.identity.owner, deque()).append(job)

    def _forget_old(self) -> None:
        """Forget what ended long ago; what runs is never forgotten."""
        latest = time.time() - KEPT_S
        for owner, ended in list(self._ended.items()):
            while ended and (len(ended) > _MOST or (ended[0].completed_at or 0.0) < latest):
                del self._jobs[ended.popleft().id]
            if not ended:
                del self._ended[owner]
        for digest, (_, at) in list(self._undelivered.items()):
            if at < time.time() - _UNDELIVERED_S:
                del self._undelivered[digest]


def _request(argv: tuple[str, ...], asked: Command, operation_id: str) -> ExecRequest:
    try:
        return ExecRequest(
            argv=argv,
            cwd=asked.cwd,
            env=dict((asked.env or {}).items()),
            deadline_s=float(asked.timeout_seconds or COMMAND_S),
            window_bytes=_WINDOW_BYTES,
            operation_id=operation_id,
        )
    except ValueError as error:
        raise InvalidRequestError(f"the command cannot be run: {wire.describe(error)}") from error


def argvs(command: str | list[str], *, login: bool) -> list[tuple[str, ...]]:
    """Return what to run, and what instead where the image has no bash.

    A list is an argv and is never joined, unless a login shell is asked for, which is given it
    quoted.

    Raises:
        InvalidRequestError: the command is empty.
    """
    if not command:
        raise InvalidRequestError("command: it is empty")
    if not login:
        if not isinstance(command, str):
            return [tuple(command)]
        return [("bash", "-c", command), ("sh", "-c", command)]
    line = command if isinstance(command, str) else shlex.join(command)
    # A login shell reads no ~/.bashrc, and most of those read nothing unless it is interactive.
    sourced = f"if [ -f ~/.bashrc ]; then . ~/.bashrc; fi\n{line}"
    return [("bash", "--login", "-i", "-c", sourced), ("sh", "-l", "-c", line)]


def _digest(tenant: Tenant, sandbox_id: str, asked: Command) -> bytes:
    said = [tenant.identity.name, sandbox_id, asked.model_dump(exclude={"wait"})]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).digest()
