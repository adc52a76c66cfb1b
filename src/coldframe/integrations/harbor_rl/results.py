"""What comes back: rollouts by group with the rejected ones beside them, or rewards alone."""

from __future__ import annotations

from dataclasses import dataclass

from coldframe.learning.contracts import ContractError, PolicyRollout


@dataclass(frozen=True)
class Rejected:
    """A trial that may not be trained on, and why. It is no sample of reward 0."""

    trial_name: str
    error: ContractError


@dataclass(frozen=True)
class Group:
    """The samples of one task; a baseline is taken over `rollouts` alone."""

    key: str
    rollouts: tuple[PolicyRollout, ...]
    rejected: tuple[Rejected, ...]
    missing: int
    """Samples that were asked for and never ended, because the job was stopped."""


@dataclass(frozen=True)
class Generation:
    """What came of a job for training."""

    run_id: str
    groups: tuple[Group, ...]
    """In the order in which tasks were asked for."""
    retries: int
    """Infrastructure tries that Harbor made again; none of them is a sample."""
    stopped: str | None
    """Which cap ended the job early."""

    @property
    def rollouts(self) -> tuple[PolicyRollout, ...]:
        """All rollouts of all groups."""
        return tuple(rollout for group in self.groups for rollout in group.rollouts)


@dataclass(frozen=True)
class EvaluationRecord:
    """What a trial of an evaluation task was worth. Holds no tokens: it cannot be trained on."""

    trial_name: str
    task_name: str
    key: str
    reward: float | None
    """None: there is none, and `failure` says why. Never 0 in its place."""
    failure: str | None


@dataclass(frozen=True)
class Evaluation:
    """What came of a job for evaluation."""

    run_id: str
    records: tuple[EvaluationRecord, ...]
    retries: int
    stopped: str | None
