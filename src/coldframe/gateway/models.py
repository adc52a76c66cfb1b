"""Bodies that only the service has; everything else is in `coldframe.protocol.models`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from coldframe.protocol.errors import Execution, Side
from coldframe.protocol.models import SandboxInfo, SignalScope


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ErrorBody(BaseModel):
    """Why a request was refused or failed."""

    code: str
    """Stable; the class of the SDK's error."""
    message: str
    retryable: bool
    side: Side
    execution: Execution
    """Whether what was asked for was done."""
    sandbox: SandboxInfo | None = None
    """As it is at present, where the request stood on something that was true before (409)."""
    oldest: str | None = None
    """Where one can go on, where a cursor was too old (410)."""


class SandboxPage(_Model):
    """Some of the caller's sandboxes, oldest first."""

    sandboxes: tuple[SandboxInfo, ...]
    next_cursor: str | None = None
    """What to ask with for the next page; null: this was the last."""


class Lease(_Model):
    """How long a sandbox may live from now on; null: for ever."""

    ttl_s: float | None = Field(strict=True)


class ExecStarted(_Model):
    """A command that has not ended, as far as was waited."""

    operation_id: str
    started: bool
    """Whether it is known to run; else it may still wait for its turn."""


class Signal(_Model):
    """A signal to send."""

    signal: int = Field(ge=1, le=64, strict=True)
    scope: SignalScope = SignalScope.GROUP


class Reached(_Model):
    """How many processes a signal reached; 0: the command had ended."""

    reached: int


class Totals(_Model):
    """How many bytes each stream has had."""

    stdout: int
    stderr: int


class Size(_Model):
    """How much was written."""

    bytes: int


class Members(_Model):
    """How many members of an archive were unpacked."""

    members: int


class PatchApplied(_Model):
    """What a patch did, by the patch's paths."""

    written: tuple[str, ...]
    """Files that were changed or are new."""
    removed: tuple[str, ...]
    """Files that are not there any more: deleted, or renamed."""
    sha256: Mapping[str, str]
    """Digests of what was written: the base of a next patch."""


class MakeDirectory(_Model):
    """A directory to make."""

    mode: int = Field(default=0o755, ge=0, le=0o7777, strict=True)
    uid: int | None = Field(default=None, ge=0, le=65535)
    gid: int | None = Field(default=None, ge=0, le=65535)
    parents: bool = True
    exist_ok: bool = True


class Mode(_Model):
    """Permission bits."""

    mode: int = Field(ge=0, le=0o7777, strict=True)


class Ownership(_Model):
    """Ids in the sandbox."""

    uid: int = Field(ge=0, le=65535, strict=True)
    gid: int = Field(ge=0, le=65535, strict=True)


class PortUrlRequest(_Model):
    """For how long a port is to be reached by a URL."""

    ttl_s: float = Field(default=3600.0, gt=0, le=7 * 86400, strict=True)


class PortUrlIssued(_Model):
    """Where a port is reached without a key."""

    path: str
    """`/p/TOKEN/`, below the address by which this service is reached."""
    origin: str | None
    """An address of this service's on TCP; null: it has none."""
    url: str | None
    """`path` at `origin`; null: there is no origin."""
    expires_at: float
    """Unix seconds."""


class Built(_Model):
    """An image that was built."""

    name: str
    digest: str


class Versions(_Model):
    """What a service speaks."""

    coldframe: str
    protocol: int


class Health(_Model):
    """A sandbox was made and ended."""

    status: Literal["ok"] = "ok"
    boot_s: float
    """How long it took to make."""
