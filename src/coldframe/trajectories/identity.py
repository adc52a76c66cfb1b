"""What names an attempt: task, policy, harness, verifier, and the versions of what took part."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from coldframe.protocol.models import Fingerprint
from coldframe.trajectories.base import BlobRef, Model, Sha256


class TaskIdentity(Model):
    """Which task, and exactly which version of it."""

    key: str
    name: str
    digest: Sha256 | None
    schema_version: str | None
    source: str | None = None
    repository_commit: str | None = None
    network_declared: str | None = None
    """None: the task says nothing. What was in force stands with each phase."""


class ImageIdentity(Model):
    """What the sandbox was made from."""

    name: str
    digest: str
    layers: tuple[str, ...] = ()


class ModelIdentity(Model):
    """Which policy acted. None: not told to us."""

    name: str | None = None
    base_url: str | None = None
    """Credentials redacted."""
    reported_name: str | None = None
    """What the endpoint says that it is."""
    policy_version: str | None = None
    tokenizer: str | None = None
    renderer: str | None = None
    sampling: dict[str, Any] = Field(default_factory=dict)


class HarnessIdentity(Model):
    """Which harness, its version and its settings."""

    name: str
    version: str
    settings: dict[str, Any] = Field(default_factory=dict)
    tool_schemas: tuple[dict[str, Any], ...] = ()
    prompt: tuple[BlobRef, ...] = ()
    """The messages that the model was given before its first action, one JSON object each.
    Of a task of several steps: with each of them."""


class VerifierIdentity(Model):
    """Which verifier graded."""

    name: str
    version: str | None
    digest: Sha256 | None
    """Of the task's tests directory."""


class Versions(Model):
    """Versions of everything that took part."""

    client: str | None
    protocol: int | None
    spawner_protocol: int | None = None
    node: str | None = None
    injected_binary_sha256: str | None = None
    runtime: str | None = None
    python: str | None
    kernel: str | None


class Identity(Model):
    """Everything that names an attempt."""

    run_id: str
    task: TaskIdentity
    sample: int = Field(ge=0)
    attempt: int = Field(ge=0)
    trace_id: str
    seed: int | None = None
    sandbox_id: str | None = None
    image: ImageIdentity | None = None
    initial_state: Fingerprint | None = None
    model: ModelIdentity | None = None
    harness: HarnessIdentity
    verifier: VerifierIdentity
    versions: Versions
