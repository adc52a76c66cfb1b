"""The rules about which policy sampled, and which one is to be trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from coldframe.learning.contracts.evidence import PolicyIdentity
from coldframe.learning.contracts.rules import Breaches, Rules
from coldframe.learning.contracts.values import is_plain
from coldframe.trajectories.base import DIGEST

if TYPE_CHECKING:
    from coldframe.learning.contracts.rollouts import AnyRollout

rule: Rules[AnyRollout] = Rules()


@rule
def policy_is_named(rollout: AnyRollout) -> Breaches:
    """There is a policy identity, and the mark of off-policy data is one too."""
    if not isinstance(rollout.policy, PolicyIdentity):
        yield "policy", rollout.policy, "has no policy identity"
    if rollout.behaviour is not None and not isinstance(rollout.behaviour, PolicyIdentity):
        yield "behaviour", rollout.behaviour, "is no policy identity"


@rule
def checkpoint_is_a_digest(rollout: AnyRollout) -> Breaches:
    """Weights are named by their content: `latest` is another thing tomorrow."""
    for field, policy in _policies(rollout):
        if not isinstance(policy.checkpoint, str) or not DIGEST.fullmatch(policy.checkpoint):
            yield f"{field}.checkpoint", policy.checkpoint, "is no digest (32 hex digits or more)"


@rule
def tokenizer_is_named(rollout: AnyRollout) -> Breaches:
    """Ids mean nothing without their tokenizer."""
    for field, policy in _policies(rollout):
        if not isinstance(policy.tokenizer, str) or not policy.tokenizer:
            yield f"{field}.tokenizer", policy.tokenizer, "has no tokenizer"


@rule
def renderer_is_named(rollout: AnyRollout) -> Breaches:
    """What made ids of messages is known, with its version."""
    for field, policy in _policies(rollout):
        if not isinstance(policy.renderer, str) or not policy.renderer:
            yield f"{field}.renderer", policy.renderer, "has no renderer or template version"


@rule
def sampling_is_stated(rollout: AnyRollout) -> Breaches:
    """The parameters that shaped the distribution are there, as JSON can hold them."""
    for field, policy in _policies(rollout):
        if not isinstance(policy.sampling, Mapping) or not policy.sampling:
            yield f"{field}.sampling", policy.sampling, "has no sampling parameters"
            continue
        for name, value in policy.sampling.items():
            if not isinstance(name, str) or not is_plain(value):
                yield (
                    f"{field}.sampling[{name!r}]",
                    value,
                    "is no finite number, text, bool, null or list of them",
                )


@rule
def iteration_is_counted(rollout: AnyRollout) -> Breaches:
    """Which iteration of training sampled is an int from 0."""
    for field, policy in _policies(rollout):
        if type(policy.iteration) is not int or policy.iteration < 0:
            yield f"{field}.iteration", policy.iteration, "is no iteration (an int from 0)"


@rule
def mark_names_another_policy(rollout: AnyRollout) -> Breaches:
    """On-policy data is not marked as off-policy."""
    if rollout.behaviour is not None and rollout.behaviour == rollout.policy:
        problem = "marked as off-policy, but sampled by the policy that is to be trained"
        yield "behaviour", rollout.behaviour, problem


def _policies(rollout: AnyRollout) -> Iterator[tuple[str, PolicyIdentity]]:
    for field in ("policy", "behaviour"):
        policy = getattr(rollout, field)
        if isinstance(policy, PolicyIdentity):
            yield field, policy
