"""What a trainer asks for, and what is refused before a job exists."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from coldframe.learning.contracts import ContractError

Phase = Literal["train", "eval"]
_ONE_COMPONENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True)
class RLTask:
    """A task that is asked for."""

    key: str
    """Names its group in the results."""
    split: str
    """`train` or `eval`."""
    config: Any
    """Harbor's `TaskConfig`, the same as a map, or the path of a task directory."""

    @property
    def document(self) -> dict[str, Any]:
        """Return the configuration as Harbor reads it.

        Raises:
            ContractError: it is none.
        """
        given = self.config
        if isinstance(given, str | Path):
            return {"path": str(given)}
        if isinstance(given, Mapping):
            return {str(name): _plain(value) for name, value in given.items()}
        dump = getattr(given, "model_dump", None)
        if dump is None:
            problem = "is no task configuration: give a path, a map, or Harbor's TaskConfig"
            raise ContractError(self.key, "config", given, problem)
        return dict(dump(mode="json", exclude_none=True))


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def identity(document: Any) -> tuple[str, ...]:
    """Return what makes a task configuration this task, however it is represented."""
    found = [field_of(document, name) for name in ("name", "git_url", "git_commit_id", "path")]
    return tuple("" if value is None else str(value) for value in found)


def field_of(value: Any, name: str) -> Any:
    """Return a field of an object or of a map; None where it has none.

    Results come from Harbor as objects, and from its files as maps.
    """
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def check_request(
    specs: Sequence[RLTask], *, phase: str, run_id: str, attempts: int, concurrency: int
) -> None:
    """Refuse what may not become a job.

    Raises:
        ContractError: no tasks, two of one key or of one configuration, a wrong split, a run id
            that is not one path component, attempts or concurrency below 1.
    """
    if phase not in {"train", "eval"}:
        raise ContractError(str(run_id), "phase", phase, "is neither 'train' nor 'eval'")
    if not isinstance(run_id, str) or not _ONE_COMPONENT.fullmatch(run_id):
        problem = "is no run id: one path component of letters, digits, '.', '_' and '-'"
        raise ContractError(str(run_id), "run_id", run_id, problem)
    for field, count in (("attempts", attempts), ("concurrency", concurrency)):
        if type(count) is not int or count < 1:
            raise ContractError(run_id, field, count, "is below 1, or no integer")
    if not specs:
        raise ContractError(run_id, "specs", specs, "an empty batch: it has no tasks")
    seen: dict[tuple[str, ...], str] = {}
    for spec in specs:
        if not isinstance(spec.key, str) or not spec.key:
            raise ContractError(run_id, "key", spec.key, "a task has no key")
        if spec.split != phase:
            problem = f"wrong split: a job of phase {phase!r} takes only tasks of that split"
            raise ContractError(spec.key, "split", spec.split, problem)
        task = identity(spec.document)
        for name in (("key", spec.key), ("task", *task)):
            if name in seen:
                problem = f"duplicate: the same {name[0]} as {seen[name]!r}"
                raise ContractError(spec.key, name[0], name[1:], problem)
            seen[name] = spec.key
