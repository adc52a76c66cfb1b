"""What a node has, and what of it is in use."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict

from coldframe.protocol.models import Quota


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Amounts(_Model):
    """So much of everything that a quota counts."""

    sandboxes: int
    cpu: float
    """Processors."""
    memory_bytes: int
    disk_bytes: int


class NodeResources(_Model):
    """A node as a whole, at this moment.

    Limits are promises: all of them together may be more than there is. So `free` is measured, and
    is not the difference.
    """

    capacity: Amounts
    """How many sandboxes the node takes; the machine's processors, memory, and disk at its home."""
    in_use: Amounts
    """What live sandboxes are limited to, together; a disk without a limit counts nothing."""
    free: Amounts
    """What is left of the machine; of its processors on the average of the last minute."""
    running: int
    """Commands that have not ended, those that wait included."""
    waiting: Mapping[str, int]
    """How many wait for their turn in each queue: creates, destroys, commands."""


class ResourceReport(_Model):
    """What a caller has, and for administrators what the node has."""

    in_use: Amounts
    """What the live sandboxes that the caller sees are limited to, together."""
    quota: Quota | None = None
    """What the caller's owner may have at once; null: the caller is nobody's."""
    node: NodeResources | None = None
    """Null: the caller lacks the scope `admin`."""
