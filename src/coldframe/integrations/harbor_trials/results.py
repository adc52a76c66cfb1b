"""A trial's result.json, as Harbor 0.18 and later write it; what it does not say is None.

The models have Harbor's own fields, of which those that are not used here are passed over.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Timing(_Model):
    started_at: datetime | None = None
    finished_at: datetime | None = None

    @property
    def seconds(self) -> float | None:
        """How long it took; None if its begin or end is not known."""
        begun, ended = moment(self.started_at), moment(self.finished_at)
        return None if begun is None or ended is None else max(ended - begun, 0.0)


class ExceptionInfo(_Model):
    exception_type: str
    exception_message: str = ""
    exception_traceback: str = ""


class VerifierResult(_Model):
    rewards: dict[str, Any] | None = None


class ModelInfo(_Model):
    name: str
    provider: str | None = None


class AgentInfo(_Model):
    name: str
    version: str
    model_info: ModelInfo | None = None


class AgentConfig(_Model):
    model_name: str | None = None
    kwargs: dict[str, Any] = {}


class TaskConfig(_Model):
    git_commit_id: str | None = None


class TrialConfig(_Model):
    agent: AgentConfig = AgentConfig()
    task: TaskConfig = TaskConfig()


class Part(_Model):
    """What a trial and each of its steps have alike."""

    verifier_result: VerifierResult | None = None
    exception_info: ExceptionInfo | None = None
    agent_execution: Timing | None = None
    verifier: Timing | None = None

    @property
    def rewards(self) -> dict[str, Any] | None:
        """As they stand there, unchecked."""
        return self.verifier_result.rewards if self.verifier_result else None


class StepResult(Part):
    step_name: str


class TrialResult(Part):
    id: str
    task_name: str
    trial_name: str
    source: str | None = None
    task_checksum: str | None = None
    config: TrialConfig = TrialConfig()
    agent_info: AgentInfo
    started_at: datetime | None = None
    finished_at: datetime | None = None
    environment_setup: Timing | None = None
    agent_setup: Timing | None = None
    step_results: list[StepResult] | None = None


def moment(value: datetime | None) -> float | None:
    """Return Unix seconds; None for a time of day without its zone, which could be any."""
    return None if value is None or value.tzinfo is None else value.timestamp()
