"""Sessions: shells that keep their state between commands."""

from __future__ import annotations

from pydantic import Field, model_validator

from coldframe.protocol.models.base import MIB, Model, Number, Whole, refuse_empty
from coldframe.protocol.models.commands import Argument, ExecResult


class SessionRequest(Model):
    """A shell that is to live on between commands."""

    shell: str = "/bin/sh"
    """Any POSIX shell of the image."""
    cwd: Argument | None = None
    """None: the sandbox's workdir."""
    env: dict[Argument, Argument | None] = Field(default_factory=dict)
    """Merged over the sandbox's; a null value removes."""
    user: str | Whole | None = None
    """Name or id, optionally `user:group`; None: the sandbox's."""
    spool_bytes: Whole = Field(default=64 * MIB, ge=8192, le=1 << 40)
    """Per stream, how much of what its commands write is kept on the node: head and tail."""
    operation_id: str | None = None
    """Is the session's id; the same with the same request is the same session."""

    @model_validator(mode="after")
    def _named(self) -> SessionRequest:
        refuse_empty("user", self.user)
        return self


class SessionExecRequest(Model):
    """One command line of a session."""

    command: Argument
    """Any number of lines; with `env` at most 1 MiB."""
    env: dict[Argument, Argument] = Field(default_factory=dict)
    """For this command alone."""
    deadline_s: Number | None = Field(default=300.0, gt=0, le=10 * 365 * 86400)
    """Then it and all background jobs of the session are killed; None: never."""
    window_bytes: Whole = Field(default=MIB, ge=0, le=64 * MIB)
    """Per stream, how much the result carries: head and tail, half each."""
    operation_id: str | None = None


class SessionInfo(Model):
    """What the node knows of one session at one moment."""

    id: str
    """The operation id of its shell."""
    sandbox_id: str
    shell: str
    started_at: float
    running: str | None = None
    """The operation id of the command that runs."""
    ended: ExecResult | None = None
    """How the shell ended; None: it takes commands."""


class SessionResult(Model):
    """How a command of a session ended."""

    result: ExecResult
    ended: ExecResult | None = None
    """How the shell has ended since; None: it takes commands."""
