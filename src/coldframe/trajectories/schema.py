"""What a trajectory holds. Frozen, versioned, and honest about what is not known.

Times are Unix seconds on the clock of the client's machine unless a field says otherwise,
durations are seconds, sizes are bytes. A field that is None although the design asks for it
is listed in `unknown` with the reason, so that "nothing happened" and "nobody looked" differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import StrEnum
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from coldframe.protocol.errors import Side
from coldframe.protocol.models import Fingerprint, ProcessInfo, Reason, Resources
from coldframe.trajectories.base import BlobRef, Model, OutputRef, Sha256
from coldframe.trajectories.files import ChangedFiles
from coldframe.trajectories.origin import Origin
from coldframe.trajectories.phases import PhaseRecord, TamperEvent
from coldframe.trajectories.verification import Verification

SCHEMA_VERSION: Literal["coldframe.trajectory/4"] = "coldframe.trajectory/4"
REWARD_SCHEMA_VERSION = "coldframe.reward/1"


class Shown(Model):
    """What the model was shown, apart from the whole."""

    rule: str
    """Name and version of the window rule, such as `head_tail_10k@1`."""
    text: BlobRef
    omitted_characters: int = Field(default=0, ge=0)


class CallOutcome(StrEnum):
    """What is known of one call."""

    RESULT = "result"
    """It ran and ended; `reason` says how."""
    NOT_EXECUTED = "not_executed"
    """It was refused before anything ran; `error` says why."""
    INTERRUPTED = "interrupted"
    """The episode ended while it ran; the kill came from us."""
    LOST = "lost"
    """Perhaps executed; the sandbox or its node failed."""


class CallError(Model):
    """Why a call has no result."""

    code: str
    side: Side
    message: str


class Call(Model):
    """One command in the sandbox."""

    tool_call_id: str | None = None
    operation_id: str
    request: dict[str, Any]
    """The request as it was normalised, secrets redacted."""
    outcome: CallOutcome
    error: CallError | None = None
    reason: Reason | None = None
    exit_code: int | None = None
    signal: int | None = None
    stdout: OutputRef | None = None
    stderr: OutputRef | None = None
    resources: Resources | None = None
    leftovers: tuple[ProcessInfo, ...] = ()
    started_at: float
    ended_at: float
    exec_s: float = Field(ge=0)
    """As the sandbox measured it; what lies between is transport and queueing."""
    queue_s: float = Field(ge=0)
    """Time of the call that the command itself did not run."""
    files: ChangedFiles | None = None
    """What became of the files from the look before the command to the one after it."""


class ParseFailure(Model):
    """An action that does not follow the tool schema; the policy's own doing."""

    code: str
    message: str
    tool_call_id: str | None = None


class Usage(Model):
    """Tokens as the endpoint counted them. None: it did not say."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None
    cached_tokens: int | None = None


class ShownMessage(Model):
    """A message that was given to the model after this step's action, in order."""

    role: str
    tool_call_id: str | None = None
    shown: Shown


class Step(Model):
    """One action and everything that followed from it."""

    index: int = Field(ge=0)
    source: Literal["model", "solution", "atif"]
    action: BlobRef | None
    """The raw action: the endpoint's answer byte for byte, or the solution script; of `atif`, the
    step as the document has it that it was imported from."""
    finish_reason: str | None = None
    usage: Usage = Usage()
    model_attempts: int | None = Field(default=0, ge=0)
    """Requests to the endpoint that this action took, retries included."""
    parse_failures: tuple[ParseFailure, ...] = ()
    calls: tuple[Call, ...] = ()
    shown: tuple[ShownMessage, ...] = ()
    started_at: float | None
    ended_at: float | None
    model_s: float | None = Field(default=0.0, ge=0)
    model_queue_s: float | None = None
    """Time spent waiting between retries of the endpoint; None without a model."""


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


class FileDiff(Model):
    """How the files differ between the start and the end of the agent's time."""

    before: str
    after: str
    changed: bool
    excluded: tuple[str, ...] = ()


class Termination(StrEnum):
    """Why the agent's time ended."""

    FINISHED = "finished"
    AGENT_DEADLINE = "agent_deadline"
    STEP_LIMIT = "step_limit"
    TOKEN_LIMIT = "token_limit"
    CONTEXT_LIMIT = "context_limit"
    PARSE_FAILURES = "parse_failures"
    UNKNOWN = "unknown"
    """It ended by itself; whoever ran it did not keep why."""
    FAILED = "failed"
    """Something else than the policy ended it; `failure` says what."""


class Failure(Model):
    """Why there is no verdict."""

    side: Side
    code: str
    message: str
    retryable: bool = False
    execution: str | None = None
    phase: str
    evidence: dict[str, Any] = Field(default_factory=dict)


class PolicyFailure(Model):
    """The policy's own failure: the verifier still judges what it left."""

    code: str
    message: str


