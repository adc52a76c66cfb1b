"""Sandboxes: what is asked for, and what is known of them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from pydantic import Field, model_validator

from coldframe.protocol.models.base import GIB, MIB, Flag, Model, Number, Whole, refuse_empty
from coldframe.protocol.network import NetworkPolicy
from coldframe.protocol.text import excerpt

_MOST_LABELS = 64
_MOST_LABEL_TEXT, _MOST_ENV_TEXT = 16 << 10, 1 << 20
"""In characters, names and values together."""
_MOST_NAME_TEXT = 4096
"""In characters, as long as a path may be."""


def refuse_odd_labels(labels: Mapping[str, str]) -> None:
    """Refuse labels that could not be asked for as `name=value`.

    Raises:
        ValueError: a name is empty or holds a `=`, or it is not text that can be encoded.
    """
    for name, value in labels.items():
        if not name:
            raise ValueError("labels: the name of one is empty")
        if "=" in name:
            raise ValueError(f"labels: the name {excerpt(name)} holds a '='")
        try:
            (name + value).encode("utf-8", "surrogateescape")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"labels: {excerpt(name)} is not text that can be encoded: {error}"
            ) from error


class SandboxState(StrEnum):
    """States of the life cycle; see the design."""

    REQUESTED = "requested"
    PROVISIONING = "provisioning"
    READY = "ready"
    PAUSED = "paused"
    TERMINATING = "terminating"
    DELETED = "deleted"
    FAILED = "failed"
    LOST = "lost"


OWNER_LABEL = "owner"
"""The label that says whose a sandbox is."""


class SandboxSpec(Model):
    """What a caller asks for. Every default is a limit that is enforced."""

    image: str
    cpu: Number = Field(default=4.0, ge=0.01, le=4096)
    memory_bytes: Whole = Field(default=4 * GIB, ge=4 * MIB, le=1 << 50)
    pids: Whole = Field(default=1024, ge=4, le=1 << 22)
    disk_bytes: Whole | None = Field(default=None, ge=MIB, le=1 << 50)
    """Limit on what the sandbox may write; None: what the store has.

    Refused by a store that cannot enforce it.
    """
    shm_bytes: Whole = Field(default=GIB, ge=MIB, le=1 << 40)
    env: dict[str, str] = Field(default_factory=dict)
    workdir: str | None = None
    """None: the image's."""
    user: str | Whole | None = None
    """Name or id, optionally `user:group`; None: the image's."""
    labels: dict[str, str] = Field(default_factory=dict)
    ttl_s: Number | None = Field(default=7200.0, gt=0, le=10 * 365 * 86400)
    """Lease: the sandbox is deleted this long after its creation or last renewal; None: never."""
    name: str | None = Field(default=None, pattern=r"^[a-zA-Z0-9][a-zA-Z0-9._-]{0,62}$")
    no_new_privileges: Flag = False
    network: NetworkPolicy = NetworkPolicy()
    """What it may reach; the default: nothing but itself."""

    @property
    def owner(self) -> str | None:
        """Whose it is, if its labels say so."""
        return self.labels.get(OWNER_LABEL)

    @model_validator(mode="after")
    def _fits(self) -> SandboxSpec:
        """A node holds these as long as it knows the sandbox, also after its end."""
        if len(self.labels) > _MOST_LABELS:
            raise ValueError(f"labels: there are {len(self.labels)}, at most {_MOST_LABELS} may be")
        bounds = (("labels", self.labels, _MOST_LABEL_TEXT), ("env", self.env, _MOST_ENV_TEXT))
        for name, given, most in bounds:
            size = sum(len(key) + len(value) for key, value in given.items())
            if size > most:
                raise ValueError(f"{name}: {size} characters together, at most {most} may be")
        for name in ("image", "workdir", "user"):
            text = getattr(self, name)
            if isinstance(text, str) and len(text) > _MOST_NAME_TEXT:
                raise ValueError(f"{name}: at most {_MOST_NAME_TEXT} characters may be")
        refuse_empty("user", self.user)
        refuse_empty("workdir", self.workdir)
        refuse_odd_labels(self.labels)
        return self


class Quota(Model):
    """How much of a node an owner's live sandboxes may be limited to, together. None: any."""

    sandboxes: Whole | None = Field(default=None, ge=0)
    cpu: Number | None = Field(default=None, ge=0, allow_inf_nan=False)
    memory_bytes: Whole | None = Field(default=None, ge=0)
    disk_bytes: Whole | None = Field(default=None, ge=0)
    """With it, every sandbox of the owner's must say how much it may write."""


class ImageHealthcheck(Model):
    """How an image says to ask whether what it starts is well. Times in seconds."""

    argv: tuple[str, ...]
    """Exit code 0: healthy."""
    interval_s: float
    timeout_s: float
    start_period_s: float
    start_interval_s: float
    retries: int


class ImageStart(Model):
    """What a container of the image would start. A sandbox starts nothing by itself."""

    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    healthcheck: ImageHealthcheck | None = None


class SandboxInfo(Model):
    """What the node knows of one sandbox at one moment."""

    id: str
    node_id: str
    runtime: str
    spec: SandboxSpec
    image_digest: str
    layer_digests: tuple[str, ...] = ()
    image_start: ImageStart = ImageStart()
    workdir: str = "/"
    """Where commands start: what the specification says, else the image."""
    state: SandboxState
    version: int
    """Raised by every transition of state."""
    created_at: float
    ready_at: float | None = None
    ended_at: float | None = None
    expires_at: float | None = None
    expired: bool = False
    """Its lease ended: deleted, or kept until `kept_until`."""
    kept_until: float | None = None
    """Its lease ended, and until then what it holds can be read; it runs nothing."""
    queued_s: float = 0.0
    """How long its create waited on the node for its turn."""
    reason: str | None = None
    """Why it failed, was lost or is gone."""
    trace_id: str | None = None
    """Of the request that made it: 32 hex digits."""


class PortUrl(Model):
    """Where a browser, or any HTTP client, reaches one port of a sandbox without a key.

    Whoever has it may use it until it expires or the sandbox ends.
    """

    url: str
    expires_at: float
    """Unix seconds."""


class DiskExtension(Model):
    """Room beside a sandbox's disk limit, for whoever judges what it has filled."""

    extra_bytes: int = Field(ge=0, le=256 * MIB)
