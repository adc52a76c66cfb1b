"""Count what a run's attempts came to. A missing verdict is counted apart, never as 0."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from coldframe.rollouts.directory import SUMMARY_SCHEMA
from coldframe.trajectories.schema import TaskStepRecord, Times, Trajectory, score
from coldframe.trajectories.totals import known_sum


def passed(rewards: dict[str, float], threshold: float) -> bool:
    """Whether a verdict passes: its `reward` part, or every part, reaches the threshold."""
    if "reward" in rewards:
        return rewards["reward"] >= threshold
    return all(value >= threshold for value in rewards.values())


def pass_at_k(verdicts: int, passes: int, k: int) -> float | None:
    """Return the unbiased estimate of passing at least once in k tries.

    Returns:
        None with fewer than k verdicts: it cannot be told.
    Source: Chen et al., arXiv:2107.03374, equation 1.
    """
    if verdicts < k:
        return None
    return 1.0 - math.comb(verdicts - passes, k) / math.comb(verdicts, k)


def summarise(
    run_id: str,
    trajectories: Iterable[Trajectory],
    *,
    samples: int,
    thresholds: dict[str, float],
    refused: dict[str, str],
    interrupted: bool,
) -> dict[str, Any]:
    """Return the summary of a run as JSON.

    Args:
        samples: asked for, per task.
        thresholds: by task key, for every task that was not refused.
        refused: by task, why it was not run.
    """
    by_task: dict[str, list[Trajectory]] = {key: [] for key in thresholds}
    for one in trajectories:
        by_task.setdefault(one.identity.task.key, []).append(one)
    tasks = {
        key: _task(attempts, samples, thresholds.get(key, 1.0))
        for key, attempts in sorted(by_task.items())
    }
    every = [one for attempts in by_task.values() for one in attempts]
    verdicts = sum(task["verdicts"] for task in tasks.values())
    return {
        "schema_version": SUMMARY_SCHEMA,
        "run_id": run_id,
        "interrupted": interrupted,
        "complete": all(task["missing"] == 0 for task in tasks.values()) and not refused,
        "refused": dict(sorted(refused.items())),
        "tasks": tasks,
        "totals": {
            "tasks": len(tasks),
            "samples": samples * len(tasks),
            "attempts": len(every),
            "verdicts": verdicts,
            "passes": sum(task["passes"] for task in tasks.values()),
            "missing": samples * len(tasks) - verdicts,
            "failed_attempts": sum(1 for one in every if one.failure is not None),
            "failures_by_side": _sides(every),
            "tamper": _tamper(every),
            "egress": _egress(every),
            "phases": _phases(every),
            "steps": sum(one.totals.steps for one in every),
            "prompt_tokens": known_sum(one.totals.prompt_tokens for one in every),
            "completion_tokens": known_sum(one.totals.completion_tokens for one in every),
            "times": _times([one.times for one in every]),
        },
    }


def final_attempts(attempts: Sequence[Trajectory]) -> list[Trajectory]:
    """Return the last attempt of every sample: the earlier ones are fault recovery."""
    last: dict[int, Trajectory] = {}
    for one in sorted(attempts, key=lambda t: (t.identity.sample, t.identity.attempt)):
        last[one.identity.sample] = one
    return list(last.values())


def _task(attempts: Sequence[Trajectory], samples: int, threshold: float) -> dict[str, Any]:
    verdicts = [one for one in final_attempts(attempts) if one.rewards is not None]
    rewards = [one.rewards for one in verdicts if one.rewards is not None]
    passes = sum(passed(one, threshold) for one in rewards)
    return {
        "samples": samples,
        "attempts": len(attempts),
        "retries": len(attempts) - len({one.identity.sample for one in attempts}),
        "verdicts": len(verdicts),
        "missing": samples - len(verdicts),
        "passes": passes,
        "pass_threshold": threshold,
        "mean_reward": _mean([score(one) for one in rewards]),
        "mean_by_part": _parts(rewards),
        "pass_at_k": {str(k): pass_at_k(len(verdicts), passes, k) for k in range(1, samples + 1)},
        "failures_by_side": _sides(attempts),
        "steps": _steps(final_attempts(attempts)),
        "tamper": _tamper(attempts),
        "egress": _egress(attempts),
        "phases": _phases(attempts),
        "terminations": dict(sorted(Counter(one.termination.value for one in attempts).items())),
        "times": _times([one.times for one in attempts]),
    }


def _parts(rewards: Sequence[dict[str, float]]) -> dict[str, dict[str, Any]]:
    """Return mean and count of each part, over the verdicts that have it."""
    names = sorted({name for one in rewards for name in one})
    parts = {}
    for name in names:
        values = [one[name] for one in rewards if name in one]
        parts[name] = {"mean": _mean(values), "verdicts": len(values)}
    return parts


def _steps(attempts: Sequence[Trajectory]) -> dict[str, dict[str, Any]]:
    """Return what each step of a task of several came to, in their order."""
    steps: dict[str, list[TaskStepRecord]] = {}
    for one in attempts:
        for step in one.task_steps:
            steps.setdefault(step.name, []).append(step)
    return {
        name: {
            "runs": len(found),
            "verdicts": len(rewards := [step.rewards for step in found if step.rewards]),
            "mean_reward": _mean([score(one) for one in rewards]),
            "min_reward_missed": sum(step.min_reward_missed for step in found),
            "completion_tokens": known_sum(step.totals.completion_tokens for step in found),
        }
        for name, found in steps.items()
    }


def _tamper(attempts: Sequence[Trajectory]) -> dict[str, int]:
    """Count attempts whose verdict was tampered with, is void for it, or could be forged."""
    return {
        "attempts": sum(1 for one in attempts if one.tamper),
        "voided": sum(1 for one in attempts if any(event.voided for event in one.tamper)),
        "forgeable": sum(1 for one in attempts if one.rewards and _forgeable(one)),
    }


def _forgeable(one: Trajectory) -> bool:
    graded = [one.verification, *(step.verification for step in one.task_steps)]
    return any(each is not None and each.forgeable for each in graded)


def _egress(attempts: Sequence[Trajectory]) -> dict[str, int]:
    """Count what was asked of the network by kind, over all phases."""
    counts: Counter[str] = Counter()
    for one in attempts:
        for phase in one.phases:
            counts.update(phase.egress.asked)
    return dict(sorted(counts.items()))


def _phases(attempts: Sequence[Trajectory]) -> dict[str, dict[str, float]]:
    """Return how many phases of each name there were, and their seconds together."""
    found: dict[str, list[float]] = {}
    for one in attempts:
        for phase in one.phases:
            found.setdefault(phase.name, []).append(phase.ended_at - phase.started_at)
    return {
        name: {"count": len(spent), "seconds": round(math.fsum(spent), 6)}
        for name, spent in found.items()
    }


def _sides(attempts: Iterable[Trajectory]) -> dict[str, dict[str, int]]:
    sides: dict[str, Counter[str]] = {}
    for one in attempts:
        if one.failure is not None:
            sides.setdefault(one.failure.side.value, Counter())[one.failure.code] += 1
    return {side: dict(sorted(codes.items())) for side, codes in sorted(sides.items())}


def _mean(values: Sequence[float]) -> float | None:
    if not values:
        return None
    mean = math.fsum(value / len(values) for value in values)
    return mean if math.isfinite(mean) else None


def _times(times: Sequence[Times]) -> dict[str, float | None]:
    """Return the sums over attempts, in seconds; None where one of them is not known."""
    sums = {
        name: known_sum(getattr(one, name) for one in times)
        for name in [*Times.model_fields, "run_s"]
    }
    return {name: None if total is None else round(total, 6) for name, total in sums.items()}
