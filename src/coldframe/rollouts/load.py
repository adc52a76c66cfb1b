"""Load a task in Harbor's directory format, or refuse it by name.

What is asked for and not honoured refuses the task, naming the field and the file, so that
nothing runs on terms that its author did not set. See docs/rollouts.md for every field.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from coldframe.protocol.errors import TaskError
from coldframe.rollouts.digests import tree_digest
from coldframe.rollouts.fields import Source, Table, is_number
from coldframe.rollouts.layout import TaskFiles, find_tasks, read_text, repository_commit
from coldframe.rollouts.sections import read_environment
from coldframe.rollouts.steps import read_steps
from coldframe.rollouts.task import DIGESTED, EnvironmentSpec, RewardStrategy, Task

if TYPE_CHECKING:
    from coldframe.harnesses.base import Harness

SCHEMA_VERSIONS = ("1.0", "1.1", "1.2", "1.3", "1.4")
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")


@dataclass(frozen=True)
class Loaded:
    """The tasks of a batch: those that run, and why the others do not."""

    tasks: tuple[Task, ...]
    refused: dict[str, str]


def load_batch(
    paths: Iterable[Path], host_env: Mapping[str, str], harness: Harness | None = None
) -> Loaded:
    """Load every task; one that is refused takes no other with it.

    Args:
        harness: refuses tasks whose offers to the agent it cannot pass on.
    Raises:
        TaskError: a path holds no task at all.
    """
    tasks: dict[str, Task] = {}
    refused: dict[str, str] = {}
    for directory in find_tasks(paths):
        try:
            task = load_task(directory, host_env)
            missing = None if harness is None else harness.refuses(task.offers)
            if harness is not None and missing is not None:
                raise TaskError(
                    f"{directory / 'task.toml'}: [environment] offers {missing}, which the harness "
                    f"{harness.name!r} cannot pass on"
                )
        except TaskError as error:
            refused[str(directory)] = str(error)
            continue
        other = tasks.get(task.key)
        if other is not None:
            refused[str(directory)] = (
                f"{directory}: its name {task.key!r} is that of {other.directory} too"
            )
            continue
        tasks[task.key] = task
    return Loaded(tuple(tasks.values()), refused)


def load_task(directory: Path, host_env: Mapping[str, str] | None = None) -> Task:
    """Read and check one task directory.

    Args:
        host_env: where `${NAME}` in an `env` table comes from; nothing by default.
    Raises:
        TaskError: it is not a task, or asks for what is not honoured; each reason is named.
    """
    directory = directory.resolve()
    file = directory / "task.toml"
    try:
        data = tomllib.loads(read_text(file))
    except tomllib.TOMLDecodeError as error:
        raise TaskError(f"{file}: not TOML: {error}") from error
    source, files = Source(file, host_env or {}), TaskFiles(directory)
    root = Table(source, data)
    version = _schema_version(root)
    environment = _environment(root, files)
    steps = read_steps(root, environment, files)
    names = [step.name for step in steps if step.name is not None]
    if names:
        files.check_steps(names)
    key = _UNSAFE.sub("-", directory.name).strip("-") or "task"
    values = {
        "name": _name(root) or key,
        "source": root.text("source"),
        "reward_strategy": root.choice("multi_step_reward_strategy", get_args(RewardStrategy))
        or "mean",
        "solution_env": _solution_env(root),
        **read_metadata(root),
    }
    root.close()
    problems = [*source.problems, *files.problems]
    if problems:
        raise TaskError("; ".join(problems))
    tests = ["tests", *(f"steps/{name}/tests" for name in names)]
    return Task(
        key=key,
        directory=directory,
        digest=tree_digest(directory, DIGESTED),
        tests_digest=tree_digest(directory, tests),
        schema_version=version,
        environment=environment,
        steps=tuple(steps),
        repository_commit=repository_commit(directory),
        secrets=frozenset(source.resolved),
        **values,
    )


def _schema_version(root: Table) -> str:
    given = [v for name in ("schema_version", "version") if (v := root.text(name)) is not None]
    version = given[0] if given else "1.0"
    if version not in SCHEMA_VERSIONS:
        root.problem("schema_version", f"= {version!r} is none of {', '.join(SCHEMA_VERSIONS)}")
    return version


def _name(root: Table) -> str | None:
    table = root.table("task")
    name = table.text("name")
    for other in ("version", "description", "authors", "keywords"):
        table.has(other)
    table.close()
    return name


def _environment(root: Table, files: TaskFiles) -> EnvironmentSpec:
    table, context = root.table("environment"), files.environment
    spec = read_environment(table, context)
    if spec.docker_image is None and spec.dockerfile is None:
        table.problem("docker_image", f"is not set and {context / 'Dockerfile'} does not exist")
    return spec


def _solution_env(root: Table) -> dict[str, str]:
    table = root.table("solution")
    env = table.environment()
    table.close()
    return env


def read_metadata(root: Table) -> dict[str, Any]:
    """Return `[metadata]`, where anything may stand, and our own `[metadata.coldframe]`."""
    table = root.table("metadata")
    own = table.table("coldframe")
    threshold = own.take("pass_threshold", is_number, "a number")
    full_kill, start_cmd = own.flag("full_kill"), own.flag("start_cmd")
    paths = {name: own.texts(name) for name in ("key_inputs", "agent_paths")}
    for name, path in ((name, path) for name, given in paths.items() for path in given):
        if not path.startswith("/") or ".." in path.split("/"):
            own.problem(name, f"has {path!r}, which is not an absolute path without ..")
    own.close()
    return {
        "full_kill": full_kill,
        "start_cmd": start_cmd,
        **paths,
        "pass_threshold": 1.0 if threshold is None else float(threshold),
        "metadata": table.but("coldframe"),
    }
