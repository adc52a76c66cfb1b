"""What all attempts of a run have in common."""

from __future__ import annotations

from dataclasses import dataclass, field

from coldframe.harnesses.base import Limits, ModelSettings
from coldframe.rollouts.task import Task
from coldframe.trajectories.redaction import secret_values


@dataclass(frozen=True)
class AttemptSettings:
    """What all attempts of a run have in common."""

    run_id: str
    harness: str
    limits: Limits = field(default_factory=Limits)
    model: ModelSettings | None = None
    endpoint: ModelSettings | None = None
    """Where the harness reaches the model, if something stands between."""
    seed: int | None = None
    """Sample k is sampled with seed + k, when the endpoint takes a seed."""
    wrong: str | None = None
    """Run this wrong solution in place of the reference."""

    def secrets(self, task: Task) -> set[str]:
        """Return the values that no record of an attempt at a task may hold."""
        known = set(task.secrets)
        for server in task.offers.mcp_servers:
            known |= secret_values(server.headers)
        verifiers = (step.verifier for step in task.steps)
        for env in (task.environment.env, task.solution_env, *(one.env for one in verifiers)):
            known |= secret_values(env)
        for model in (self.model, self.endpoint):
            if model is not None and model.api_key:
                known.add(model.api_key)
        return known
