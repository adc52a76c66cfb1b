"""A batch of rollouts with the frozen manifest that says where each of them is from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from coldframe.learning.contracts.errors import ContractError
from coldframe.learning.contracts.evidence import Parameters, PolicyIdentity, Provenance
from coldframe.learning.contracts.rollouts import AnyRollout
from coldframe.learning.contracts.rules import Breaches, Rules
from coldframe.learning.contracts.values import is_number, is_plain
from coldframe.learning.files import canonical, digest_of, write_frozen
from coldframe.trajectories.base import DIGEST

rule: Rules[Sequence[AnyRollout]] = Rules()
NAMES = ("run_id", "runner", "agent", "reward_schema")
SHARED = (*NAMES, "agent_config")


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PolicyRecord(_Model):
    """A policy identity, written down."""

    checkpoint: str
    tokenizer: str
    renderer: str
    sampling: dict[str, Any]
    iteration: int


class Entry(_Model):
    """One rollout of the batch."""

    trial_name: str
    task: str
    task_digest: str
    verifier_digest: str
    split: str
    topology: str
    reward_key: str
    behaviour: PolicyRecord | None
    started_at: float
    ended_at: float


class BatchManifest(_Model):
    """What a batch was made of."""

    schema_version: Literal["coldframe.batch/1"] = "coldframe.batch/1"
    run_id: str
    runner: str
    agent: str
    agent_config: dict[str, Any]
    policy: PolicyRecord
    reward_schema: str
    entries: tuple[Entry, ...]

    @property
    def digest(self) -> str:
        """SHA-256 of its canonical JSON, hex."""
        return digest_of(self.model_dump(mode="json"))

    def write(self, path: Path) -> None:
        """Write it as a read-only file.

        Raises:
            InvalidRequestError: the file exists with other content.
        """
        write_frozen(path, canonical(self.model_dump(mode="json")) + b"\n")


@rule
def batch_is_not_empty(rollouts: Sequence[AnyRollout]) -> Breaches:
    """There is something to train on."""
    if not rollouts:
        yield "rollouts", rollouts, "the batch has no rollouts"


@rule
def trials_are_in_it_once(rollouts: Sequence[AnyRollout]) -> Breaches:
    """No trial counts twice."""
    for name, count in Counter(one.trial_name for one in rollouts).items():
        if count > 1:
            yield "trial_name", name, f"stands in the batch {count} times"


@rule
def provenance_is_known(rollouts: Sequence[AnyRollout]) -> Breaches:
    """Each rollout says where it is from."""
    for one in rollouts:
        if not isinstance(one.provenance, Provenance):
            yield f"{one.trial_name}.provenance", one.provenance, "has no provenance"


@rule
def batch_has_one_origin(rollouts: Sequence[AnyRollout]) -> Breaches:
    """One run, runner, agent and configuration of it, policy and reward schema: means are taken
    over the batch."""
    first = rollouts[0] if rollouts else None
    for one in rollouts:
        if first is None or one.policy == first.policy:
            continue
        yield f"{one.trial_name}.policy", one.policy, f"is not that of {first.trial_name}"
    known = [(one, one.provenance) for one in rollouts if one.provenance is not None]
    for one, origin in known:
        for name in SHARED:
            value = getattr(origin, name)
            if value != getattr(known[0][1], name):
                problem = f"is not that of {known[0][0].trial_name}"
                yield f"{one.trial_name}.provenance.{name}", value, problem


@rule
def origins_are_whole(rollouts: Sequence[AnyRollout]) -> Breaches:
    """Names are there, and digests are digests."""
    for field, name, value in _facts(rollouts):
        if name.endswith("_digest"):
            if not isinstance(value, str) or not DIGEST.fullmatch(value):
                yield field, value, "is no digest (32 hex digits or more)"
        elif name in NAMES and (not isinstance(value, str) or not value):
            yield field, value, "has no name"
        elif name == "agent_config" and not (isinstance(value, Mapping) and is_plain(value)):
            yield field, value, "is no map that JSON can hold"


@rule
def times_are_in_order(rollouts: Sequence[AnyRollout]) -> Breaches:
    """A trial begins before it ends."""
    for one in rollouts:
        origin = one.provenance
        if origin is None:
            continue
        times = (origin.started_at, origin.ended_at)
        if not all(is_number(time) for time in times) or not 0 <= times[0] <= times[1]:
            yield f"{one.trial_name}.provenance.started_at", times, "do not follow each other"


@rule
def task_keys_mean_one_task(rollouts: Sequence[AnyRollout]) -> Breaches:
    """Samples of one task are samples of the same task, graded by the same verifier."""
    digests: dict[tuple[str, str], str] = {}
    for one in rollouts:
        for name in ("task_digest", "verifier_digest") if one.provenance is not None else ():
            found, known = getattr(one.provenance, name), (one.task_name, name)
            if digests.setdefault(known, found) != found:
                field = f"{one.trial_name}.provenance.{name}"
                yield field, found, f"that of task {one.task_name!r} is {digests[known]} elsewhere"


def _facts(rollouts: Sequence[AnyRollout]) -> Iterator[tuple[str, str, Any]]:
    for one in rollouts:
        if one.provenance is not None:
            for name, value in vars(one.provenance).items():
                yield f"{one.trial_name}.provenance.{name}", name, value


@dataclass(frozen=True)
class Batch:
    """Rollouts that may be trained on together.

    Raises:
        ContractError: they may not.
    """

    rollouts: tuple[AnyRollout, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "rollouts", tuple(self.rollouts))
        rule.enforce("batch", self.rollouts)

    @property
    def manifest(self) -> BatchManifest:
        """Say what it was made of."""
        first = self.rollouts[0]
        shared = {name: getattr(_origin(first), name) for name in SHARED}
        return BatchManifest(
            **shared | {"agent_config": Parameters(shared["agent_config"]).plain},
            policy=_record(first.policy),
            entries=tuple(_entry(one) for one in self.rollouts),
        )


def _origin(rollout: AnyRollout) -> Provenance:
    if rollout.provenance is None:
        raise ContractError(rollout.trial_name, "provenance", None, "has no provenance")
    return rollout.provenance


def _record(policy: PolicyIdentity) -> PolicyRecord:
    return PolicyRecord(**vars(policy) | {"sampling": Parameters(policy.sampling).plain})


def _entry(rollout: AnyRollout) -> Entry:
    origin = _origin(rollout)
    return Entry(
        trial_name=rollout.trial_name,
        task=rollout.task_name,
        task_digest=origin.task_digest,
        verifier_digest=origin.verifier_digest,
        split=rollout.split,
        topology=rollout.topology,
        reward_key=rollout.reward_key,
        behaviour=None if rollout.behaviour is None else _record(rollout.behaviour),
        started_at=origin.started_at,
        ended_at=origin.ended_at,
    )
