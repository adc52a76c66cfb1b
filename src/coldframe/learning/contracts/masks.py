"""Which tokens are trained: rules with a name and a version. A version never changes.

Prompts are never trained. A rule says of each completion token whether it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coldframe.learning.contracts.rollouts import AnyRollout

Mask = tuple[tuple[bool, ...], ...]
"""One row per turn, one value per completion token."""


@dataclass(frozen=True)
class LossMask:
    """A rule. `of` is pure, and returns a value for each completion token of each turn."""

    name: str
    """With its version, as `completions@1`."""
    of: Callable[[AnyRollout], Mask]


def _where(rollout: AnyRollout, trained: Callable[[str, bool], bool]) -> Mask:
    """Return a mask by turn; `trained` gets the kind of its span and whether it is the last."""
    return tuple(
        (trained(span.kind, turn == span.end_turn - 1),) * len(rollout.completion_token_ids[turn])
        for span in rollout.spans
        for turn in range(span.first_turn, span.end_turn)
    )


COMPLETIONS = LossMask("completions@1", lambda rollout: _where(rollout, lambda kind, last: True))
"""All that the policy wrote."""
NO_SUB_AGENTS = LossMask(
    "no_sub_agents@1", lambda rollout: _where(rollout, lambda kind, last: kind != "sub_agent")
)
"""What it wrote itself; what its sub-agents wrote is context."""
LAST_TURNS = LossMask("last_turns@1", lambda rollout: _where(rollout, lambda kind, last: last))
"""The last turn of each conversation."""

MASKS = {one.name: one for one in (COMPLETIONS, NO_SUB_AGENTS, LAST_TURNS)}
