"""Commands: requests, output, results."""

from __future__ import annotations

import hashlib
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, model_validator

from coldframe.protocol.models.base import MIB, Flag, Model, Number, Whole, refuse_empty


class Reason(StrEnum):
    """Why an exec ended."""

    EXIT = "exit"
    SIGNAL = "signal"
    DEADLINE = "deadline"
    OOM = "oom"
    OUTPUT_LIMIT = "output_limit"
    SANDBOX_GONE = "sandbox_gone"
    INFRASTRUCTURE = "infrastructure"


class PtySize(Model):
    """A terminal's size in characters."""

    rows: Annotated[Whole, Field(ge=1, le=65535)] = 24
    cols: Annotated[Whole, Field(ge=1, le=65535)] = 80


Argument = Annotated[str | bytes, Field(union_mode="left_to_right")]


class ExecRequest(Model):
    """One command. Exactly one of `argv` and `command` is given.

    Text is encoded as UTF-8 with surrogate escapes; bytes go as they are.
    """

    argv: tuple[Argument, ...] | None = None
    command: Argument | None = None
    """A command line, run by `shell` as `SHELL -c COMMAND`."""
    shell: str = "/bin/sh"
    cwd: Argument | None = None
    """None: the sandbox's workdir."""
    env: dict[Argument, Argument | None] = Field(default_factory=dict)
    """Merged over the sandbox's; a null value removes."""
    user: str | Whole | None = None
    """Name or id, optionally `user:group`; None: the sandbox's."""
    stdin: bytes | None = None
    """What the command reads; None: end of file at once."""
    stdin_open: Flag = False
    """Keep stdin open for `write_stdin`; `stdin` is then written first."""
    deadline_s: Number | None = Field(default=300.0, gt=0, le=10 * 365 * 86400)
    """The whole tree is killed after this long; None: never."""
    window_bytes: Whole = Field(default=MIB, ge=0, le=64 * MIB)
    """Per stream, how much the result carries: head and tail, half each."""
    spool_bytes: Whole = Field(default=64 * MIB, ge=8192, le=1 << 40)
    """Per stream, how much is kept on the node: head and tail, half each."""
    kill_bytes: Whole | None = Field(default=None, ge=1, le=1 << 62)
    """Kill the command when stdout and stderr together exceed this; None: never."""
    pty: PtySize | None = None
    """Run on a terminal of the sandbox's; stdout holds everything, stderr is empty."""
    status_pipe: Flag = False
    """Give the command, as its descriptor 3, the writing end of a pipe that is neither stdout nor
    stderr. What is written there is the stream `status`, read with `RunningExec.read`. Sessions
    learn exit codes by it. Not counted in output limits, totals or digests; kept to its last MiB.
    """
    operation_id: str | None = None
    expected_version: Whole | None = None

    @model_validator(mode="after")
    def _one_command(self) -> ExecRequest:
        if (self.argv is None) == (self.command is None):
            raise ValueError("give exactly one of argv and command")
        if self.argv is not None and not self.argv:
            raise ValueError("argv is empty: its first element names the program")
        if self.pty is not None and self.stdin is not None and not self.stdin_open:
            raise ValueError("a terminal's stdin is written with write_stdin; set stdin_open")
        refuse_empty("user", self.user)
        return self


class ProcessInfo(Model):
    """A process of the sandbox: its pid inside, and its name (hostile text)."""

    pid: int
    name: str
    operation_id: str | None = None


class Output(Model):
    """One stream of one exec: the whole by length and digest, and the window that was kept."""

    total_bytes: int = 0
    sha256: str = hashlib.sha256().hexdigest()
    """Hex digest of the whole stream up to the command's end.

    Empty when it is not known: a command of a session that wrote faster than it could be read.
    """
    head: bytes = b""
    tail: bytes = b""
    """Empty unless bytes were left out between head and tail."""

    @property
    def omitted_bytes(self) -> int:
        """How many bytes between head and tail the window leaves out."""
        return self.total_bytes - len(self.head) - len(self.tail)

    @property
    def window(self) -> bytes:
        """The whole stream if it fits, else head, a line that says what is missing, tail."""
        if self.omitted_bytes == 0:
            return self.head + self.tail
        return self.head + b"\n[... %d bytes omitted ...]\n" % self.omitted_bytes + self.tail


