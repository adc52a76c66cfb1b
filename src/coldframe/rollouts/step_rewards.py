"""The reward of a task of several steps, and whether its later steps are run at all."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from coldframe.rollouts.task import RewardStrategy

Rewards = Mapping[str, float]


def total_rewards(
    strategy: RewardStrategy, verdicts: Sequence[Rewards | None]
) -> dict[str, float] | None:
    """Return the rewards of a task by part, or None where no verdict makes any.

    Args:
        strategy: `mean`: each part is averaged over the steps that have a verdict, and counts 0
            in those that do not have the part. `final`: the last step that was run decides.
        verdicts: of the steps that were run, in order; None: that step has no verdict.
    """
    if strategy == "final":
        return dict(verdicts[-1]) if verdicts and verdicts[-1] is not None else None
    given = [one for one in verdicts if one is not None]
    parts = dict.fromkeys(part for one in given for part in one)
    return {
        part: math.fsum(one.get(part, 0.0) for one in given) / len(given) for part in parts
    } or None


def why_stop(min_reward: Rewards | None, verdict: Rewards | None) -> str | None:
    """Return why no later step may follow, or None if one may.

    Args:
        min_reward: least rewards by part; a part that the verdict does not have is too little.
        verdict: of the step; None: it has none, and nothing can build on it.
    """
    if verdict is None:
        return "it has no verdict"
    for part, least in (min_reward or {}).items():
        if part not in verdict:
            return f"its reward has no part {part!r}, of which min_reward wants {least:g}"
        if verdict[part] < least:
            return f"its {part} of {verdict[part]:g} is less than min_reward = {least:g}"
    return None
