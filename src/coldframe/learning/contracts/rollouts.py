"""What a trainer is given. Neither type can exist without having passed every rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from coldframe.learning.contracts import content, policies, spans, trials
from coldframe.learning.contracts.evidence import PolicyIdentity, Provenance, Trial
from coldframe.learning.contracts.rules import Rules
from coldframe.learning.contracts.topologies import LINEAR, Span, Topology

__all__ = ["PolicyRollout", "TokenRollout"]


@dataclass(frozen=True, kw_only=True)
class _Rollout:
    """What both types hold. Columns have one row per turn."""

    trial_name: str
    task_name: str
    prompt_token_ids: Sequence[Sequence[int]]
    """What each call of the model was given, whole."""
    completion_token_ids: Sequence[Sequence[int]]
    reward: float
    reward_key: str
    split: str
    policy: PolicyIdentity
    """Which policy this is to train."""
    topology: str
    spans: Sequence[Span]
    """Which turns are one conversation; they cover every turn once, in order."""
    behaviour: PolicyIdentity | None = None
    """The policy that sampled, if that is another: the mark of off-policy data."""
    provenance: Provenance | None = None
    remarks: Sequence[str] = ()
    """What the topology or the type decided about this trial that a reader should know."""

    @property
    def off_policy(self) -> bool:
        """Whether another policy sampled than is to be trained."""
        return self.behaviour is not None

    def _enforce(self, own: Rules[Any]) -> None:
        """Apply the rules, and in their midst those of the type."""
        tables: tuple[Rules[Any], ...] = (content.rule, own, spans.rule, policies.rule)
        for table in tables:
            table.enforce(self.trial_name, self)

    def _freeze(self, *columns: str) -> None:
        for name in columns:
            rows = tuple(tuple(row) for row in getattr(self, name))
            object.__setattr__(self, name, rows)
        for name in ("spans", "remarks"):
            object.__setattr__(self, name, tuple(getattr(self, name)))


@dataclass(frozen=True, kw_only=True)
class PolicyRollout(_Rollout):
    """A trial for algorithms that weigh the new policy against the one that sampled.

    Raises:
        ContractError: a rule is broken; made by hand, by `dataclasses.replace` or from a trial.
    """

    old_logprobs: Sequence[Sequence[float]]
    """Of each completion token, as the engine gave them: finite, at most 0."""

    def __post_init__(self) -> None:
        self._enforce(content.logprob_rule)
        self._freeze("prompt_token_ids", "completion_token_ids", "old_logprobs")

    @classmethod
    def from_trial(
        cls,
        trial: Trial,
        *,
        reward_key: str = "reward",
        topology: Topology | str = LINEAR,
        policy: PolicyIdentity | None = None,
        behaviour: PolicyIdentity | None = None,
    ) -> PolicyRollout:
        """Make a rollout of a trial that proves to be one.

        Args:
            reward_key: which part of the verdict is the reward.
            topology: how its conversations become rows; one of them or its name.
            policy: which policy is to be trained; by default the one that sampled.
            behaviour: the policy that sampled; to be given when it is another than `policy`,
                and only then.
        Raises:
            ContractError: it does not; the first rule that is broken, by name.
        """
        facts, logprobs = trials.admit(trial, reward_key, topology, policy, behaviour)
        return cls(old_logprobs=logprobs, **facts)


@dataclass(frozen=True, kw_only=True)
class TokenRollout(_Rollout):
    """A trial for algorithms that need no log-probabilities of the policy that sampled.

    Has none, so that it cannot be taken for a `PolicyRollout`.
    Raises:
        ContractError: as for `PolicyRollout`, or the algorithm is not declared.
    """

    algorithm: str
    """Name and version of what declares to need none, as `rejection_sampling@1`."""

    def __post_init__(self) -> None:
        self._enforce(content.algorithm_rule)
        self._freeze("prompt_token_ids", "completion_token_ids")

    @classmethod
    def from_trial(
        cls,
        trial: Trial,
        *,
        algorithm: str,
        reward_key: str = "reward",
        topology: Topology | str = LINEAR,
        policy: PolicyIdentity | None = None,
        behaviour: PolicyIdentity | None = None,
    ) -> TokenRollout:
        """As `PolicyRollout.from_trial`, for an algorithm that declares to need no more."""
        facts, logprobs = trials.admit(trial, reward_key, topology, policy, behaviour)
        if logprobs is not None:
            given = f"log-probabilities were captured and not taken: {algorithm} needs none"
            facts["remarks"] = (*facts["remarks"], given)
        return cls(algorithm=algorithm, **facts)


AnyRollout = PolicyRollout | TokenRollout
"""For what needs no log-probabilities to do its work."""