class Resources(Model):
    """What one exec used. None: not known on this machine, never a guess."""

    cpu_user_s: float | None = None
    cpu_system_s: float | None = None
    memory_peak_bytes: int | None = None
    """Largest resident set among the command and the children it waited for."""
    read_bytes: int | None = None
    write_bytes: int | None = None
    oom_kills: int | None = None
    """Processes of the sandbox that the OOM killer ended meanwhile."""


class ExecResult(Model):
    """How a command ended. Not an exception, whatever its exit code."""

    operation_id: str
    sandbox_id: str
    reason: Reason
    exit_code: int | None = None
    """Set when the command exited by itself, else None."""
    signal: int | None = None
    """Set when a signal ended it."""
    out: Output = Output()
    err: Output = Output()
    started_at: float
    ended_at: float
    duration_s: float
    queued_s: float = 0.0
    """How long it waited on the node for its turn, before `started_at`."""
    resources: Resources = Resources()
    leftovers: tuple[ProcessInfo, ...] = ()
    """Processes that the command left running."""
    request: ExecRequest
    """The request as it was normalised: shell, cwd, user and environment filled in."""
    trace_id: str | None = None
    """Of the request that ran it: 32 hex digits."""

    @property
    def stdout(self) -> bytes:
        """The window of stdout; whole unless `out.omitted_bytes`."""
        return self.out.window

    @property
    def stderr(self) -> bytes:
        """The window of stderr; whole unless `err.omitted_bytes`."""
        return self.err.window

    @property
    def text(self) -> str:
        """stdout as text; bytes that are not UTF-8 become U+FFFD."""
        return self.stdout.decode("utf-8", "replace")

    @property
    def ok(self) -> bool:
        """Whether it exited by itself with 0."""
        return self.reason is Reason.EXIT and self.exit_code == 0

    @property
    def returncode(self) -> int:
        """As a shell would say it: the exit code, or 128 + signal."""
        return self.exit_code if self.exit_code is not None else 128 + (self.signal or 9)


class ExecInfo(Model):
    """A command of a sandbox, as far as it has come."""

    operation_id: str
    command_line: str
    """As one would type it, cut where it is long. Hostile text."""
    started_at: float | None = None
    """Unix seconds. None: it waits for its turn, or never ran.

    Of a command that runs since before its node was replaced: when the new one took it over.
    """
    reason: Reason | None = None
    """Why it ended. None: it has not, or never ran."""
    exit_code: int | None = None
    signal: int | None = None
    failure: str | None = None
    """Why it never ran, or was lost."""


Stream = Literal["stdout", "stderr", "status"]
"""`status` is there only for an exec that was asked for with `status_pipe`."""


class OutputChunk(Model):
    """Bytes of one stream from a cursor on."""

    stream: Stream
    offset: int
    """Where `data` begins in the stream; beyond the cursor asked for if bytes were dropped."""
    data: bytes
    dropped_bytes: int = 0
    """Bytes between the cursor asked for and `offset` that the spool no longer has."""
    eof: bool = False
    """Nothing follows `data`."""

    @property
    def next_cursor(self) -> int:
        """The cursor to ask for next."""
        return self.offset + len(self.data)


class SignalScope(StrEnum):
    """Whom a signal reaches."""

    LEADER = "leader"
    GROUP = "group"
    TREE = "tree"
    """Every process that the exec started, daemonised ones too."""
    CHILDREN = "children"
    """The tree without its leader."""
