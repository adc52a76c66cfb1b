"""The seam between an attempt and the agent that acts in it.

A harness gets an `Episode`: the sandbox, the instruction, limits, the model's settings and a
recorder. It acts, and returns why it stopped. It never grades, never sees the tests, and sees
the solution only when it says that it is the reference (`needs_solution`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, runtime_checkable

from coldframe.harnesses.file_log import FileLog
from coldframe.protocol.errors import (
    ColdframeError,
    Execution,
    InvalidRequestError,
    SandboxGoneError,
    SpawnerLostError,
)
from coldframe.protocol.ids import new_operation_id
from coldframe.protocol.models import MIB, ExecResult, Reason
from coldframe.trajectories.recorder import Recorder, StepRecord
from coldframe.trajectories.schema import Termination

if TYPE_CHECKING:
    from coldframe.client import AsyncSandbox, ExecOptions

McpTransport = Literal["stdio", "sse", "streamable-http"]

OUTPUT_WINDOW_BYTES = 8 * MIB
"""Per stream, how much of a command's output is brought to the record."""


@dataclass(frozen=True)
class Limits:
    """What an episode may use. Each that is reached ends it, and the verifier still judges."""

    steps: int = 100
    """Actions of the model."""
    tokens: int | None = None
    """Tokens that the model may produce over the whole episode."""
    wall_s: float = 7200.0
    """Seconds for the agent; the smaller of this and the task's own counts."""
    command_s: float = 180.0
    """Seconds for one command."""
    parse_failures_in_row: int = 3
    """So many actions in a row that do not follow the tool schema end the episode."""

    def __post_init__(self) -> None:
        for name in ("steps", "tokens", "wall_s", "command_s", "parse_failures_in_row"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise InvalidRequestError(f"limit {name}: {value} is not positive and finite")


@dataclass(frozen=True)
class ModelSettings:
    """Where the policy is and how it is sampled."""

    name: str
    base_url: str
    """Of an OpenAI-compatible API; `/chat/completions` is appended."""
    api_key: str | None = field(default=None, repr=False)
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    """Of one answer."""
    seed: int | None = None
    request_s: float = 300.0
    """Seconds for one answer of the endpoint."""
    retries: int = 3
    """Further tries of one request after a failure that may pass."""
    retry_wait_s: float = 1.0
    """Before the first further try; doubles each time, up to 30 s."""
    policy_version: str | None = None
    tokenizer: str | None = None
    renderer: str | None = None

    def sampling(self) -> dict[str, Any]:
        """Return the sampling parameters that are set, as they are sent."""
        names = ("temperature", "top_p", "max_tokens", "seed")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


@dataclass(frozen=True)
class Solution:
    """The reference, or a wrong one that must fail."""

    directory: Path
    """On this machine; uploaded by the harness that asked for it."""
    env: dict[str, str] = field(default_factory=dict)
    script: str = "solve.sh"


@dataclass(frozen=True)
class McpServer:
    """A server of the Model Context Protocol that the task offers its agent."""

    name: str
    transport: McpTransport
    url: str | None = None
    """Of `sse` and `streamable-http`, as seen from the sandbox."""
    command: str | None = None
    """Of `stdio`: the program to start in the sandbox."""
    args: tuple[str, ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """To send with each request; may hold secrets."""


@dataclass(frozen=True)
class Offers:
    """What a task offers its agent beside the sandbox."""

    mcp_servers: tuple[McpServer, ...] = ()
    skills_dir: str | None = None
    """In the sandbox: a directory with one directory, and a SKILL.md in it, per skill."""


@dataclass(frozen=True)
class Outcome:
    """Why the agent stopped, by its own account."""

    termination: Termination
    message: str = ""


class _CallTimes(TypedDict):
    """What the record says of a call beside its request and its end."""

    started_at: float
    wall_s: float
    tool_call_id: str | None


class Ending(Exception):
    """Raised inside a harness to end the episode with an outcome."""

    def __init__(self, termination: Termination, message: str = "") -> None:
        super().__init__(message or termination.value)
        self.outcome = Outcome(termination, message)


@dataclass
class Episode:
    """One attempt as its harness sees it."""

    sandbox: AsyncSandbox
    instruction: str
    limits: Limits
    recorder: Recorder
    deadline: float
    """On `time.monotonic()`; whoever runs the harness cancels it then."""
    model: ModelSettings | None = None
    solution: Solution | None = None
    user: str | int | None = None
    """None: the sandbox's own."""
    seed: int | None = None
    offers: Offers = Offers()
    files: FileLog = field(init=False)
    """What became of the sandbox's files between the commands."""
    running: set[str] = field(default_factory=set)
    """Operations of the harness that have not ended: killed before the tests arrive."""

    def __post_init__(self) -> None:
        self.files = FileLog(self.sandbox, self.recorder)

    def remaining_s(self) -> float:
        """Return the seconds until the deadline, never below a millisecond."""
        return max(self.deadline - time.monotonic(), 0.001)

    async def execute(
        self,
        command: str | Sequence[str],
        *,
        step: StepRecord,
        shell: str = "/bin/sh",
        env: dict[str, str] | None = None,
        deadline_s: float | None = None,
        tool_call_id: str | None = None,
    ) -> ExecResult:
        """Run one command as the agent's user and record it, however it ends.

        Args:
            command: a command line for `shell`, or argv.
            deadline_s: None: the limit on one command.
        Raises:
            NotExecutedError: nothing ran; the policy may be told and go on.
            SandboxGoneError and other ColdframeErrors: the platform failed.
        """
        operation_id = new_operation_id()
        options: ExecOptions = {
            "shell": shell,
            "env": env,
            "user": self.user,
            "deadline_s": self.limits.command_s if deadline_s is None else deadline_s,
            "window_bytes": OUTPUT_WINDOW_BYTES,
            "operation_id": operation_id,
        }
        started_at, begun = time.time(), time.monotonic()

        def lasted() -> _CallTimes:
            wall_s = time.monotonic() - begun
            return {"started_at": started_at, "wall_s": wall_s, "tool_call_id": tool_call_id}

        self.running.add(operation_id)
        try:
            result = await self.sandbox.exec(command, **options)
        except asyncio.CancelledError:
            step.add(self.recorder.error(None, command, options, **lasted()))
            raise  # whoever ended it kills what still runs
        except ColdframeError as error:
            self.running.discard(operation_id)
            step.add(self.recorder.error(error, command, options, **lasted()))
            raise
        self.running.discard(operation_id)
        number = step.add(self.recorder.result(result, **lasted()))
        check_platform(result)
        step.files(number, await self.files.told())
        return result


def check_platform(result: ExecResult) -> None:
    """Raise when a command's end says that the platform failed, not the command.

    Raises:
        SandboxGoneError: the sandbox was deleted or died while it ran.
        SpawnerLostError: the node lost it.
    """
    if result.reason is Reason.SANDBOX_GONE:
        raise SandboxGoneError(
            f"sandbox {result.sandbox_id!r} ended during a command", execution=Execution.EXECUTED
        )
    if result.reason is Reason.INFRASTRUCTURE:
        raise SpawnerLostError(f"sandbox {result.sandbox_id!r}: the node lost a command")


@runtime_checkable
class Harness(Protocol):
    """One kind of agent. Made anew for every attempt; keeps nothing between them."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str:
        """Raised whenever the same model would be shown something else."""

    @property
    def needs_model(self) -> bool: ...

    @property
    def needs_solution(self) -> bool: ...

    def settings(self) -> dict[str, Any]:
        """Return what of its behaviour is chosen, as JSON; part of the record."""

    def refuses(self, offers: Offers) -> str | None:
        """Return which of a task's offers it cannot pass on, as words for a message.

        Such a task is not run: what is offered and silently missing makes it another task. None
        also if it shows nothing to anybody, as the reference does.
        """

    async def run(self, episode: Episode) -> Outcome:
        """Act until done, and say why it stopped.

        Cancelled at the deadline: it must not swallow the cancellation, and its record up to
        then counts. It leaves no process of its own in the sandbox that is not in
        `episode.running`.

        Raises:
            InferenceError: the endpoint failed, after bounded retries.
            HarnessError: the harness itself failed.
            ColdframeError: the sandbox failed; passed through as it came.
        """
