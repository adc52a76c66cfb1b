"""What a trajectory holds. Frozen, versioned, and honest about what is not known.

Times are Unix seconds on the clock of the client's machine unless a field says otherwise,
durations are seconds, sizes are bytes. A field that is None although the design asks for it
is listed in `unknown` with the reason, so that "nothing happened" and "nobody looked" differ.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from coldframe.protocol.errors import Side
from coldframe.protocol.models import Fingerprint
from coldframe.trajectories.base import BlobRef, Model
from coldframe.trajectories.files import FileDiff
from coldframe.trajectories.identity import Identity
from coldframe.trajectories.means import mean
from coldframe.trajectories.origin import Origin
from coldframe.trajectories.phases import PhaseRecord, TamperEvent
from coldframe.trajectories.steps import Step
from coldframe.trajectories.totals import Totals, known_sum
from coldframe.trajectories.verification import Verification

SCHEMA_VERSION: Literal["coldframe.trajectory/4"] = "coldframe.trajectory/4"
REWARD_SCHEMA_VERSION = "coldframe.reward/1"


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


def score(rewards: dict[str, float]) -> float:
    """Return the part named `reward` if there is one, else the mean of the parts."""
    if "reward" in rewards:
        return rewards["reward"]
    return mean((value, 1) for value in rewards.values())
