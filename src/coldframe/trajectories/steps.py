"""What an agent did, step by step: its action, the commands that followed, what it was shown."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

from pydantic import Field

from coldframe.protocol.errors import Side
from coldframe.protocol.models import ProcessInfo, Reason, Resources
from coldframe.trajectories.base import BlobRef, Model, OutputRef
from coldframe.trajectories.files import ChangedFiles


class Shown(Model):
    """What the model was shown, apart from the whole."""

    rule: str
    """Name and version of the window rule, such as `head_tail_10k@2`."""
    text: BlobRef
    omitted_characters: int = Field(default=0, ge=0)


class CallOutcome(StrEnum):
    """What is known of one call."""

    RESULT = "result"
    """It ran and ended; `reason` says how."""
    NOT_EXECUTED = "not_executed"
    """It was refused before anything ran; `error` says why."""
    INTERRUPTED = "interrupted"
    """The episode ended while it ran; the kill came from us."""
    LOST = "lost"
    """Perhaps executed; the sandbox or its node failed."""


class CallError(Model):
    """Why a call has no result."""

    code: str
    side: Side
    message: str


class Call(Model):
    """One command in the sandbox."""

    tool_call_id: str | None = None
    operation_id: str
    request: dict[str, Any]
    """The request as it was normalised, secrets redacted."""
    outcome: CallOutcome
    error: CallError | None = None
    reason: Reason | None = None
    exit_code: int | None = None
    signal: int | None = None
    stdout: OutputRef | None = None
    stderr: OutputRef | None = None
    resources: Resources | None = None
    leftovers: tuple[ProcessInfo, ...] = ()
    started_at: float
    ended_at: float
    exec_s: float = Field(ge=0)
    """As the sandbox measured it; what lies between is transport and queueing."""
    queue_s: float = Field(ge=0)
    """Time of the call that the command itself did not run."""
    files: ChangedFiles | None = None
    """What became of the files from the look before the command to the one after it."""


class ParseFailure(Model):
    """An action that does not follow the tool schema; the policy's own doing."""

    code: str
    message: str
    tool_call_id: str | None = None


class Usage(Model):
    """Tokens as the endpoint counted them. None: it did not say."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None
    cached_tokens: int | None = None


class ShownMessage(Model):
    """A message that was given to the model after this step's action, in order."""

    role: str
    tool_call_id: str | None = None
    shown: Shown


class Step(Model):
    """One action and everything that followed from it."""

    index: int = Field(ge=0)
    source: Literal["model", "solution", "atif"]
    action: BlobRef | None
    """The raw action: the endpoint's answer byte for byte, or the solution script; of `atif`, the
    step as the document has it that it was imported from."""
    finish_reason: str | None = None
    usage: Usage = Usage()
    model_attempts: int | None = Field(default=0, ge=0)
    """Requests to the endpoint that this action took, retries included."""
    parse_failures: tuple[ParseFailure, ...] = ()
    calls: tuple[Call, ...] = ()
    shown: tuple[ShownMessage, ...] = ()
    started_at: float | None
    ended_at: float | None
    model_s: float | None = Field(default=0.0, ge=0)
    model_queue_s: float | None = None
    """Time spent waiting between retries of the endpoint; None without a model."""
