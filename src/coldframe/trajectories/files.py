"""What became of files between two instants. It proves nothing about who wrote them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from coldframe.protocol.models import Change, FileKind
from coldframe.trajectories.base import Model, Sha256

Words = str | dict[Literal["base64"], str]
"""Bytes as text where they are UTF-8, else in base64; known secrets are taken out."""


class ChangedFile(Model):
    """One path that is not what it was."""

    path: Words
    """Absolute."""
    change: Change
    kind: FileKind
    """As it is now; of what was removed, as it was."""
    size: int = Field(default=0, ge=0)
    sha256: Sha256 | None = None
    """Of a file's content, up to 16 MiB; None: larger, or beyond what one look reads."""


class ChangedFiles(Model):
    """How the sandbox's files differ between two looks; see `Trajectory.files_excluded`."""

    from_at: float
    """When the look before was answered."""
    to_at: float
    """When this one was."""
    created: int = Field(ge=0)
    changed: int = Field(ge=0)
    removed: int = Field(ge=0)
    """A directory stands for all that went with it."""
    entries: tuple[ChangedFile, ...] = ()
    left_out: int = Field(default=0, ge=0)
    """Counted and not kept."""


class FileDiff(Model):
    """How the files differ between the start and the end of the agent's time."""

    before: str
    after: str
    changed: bool
    excluded: tuple[str, ...] = ()
