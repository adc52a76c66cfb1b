"""What a service is told once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20


@dataclass(frozen=True)
class GatewaySettings:
    """Sizes are bytes, durations seconds."""

    json_bytes: int = 32 * MIB
    """Largest body that is held in memory. Files and archives are streamed, and have no bound."""
    answer_bytes: int = 512 * MIB
    """How much of the service's memory one owner's large answers may take while they are sent."""
    patch_bytes: int = 4 * MIB
    """Largest patch. All files that it changes may have four times as much."""
    head_bytes: int = 64 * 1024
    """Largest head of a request: its line and headers."""
    body_s: float = 15.0
    """How long a client may take for a body that is held in memory, and so much more as it has sent
    at `body_bytes_per_s`."""
    body_bytes_per_s: float = 64 * 1024
    head_s: float = 15.0
    """How long a client may take for the head of a request."""
    keep_alive_s: float = 75.0
    """How long a connection may do nothing between requests."""
    drain_s: float = 30.0
    """How long a stop waits for requests that are being answered."""
    health_s: float = 10.0
    """How long an answer of /healthz is good for."""
    audit: Path | None = None
    """The directory of the audit log; None: there is none."""
    audit_bytes: int = 64 * MIB
    """How large one file of it becomes."""
    audit_files: int = 8
    """How many of them are kept."""
