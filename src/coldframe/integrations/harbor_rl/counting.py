"""Hold the trials that came back to those that were asked for: a retry is no sample."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from coldframe.integrations.harbor_rl.specs import RLTask, field_of, identity
from coldframe.learning.contracts import ContractError


def count_trials(
    specs: Sequence[RLTask], result: Any, run_id: str, attempts: int, stopped: str | None
) -> dict[str, list[Any]]:
    """Return the trials by task key; as many as were asked for, by the job's count and by ours.

    Raises:
        ContractError: there are more, fewer in a job that was not stopped, one of a task nobody
            asked for, or one trial twice.
    """
    due = len(specs) * attempts
    counted = field_of(result, "n_total_trials")
    if counted is not None and counted != due:
        problem = f"the job counts other trials than the {due} that were asked for"
        raise ContractError(run_id, "n_total_trials", counted, problem)
    found = list(field_of(result, "trial_results") or ())
    names = Counter(str(field_of(trial, "trial_name")) for trial in found)
    name, times = next(iter(names.most_common(1)), ("", 0))
    if times > 1:
        problem = "stands among the results more than once: a retry is no sample"
        raise ContractError(name, "trial_name", times, problem)
    keys = {identity(spec.document): spec.key for spec in specs}
    trials: dict[str, list[Any]] = {spec.key: [] for spec in specs}
    for trial in found:
        key = _key(trial, keys, specs)
        if key is None:
            task = field_of(trial, "task_name")
            problem = "is of a task that was not asked for"
            raise ContractError(str(field_of(trial, "trial_name")), "task_name", task, problem)
        trials[key].append(trial)
    for key, members in trials.items():
        if len(members) > attempts or (stopped is None and len(members) != attempts):
            problem = f"{key}: other than the {attempts} samples that were asked for"
            raise ContractError(run_id, "trial_results", len(members), problem)
    return trials


def _key(trial: Any, keys: Mapping[tuple[str, ...], str], specs: Sequence[RLTask]) -> str | None:
    """Return the key of a trial's task, by its configuration, else by its name."""
    task = field_of(field_of(trial, "config"), "task")
    if task is not None:
        return keys.get(identity(task))
    name = field_of(trial, "task_name")
    return next((spec.key for spec in specs if spec.key == name), None)
