"""What became of sandboxes."""

from __future__ import annotations

from enum import StrEnum

from coldframe.protocol.models.base import Model
from coldframe.protocol.models.guards import GuardRefusal
from coldframe.protocol.models.sandboxes import SandboxState
from coldframe.protocol.network import EgressEvent


class EventKind(StrEnum):
    """What an event is about. Each kind is kept, and read by a cursor, apart from the others."""

    STATE = "state"
    """A sandbox has another state."""
    EGRESS = "egress"
    """A decision about what it asked of the network."""
    TAMPER = "tamper"
    """A refused attempt to write where a guard stood; told when the guard reports."""
    STORAGE = "storage"
    """It can write no more, since the disk below it is full, or can again."""


class StorageEvent(Model):
    """Whether a sandbox can write from then on."""

    at: float
    """Unix seconds."""
    writable: bool
    reason: str = ""
    """Why it cannot, and what helps."""


class SandboxEvent(Model):
    """Something that has happened to one sandbox."""

    cursor: str
    """What to ask with for what came after it."""
    at: float
    """Unix seconds."""
    sandbox_id: str
    kind: EventKind = EventKind.STATE
    state: SandboxState
    """Its state from then on."""
    version: int
    reason: str | None = None
    """Why it has this state."""
    egress: EgressEvent | None = None
    """Of an event of this kind."""
    tamper: GuardRefusal | None = None
    """Of an event of this kind."""
    storage: StorageEvent | None = None
    """Of an event of this kind."""
    trace_id: str | None = None
    """Of the request that caused it, else of the sandbox's create."""


class EventPage(Model):
    """Events of one kind in order."""

    events: tuple[SandboxEvent, ...]
    next_cursor: str
