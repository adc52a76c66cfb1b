"""`task check` against the reward schema of a task set: fixtures, digests, every verdict seen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from coldframe.learning.schemas import (
    SCHEMA_FILE,
    RewardSchema,
    RewardSchemaError,
    load_schema,
    run_fixtures,
    scalarise,
)
from coldframe.protocol.errors import ColdframeError
from coldframe.rollouts.check import Checked
from coldframe.rollouts.rewards import parse_reward
from coldframe.rollouts.task import Task


def schema_problems(checked: Sequence[Checked]) -> list[str]:
    """Return what is wrong with the schemas that lie beside the tasks, and by them.

    A set without a schema has none of these problems.
    """
    sets: dict[Path, list[Checked]] = {}
    for one in checked:
        file = one.task.directory.parent / SCHEMA_FILE
        if file.is_file():
            sets.setdefault(file, []).append(one)
    return [
        f"{file}: {problem}" for file, members in sets.items() for problem in _of(file, members)
    ]


def _of(file: Path, members: Sequence[Checked]) -> list[str]:
    try:
        schema = load_schema(file)
    except RewardSchemaError as error:
        return [str(error).removeprefix(f"{file}: ")]
    problems = [problem for one in members if (problem := _stale(schema, one.task))]
    problems += [
        f"{one.task.key}: {trial.contender.name}: {why}"
        for one in members
        for trial in one.trials
        if (why := _refused(schema, trial.trajectory.rewards))
    ]
    verdicts = {
        (one.task.key, trial.contender.name): trial.trajectory.rewards
        for one in members
        for trial in one.trials
    }
    return list(dict.fromkeys(problems + run_fixtures(schema, parse_reward, verdicts)))


def _stale(schema: RewardSchema, task: Task) -> str | None:
    declared = schema.code.get(task.key)
    if declared == task.tests_digest:
        return None
    now = f'[code] {task.key} = "{task.tests_digest}"'
    if declared is None:
        return f"does not say by which tests {task.key} is graded; add {now}"
    return f"{task.key} is graded by other tests than {schema.label} says; raise version, set {now}"


def _refused(schema: RewardSchema, rewards: dict[str, float] | None) -> str | None:
    if rewards is None:
        return None
    try:
        scalarise(schema, rewards)
    except ColdframeError as error:
        return str(error)
    return None
