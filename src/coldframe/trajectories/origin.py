"""Where an attempt is from that was not made here: who made it, and the documents that it left."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from coldframe.trajectories.base import BlobRef, Model, Sha256


class OriginDocument(Model):
    """A conversation, as the agent wrote it down."""

    path: str
    """Within the trial's directory; of an embedded one, of the document that holds it and `#ID`."""
    blob: BlobRef
    format: str
    """As it names itself, such as `ATIF-v1.7`."""
    kind: Literal["main", "continuation", "sub_agent"]
    owner: str | None
    """Path of the document that refers to it; None of the first."""
    order: int = Field(ge=0)
    """Place by their begin, from 0."""
    steps: int = Field(ge=0)
    copied_steps: int = Field(default=0, ge=0)
    """Of those, steps of an earlier document that stand here again as context."""


class Origin(Model):
    """Who made an attempt, and what became of it in its import."""

    runner: Literal["harbor"]
    runner_version: str | None
    """None: its job does not say."""
    trial_name: str
    task_checksum: str | None
    """By the runner's own rule, so not to be compared with a digest of ours."""
    result_sha256: Sha256
    """Of the result.json that was read."""
    documents: tuple[OriginDocument, ...] = ()
