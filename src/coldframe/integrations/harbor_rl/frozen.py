"""Ask for the tasks of a frozen split, as they were when it was frozen."""

from __future__ import annotations

from pathlib import Path

from coldframe.integrations.harbor_rl.specs import RLTask
from coldframe.learning.contracts import ContractError
from coldframe.learning.splits import read_manifest
from coldframe.rollouts.digests import tree_digest
from coldframe.rollouts.task import DIGESTED


def tasks_of_split(manifest: Path | str, tasks_dir: Path | str) -> list[RLTask]:
    """Return a request per task of a split made by `coldframe splits make`.

    Args:
        tasks_dir: holds the task directories by their keys.
    Raises:
        SplitError: the manifest cannot be read, or was edited.
        ContractError: a task is not there, or is not what it was.
    """
    split = read_manifest(Path(manifest))
    specs = []
    for task in split.tasks:
        directory = Path(tasks_dir) / task.key
        if not directory.is_dir():
            raise ContractError(task.key, "config", str(directory), "there is no such task")
        found = tree_digest(directory, DIGESTED)
        if found != task.digest:
            problem = f"is not the task that was put into split {split.name!r}: {task.digest}"
            raise ContractError(task.key, "digest", found, problem)
        specs.append(RLTask(task.key, split.name, str(directory)))
    return specs
