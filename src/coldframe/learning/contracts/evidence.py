"""What a trial says of itself, as it was found: nothing in here is checked or converted.

Fields that come out of a harness, an engine or a verifier are typed `Any`: they may hold
whatever those wrote, and it is for the rules to say so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class Parameters(Mapping[str, Any]):
    """A map that cannot be changed, can be compared, hashed and pickled.

    So it is all the way down: maps in it are of this kind, too, and lists are tuples.
    """

    __slots__ = ("_items",)

    def __init__(self, values: Mapping[str, Any]) -> None:
        items = [(name, _frozen(value)) for name, value in values.items()]
        self._items = tuple(sorted(items, key=lambda item: str(item[0])))

    @property
    def plain(self) -> dict[str, Any]:
        """The same as JSON's dicts and lists, to be changed at will."""
        return {name: _thawed(value) for name, value in self._items}

    def __getitem__(self, name: str) -> Any:
        return dict(self._items)[name]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapping) and dict(self._items) == dict(Parameters(other)._items)

    def __iter__(self) -> Iterator[str]:
        return iter([name for name, _ in self._items])

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(self._items)

    def __repr__(self) -> str:
        return repr(self.plain)


def _frozen(value: Any) -> Any:
    if isinstance(value, Mapping):
        return Parameters(value)
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def _thawed(value: Any) -> Any:
    if isinstance(value, Parameters):
        return value.plain
    return [*map(_thawed, value)] if isinstance(value, tuple) else value


@dataclass(frozen=True)
class PolicyIdentity:
    """Which policy sampled, to the last thing that its log-probabilities depend on."""

    checkpoint: str
    """Digest of the weights: hex digits, with or without `sha256:` or the like before them."""
    tokenizer: str
    """Name and version."""
    renderer: str
    """Of the chat template or renderer: name and version, or a digest."""
    sampling: Mapping[str, Any]
    """Parameters of sampling by name, as sent: temperature, top_p..."""
    iteration: int
    """Of the training run, from 0."""

    def __post_init__(self) -> None:
        if isinstance(self.sampling, Mapping):
            object.__setattr__(self, "sampling", Parameters(self.sampling))


@dataclass(frozen=True)
class Call:
    """One call of the model, as whoever carried it recorded it: what proves whose a row is."""

    call_id: str
    prompt_tokens: int
    """As the engine counted them."""
    completion_tokens: int
    policy: str | None = None
    """Digest of the weights that answered, where the engine says it."""


@dataclass(frozen=True)
class Totals:
    """Tokens of all calls of a segment as the engine counted them, whether or not their ids
    were kept. If the rows add up to both, no row is missing in either column."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Segment:
    """A conversation: each prompt in it goes on where the turn before it ended.

    The three columns have one row per turn.
    """

    prompt_token_ids: Any
    completion_token_ids: Any
    logprobs: Any = None
    calls: Sequence[Call] = ()
    """One per turn; or `totals`, where single calls are not known."""
    totals: Totals | None = None
    name: str = "main"
    kind: str = "main"
    """`main`, `sub_agent`, or `compaction`: goes on in the place of its owner, from a summary."""
    owner: str | None = None
    """Name of the segment that began this one; None for the main one."""
    order: int | None = None
    """Place among the trial's segments by their begin, from 0. None: not stated."""
    began: str | None = None
    """Why it is no part of an earlier one, in words, where that was recorded."""


@dataclass(frozen=True)
class TrialStep:
    """One step of a task of several."""

    name: str
    segments: Sequence[Segment]
    rewards: Any
    """By key; None: its verifier gave none."""
    exception: str | None = None


@dataclass(frozen=True)
class Provenance:
    """Where a trial comes from; a batch needs it of each of its rollouts."""

    run_id: str
    runner: str
    """What ran it, with its version: `harbor 0.18.0`, `coldframe 0.1.0`."""
    agent: str
    """Name and version."""
    agent_config: Mapping[str, Any]
    task_digest: str
    """SHA-256 of the task, hex."""
    verifier_digest: str
    """SHA-256 of what computed the reward, hex."""
    reward_schema: str
    """Name and version."""
    started_at: float
    """Unix seconds."""
    ended_at: float

    def __post_init__(self) -> None:
        if isinstance(self.agent_config, Mapping):
            object.__setattr__(self, "agent_config", Parameters(self.agent_config))


@dataclass(frozen=True)
class Trial:
    """One sample of one task, with everything that was kept of it."""

    trial_name: str
    task_name: str
    split: Any
    rewards: Any
    """By key; None: there was no verdict."""
    segments: Sequence[Segment] = ()
    """Of a task of one step."""
    steps: Sequence[TrialStep] = ()
    """Of a task of several, those that were run."""
    exception: str | None = None
    policy: PolicyIdentity | None = None
    """Which one sampled."""
    capture: str = "tokens"
    """How much was captured: `tokens`, `logprobs`, or `text`."""
    provenance: Provenance | None = None
