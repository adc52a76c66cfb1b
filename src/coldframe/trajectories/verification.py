"""What the verifier did, and what travelled to it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from coldframe.protocol.models import Reason
from coldframe.trajectories.base import BlobRef, Model, OutputRef, Sha256


class Artifact(Model):
    """One entry that travelled to the verifier's sandbox, under its own path."""

    path: str
    kind: Literal["file", "directory", "link", "hard_link"]
    size: int = Field(ge=0)
    """Of the content, holes included."""
    sha256: Sha256 | None = None
    """Of a file's content; of a sparse one's map and data, holes left out."""
    sparse: bool = False


class RefusedArtifact(Model):
    """What was declared, or lay in what was declared, and did not travel."""

    path: str
    reason: str


class Artifacts(Model):
    """What travelled from the agent's sandbox into the verifier's, and what did not."""

    entries: tuple[Artifact, ...] = ()
    """The first of them; `manifest` has all."""
    manifest: BlobRef
    """One `Artifact` as JSON per line."""
    count: int = Field(ge=0)
    bytes: int = Field(ge=0)
    """Of data, holes left out."""
    refused: tuple[RefusedArtifact, ...] = ()
    saved: tuple[str, ...] = ()
    """Archives of it in the attempt's directory, by name."""


class Collected(Model):
    """A command that the task runs in the agent's sandbox before artifacts are taken."""

    command: str
    error: str | None = None
    """Why it was not executed."""
    reason: Reason | None = None
    exit_code: int | None = None
    stdout: OutputRef | None = None
    stderr: OutputRef | None = None


class Verification(Model):
    """What the verifier did. What it killed, and what lived on, stands with the phases."""

    mode: Literal["shared", "separate"] = "shared"
    image: str | None = None
    """Digest of the image of the sandbox that graded."""
    full_kill: bool = False
    forgeable: bool = False
    """The reward could not be guarded, and something that a root agent left running lived while the
    tests ran: it could have written it, and only a write after test.sh had ended is found out."""
    guarded: bool = False
    """Nobody but test.sh's own processes, and none that had run the agent's code, could write the
    reward."""
    again: bool = False
    """Graded twice: memory, processes or time ran out beside what the agent had left running; that
    was killed."""
    removed: tuple[str, ...] = ()
    """Paths that lay where the verifier's files belong, and were removed."""
    user: str | None = None
    cwd: str | None = None
    """None: the sandbox's own."""
    reason: Reason | None = None
    exit_code: int | None = None
    """Recorded, and no part of the verdict: that is what the reward file is for."""
    signal: int | None = None
    stdout: OutputRef | None = None
    stderr: OutputRef | None = None
    reward_file: str | None = None
    reward_bytes: BlobRef | None = None
    duration_s: float | None = None
    tests: str | None = None
    """Digest of what was brought as tests, and found again after the verifier."""
    key_inputs: dict[str, str] = Field(default_factory=dict)
    """Path → digest before the verifier."""
    programs: dict[str, str] = Field(default_factory=dict)
    """What the verifier runs by: path → digest at the start, before the agent."""
    collected: tuple[Collected, ...] = ()
    artifacts: Artifacts | None = None
    """What was taken from the agent's sandbox; in separate mode the verifier got no more."""