class Times(Model):
    """T_run = create + sum of (model + exec) + verify + delete, and what is left beside it.

    None: not known, which only an imported attempt has.
    """

    queue_s: float | None = 0.0
    """From the batch's start until this attempt had its turn; not part of T_run."""
    image_s: float | None = 0.0
    """Building or finding the image; shared by all attempts on it, not part of T_run."""
    create_s: float | None = 0.0
    model_s: float | None = 0.0
    exec_s: float | None = 0.0
    verify_s: float | None = 0.0
    delete_s: float | None = 0.0
    other_s: float | None = 0.0
    """Wall time from create to delete that none of the above explains."""
    total_s: float | None = 0.0
    """Wall time from create to delete."""

    @property
    def run_s(self) -> float | None:
        """T_run of the design, in seconds; None if a part of it is not known."""
        return known_sum([self.create_s, self.model_s, self.exec_s, self.verify_s, self.delete_s])


class Totals(Model):
    """Sums over the steps."""

    steps: int = 0
    calls: int | None = 0
    parse_failures: int | None = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cpu_s: float | None = None
    memory_peak_bytes: int | None = None


class TaskStepRecord(Model):
    """One step of a task of several: what the agent did in it, and what that was worth."""

    name: str
    first_step: int = Field(ge=0)
    """Index into `steps`; the task step's own are `steps[first_step:end_step]`."""
    end_step: int = Field(ge=0)
    prompt: tuple[BlobRef, ...] = ()
    """The messages that the model was given before this step's first action."""
    termination: Termination
    policy_failure: PolicyFailure | None = None
    rewards: dict[str, float] | None = None
    failure: Failure | None = None
    verification: Verification | None = None
    min_reward_missed: bool = False
    """Its reward was below `min_reward`: the later steps were not run."""
    model_s: float | None = 0.0
    exec_s: float | None = 0.0
    verify_s: float | None = 0.0
    totals: Totals

    @model_validator(mode="after")
    def _aligned(self) -> TaskStepRecord:
        if self.end_step < self.first_step or self.totals.steps != self.end_step - self.first_step:
            raise ValueError(f"step {self.name!r}: its range is not what its totals count")
        return self


class Trajectory(Model):
    """One attempt, from its first byte to its verdict or its failure: exactly one of them."""

    schema_version: Literal["coldframe.trajectory/4"] = SCHEMA_VERSION
    identity: Identity
    origin: Origin | None = None
    """Of an attempt that was made elsewhere and imported: by what, and what it left."""
    started_at: float | None
    ended_at: float | None
    clock: str | None = "client CLOCK_REALTIME"
    steps: tuple[Step, ...] = ()
    termination: Termination
    policy_failure: PolicyFailure | None = None
    phases: tuple[PhaseRecord, ...] = ()
    """In order; what lies between two of them is the change from one to the other."""
    task_steps: tuple[TaskStepRecord, ...] = ()
    """Of a task of several steps; the verifications are there then."""
    tamper: tuple[TamperEvent, ...] = ()
    verification: Verification | None = None
    rewards: dict[str, float] | None = None
    reward_schema_version: str = REWARD_SCHEMA_VERSION
    failure: Failure | None = None
    final_state: Fingerprint | None = None
    """After the harness was killed and before the tests arrived."""
    file_diff: FileDiff | None = None
    files_excluded: tuple[str, ...] = ()
    """What the looks at files during the agent's time leave out."""
    times: Times
    totals: Totals
    warnings: tuple[str, ...] = ()
    unknown: dict[str, str] = Field(default_factory=dict)
    """Dotted field → why it is not known."""

    @field_validator("rewards")
    @classmethod
    def _finite(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        if value is not None and not value:
            raise ValueError("rewards hold at least one part")
        for name, reward in (value or {}).items():
            if not math.isfinite(reward):
                raise ValueError(f"reward {name!r} is not finite")
        return value

    @model_validator(mode="after")
    def _one_ending(self) -> Trajectory:
        if (self.rewards is None) == (self.failure is None):
            raise ValueError("an attempt ends in rewards or in a failure, exactly one of them")
        return self

    @model_validator(mode="after")
    def _explained(self) -> Trajectory:
        for name in _ALWAYS_SAID:
            value: Any = self
            for field in name.split("."):
                value = getattr(value, field)
            if value is None and name not in self.unknown:
                raise ValueError(f"{name} is not known, and `unknown` does not say why")
        return self

    @property
    def score(self) -> float | None:
        """The single number of the verdict; see `score`. None without a verdict."""
        return None if self.rewards is None else score(self.rewards)


_ALWAYS_SAID = (
    *("started_at", "ended_at", "clock", "totals.calls", "totals.parse_failures"),
    *("identity.task.digest", "identity.task.schema_version"),
    *("identity.verifier.version", "identity.verifier.digest"),
    *(f"identity.versions.{name}" for name in ("client", "protocol", "python", "kernel")),
    *(f"times.{name}" for name in Times.model_fields),
)
"""What every attempt of ours knows: where it is None, somebody has to say why."""


def known_sum(values: Iterable[float | None]) -> float | None:
    """Return a sum; over something unknown it is unknown, not too small."""
    known = [*values]
    return None if None in known else math.fsum(one for one in known if one is not None)


def score(rewards: dict[str, float]) -> float:
    """Return the part named `reward` if there is one, else the mean of the parts."""
    if "reward" in rewards:
        return rewards["reward"]
    return math.fsum(rewards.values()) / len(rewards)
