"""A node and its runtime: what they account for, and what they can do."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from coldframe.protocol.models.base import Model


class Ledger(Model):
    """created = deleted + expired + failed + lost + live + leaked, and leaked must be 0.

    The first six count what the node did; `leaks` names what the kernel has beyond that
    (cgroups, mounts, namespaces, processes, directories) and `leaked` counts sandboxes or
    strays behind them.
    """

    created: int
    deleted: int
    expired: int
    failed: int
    lost: int
    live: int
    leaked: int
    leaks: tuple[str, ...] = ()

    @property
    def balanced(self) -> bool:
        """Whether the sum holds and nothing is leaked."""
        ended = self.deleted + self.expired + self.failed + self.lost
        return self.leaked == 0 and self.created == ended + self.live


class Fingerprint(Model):
    """A digest of the sandbox's state by parts, and of all of them.

    `excluded` lists what is left out on purpose.
    """

    digest: str
    files: str
    processes: str
    ports: str
    users: str
    limits: str
    network: str
    excluded: tuple[str, ...]


class ImageInfo(Model):
    """One named image of the node's store."""

    name: str
    digest: str
    layers: tuple[str, ...]
    """Digests, top first."""
    created_at: float
    size_bytes: int
    """Content of its layers, those shared with other images included."""


class Capabilities(Model):
    """What a runtime has probed, never what it hopes for."""

    runtime: str
    isolation: bool
    """Whether a hostile command is kept from the host."""
    limits: frozenset[str] = frozenset()
    """Of cpu, memory, pids, disk: those that are enforced."""
    pty: bool = False
    ports: bool = False
    users: bool = False
    egress: bool = False
    """Whether network policies can be enforced; else only the empty one is taken."""
    guards: bool = False
    """Whether a directory can be guarded (`SandboxHandle.guard`)."""
    storage: str = ""
    details: dict[str, Any] = Field(default_factory=dict)
