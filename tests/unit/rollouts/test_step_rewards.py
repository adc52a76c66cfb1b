"""The reward of many steps is what is learnt from; its arithmetic has no second chance."""

from __future__ import annotations

import pytest

from coldframe.rollouts.step_rewards import Rewards, total_rewards, why_stop
from coldframe.rollouts.task import RewardStrategy


@pytest.mark.parametrize(
    ("strategy", "verdicts", "total"),
    [
        ("mean", [{"reward": 1.0}, {"reward": 0.0}], {"reward": 0.5}),
        ("mean", [{"reward": 1.0}, {"style": 0.5}], {"reward": 0.5, "style": 0.25}),
        ("mean", [{"reward": 1.0}, None, {"reward": 0.5}], {"reward": 0.75}),
        ("mean", [None, {"a": 3.0}], {"a": 3.0}),
        ("mean", [None, None], None),
        ("mean", [], None),
        ("final", [{"reward": 1.0}, {"style": 0.5}], {"style": 0.5}),
        ("final", [{"reward": 1.0}, None], None),
        ("final", [], None),
    ],
)
def test_total_rewards_of_steps_follow_their_strategy(
    strategy: RewardStrategy, verdicts: list[Rewards | None], total: Rewards | None
) -> None:
    """A missing part counts 0 in a step with a verdict; a missing verdict counts nowhere."""
    assert total_rewards(strategy, verdicts) == total


@pytest.mark.parametrize(
    ("least", "verdict", "reason"),
    [
        (None, {"reward": 0.0}, None),
        ({"reward": 0.5}, {"reward": 0.5}, None),
        ({"reward": 0.5}, {"reward": 0.4}, "reward"),
        ({"reward": -1.0}, {"reward": -0.5}, None),
        ({"reward": 0.0}, {"tests": 1.0}, "'reward'"),
        ({"tests": 1.0, "style": 0.5}, {"tests": 1.0, "style": 0.5, "more": 0.0}, None),
        ({"tests": 1.0, "style": 0.5}, {"tests": 1.0, "style": 0.4}, "style"),
        ({"tests": 1.0}, None, "verdict"),
        (None, None, "verdict"),
    ],
)
def test_later_steps_are_stopped_below_the_least_reward(
    least: Rewards | None, verdict: Rewards | None, reason: str | None
) -> None:
    """The gate is what keeps a second step from being graded on ruins."""
    found = why_stop(least, verdict)

    assert (found is None) is (reason is None)
    assert reason is None or reason in (found or "")
