"""Orchard's words: bodies as its client sends them, quantities as Kubernetes writes them."""

from __future__ import annotations

import math
import re
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from coldframe.gateway.tenants import Tenant
from coldframe.protocol import wire
from coldframe.protocol.errors import InvalidRequestError, SandboxNotFoundError
from coldframe.protocol.models import GIB, SandboxInfo, SandboxSpec, SandboxState
from coldframe.protocol.network import network_policy
from coldframe.protocol.resources import Amounts

TTL_S = 7200.0
"""How long a sandbox may live at most."""
HEARTBEAT_S = 180.0
"""Who has begun to send heartbeats and sends none for so long has lost its sandbox."""
WORKDIR = "/workspace"
"""Where commands start; it is made in every sandbox."""
NAMESPACE = "coldframe"
COMMAND_S = 300
READY_S = 3600

_CPU = 4.0
_MEMORY = 16 * GIB
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)([A-Za-z]*)")
_UNITS = {
    "": 1.0,
    "m": 1e-3,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "Ki": 2.0**10,
    "Mi": 2.0**20,
    "Gi": 2.0**30,
    "Ti": 2.0**40,
}
_PUBLIC = "public"
"""What an open network is here: the world, and nothing local. Orchard opens everything."""
_CLUSTER_STATES = {
    SandboxState.READY: "ready",
    SandboxState.PAUSED: "ready",
    SandboxState.FAILED: "failed",
    SandboxState.LOST: "failed",
}


class _Body(BaseModel):
    """Fields that nobody knows are ignored, as Orchard does."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    @model_validator(mode="after")
    def _is_text(self) -> Self:
        """Answers repeat it, and JSON has no words for half a character."""
        for name, value in self:
            if not _encodable(value):
                raise ValueError(f"{name} holds half a character, which is no text")
        return self


def _encodable(value: object) -> bool:
    if isinstance(value, str):
        return value.isascii() or not any("\ud800" <= one <= "\udfff" for one in value)
    if isinstance(value, dict):
        return all(_encodable(key) and _encodable(one) for key, one in value.items())
    return not isinstance(value, list) or all(map(_encodable, value))


class Create(_Body):
    """POST /sandboxes."""

    image: str
    block_network: bool = True
    sandbox_id: str | None = None
    cpu: str | None = None
    memory: str | None = None
    timeout: int | None = Field(default=None, gt=0, le=86_400)


class Command(_Body):
    """POST /sandboxes/ID/exec."""

    command: str | list[str]
    timeout_seconds: int | None = Field(default=None, gt=0, le=10 * 86_400)
    cwd: str | None = None
    env: dict[str, str] | None = None
    login_shell: bool = False
    wait: bool = False


class Patch(_Body):
    """POST /sandboxes/ID/apply_patch."""

    patch: str
    timeout_seconds: int = Field(default=30, gt=0, le=86_400)


class Upload(_Body):
    """POST /sandboxes/ID/files; content in base64."""

    path: str
    content: str


class Expose(_Body):
    """POST /sandboxes/ID/services."""

    port: int = Field(ge=1, le=65535)
    ttl_seconds: int | None = Field(default=None, gt=0, le=7 * 86_400)
    wait_ready: bool = False
    health_path: str = Field(default="/health", pattern=r"^/[!-~]*$", max_length=2048)
    ready_timeout: int = Field(default=60, ge=0, le=86_400)


class Init(_Body):
    """The first frame of a terminal."""

    cmd: list[str] = Field(min_length=1)
    env: dict[str, str] | None = None
    cwd: str | None = None
    rows: int = Field(default=24, gt=0, le=4096)
    cols: int = Field(default=80, gt=0, le=4096)
    login_shell: bool = False


def quantity(text: str, what: str) -> float:
    """Return a Kubernetes quantity: `4`, `2000m`, `16Gi`.

    Raises:
        InvalidRequestError: it is none, or not above 0.
    """
    match = _QUANTITY.fullmatch(text.strip())
    factor = _UNITS.get(match[2]) if match else None
    value = 0.0 if match is None or factor is None else float(match[1]) * factor
    if not 0 < value < math.inf:
        raise InvalidRequestError(f"{what}: {text[:40]!r} is no quantity, such as 4, 2000m or 16Gi")
    return value


def spec_of(asked: Create, sandbox_id: str) -> SandboxSpec:
    """Return what a sandbox is made from; Orchard's id is its name.

    Raises:
        InvalidRequestError: a quantity is none, or the id cannot be a name.
    """
    try:
        return SandboxSpec(
            image=asked.image,
            name=sandbox_id,
            cpu=_CPU if asked.cpu is None else quantity(asked.cpu, "cpu"),
            memory_bytes=_MEMORY
            if asked.memory is None
            else round(quantity(asked.memory, "memory")),
            workdir=WORKDIR,
            ttl_s=TTL_S,
            network=network_policy(None if asked.block_network else _PUBLIC),
        )
    except ValueError as error:
        raise InvalidRequestError(wire.describe(error)) from error


def memory_of(count: float) -> str:
    """Write bytes as Kubernetes does."""
    for unit in ("Ti", "Gi", "Mi", "Ki"):
        if count >= _UNITS[unit] and count % _UNITS[unit] == 0:
            return f"{count / _UNITS[unit]:.0f}{unit}"
    return f"{count:.0f}"


def amounts_of(amounts: Amounts) -> dict[str, Any]:
    """Say amounts of a node or of sandboxes."""
    return {"cpu": amounts.cpu, "memory_bytes": amounts.memory_bytes}


def settings_of(spec: SandboxSpec) -> dict[str, Any]:
    """Say what a sandbox was asked for, in the fields that every answer has."""
    return {
        "sandbox_id": spec.name,
        "namespace": NAMESPACE,
        "image": spec.image,
        "block_network": spec.network.empty,
        "cpu": f"{spec.cpu:g}",
        "memory": memory_of(spec.memory_bytes),
    }


async def found(tenant: Tenant, sandbox_id: str) -> SandboxInfo:
    """Return a sandbox of the caller's that has not ended.

    Raises:
        SandboxNotFoundError: there is none.
    """
    info = await tenant.get(sandbox_id)
    if info.ended_at is not None or info.kept_until is not None:
        raise SandboxNotFoundError(f"Sandbox {sandbox_id[:64]} not found: it has ended")
    return info


def state_of(info: SandboxInfo) -> dict[str, Any]:
    """Say how a sandbox is."""
    status = _CLUSTER_STATES.get(info.state, "pending")
    return {
        **settings_of(info.spec),
        "sandbox_id": info.spec.name or info.id,
        "pod_name": info.id,
        "created_at": info.created_at,
        "ready": status == "ready",
        "status": status,
        "status_message": info.reason or "",
    }
