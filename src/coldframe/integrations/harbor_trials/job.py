"""Import a job's directory: every trial that ended becomes an attempt of a run of ours."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, StringConstraints

from coldframe.integrations.harbor_trials.reading import (
    Folder,
    ImportRefusedError,
    parse,
    validated,
)
from coldframe.integrations.harbor_trials.results import TrialResult, moment
from coldframe.integrations.harbor_trials.trial import Place, read_result, trajectory_of
from coldframe.protocol.text import excerpt
from coldframe.rollouts.directory import AttemptKey, RunDirectory
from coldframe.trajectories.schema import Trajectory
from coldframe.trajectories.store import write_json

REPORT_FILE = "import.json"
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")
_NOT_TRIALS = frozenset({"config.json", "lock.json", "result.json", "job.log"})


class _Harbor(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    version: str | None = None


class _Lock(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    harbor: _Harbor = _Harbor()


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    job_name: Annotated[str, StringConstraints(min_length=1, max_length=500)]


@dataclass
class ImportReport:
    """What came of an import."""

    run_id: str
    attempts: dict[str, Trajectory] = field(default_factory=dict)
    """By trial name."""
    keys: dict[str, str] = field(default_factory=dict)
    """Names of the attempts, by trial name."""
    refused: list[dict[str, str]] = field(default_factory=list)
    """File, field and problem of what could not become an attempt."""

    def document(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {
            "schema_version": "coldframe.import/1",
            "run_id": self.run_id,
            "attempts": [_told(self.keys[name], one) for name, one in self.attempts.items()],
            "refused": self.refused,
        }


def import_job(job: Path, out: Path) -> ImportReport:
    """Import the trials of a job of Harbor's (0.18 or later) into a run directory.

    A trial that is refused stops no other. Again into the same directory it changes nothing.

    Args:
        job: holds one directory per trial; whatever lies there is not trusted.
    Raises:
        ImportRefusedError: it is no job.
        RunError: `out` is no place for a run, or holds another.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(Folder.opened(job))
        run_id, version = _job(folder)
        report = ImportReport(run_id)
        found = _results(folder, report)
        asked = {"import": "harbor", "job": run_id, "trials": _digests(found)}
        directory = RunDirectory(out)
        stack.enter_context(directory.held())
        directory.begin(run_id, asked)
        known = directory.results()
        for key, (name, (result, digest)) in _keys(found).items():
            if key in known:
                _add(report, key, known[key])
                continue
            place = Place(run_id, key.task, key.sample, version)
            try:
                with folder.inside(name) as trial:
                    if trial is None:
                        raise ImportRefusedError(name, "", "is gone")
                    made = trajectory_of(trial, result, digest, place, directory.blobs)
            except ImportRefusedError as error:
                _refuse(report, error)
                continue
            directory.clear(key)
            directory.save(key, made)
            _add(report, key, made)
        write_json(out / REPORT_FILE, report.document())
    return report


def _job(folder: Folder) -> tuple[str, str | None]:
    """Return the job's name, and Harbor's version where it is known."""
    content = folder.read("config.json")
    if content is None:
        problem = "is no job of Harbor's: it has no config.json; name the directory of one job"
        raise ImportRefusedError(folder.shown, "", problem)
    config = validated(_Config, parse(content, "config.json"), "config.json")
    lock = folder.read("lock.json")
    if lock is None:
        return config.job_name, None
    return config.job_name, validated(_Lock, parse(lock, "lock.json"), "lock.json").harbor.version


Read = tuple[TrialResult, str]


def _results(folder: Folder, report: ImportReport) -> dict[str, Read]:
    """Return the results of the trials that ended, by the names of their directories."""
    found: dict[str, Read] = {}
    for name in folder.names():
        if name in _NOT_TRIALS or name.startswith("."):
            continue
        try:
            with folder.inside(name) as trial:
                read = None if trial is None else read_result(trial)
            if read is None:
                raise ImportRefusedError(f"{name}/result.json", "", "is not there: it did not end")
            found[name] = read
        except ImportRefusedError as error:
            _refuse(report, error)
    names = Counter(result.trial_name for result, _ in found.values())
    for name, (result, _) in [*found.items()]:
        if names[result.trial_name] > 1:
            problem = (
                f"{excerpt(result.trial_name)} is the name of {names[result.trial_name]} trials"
            )
            _refuse(report, ImportRefusedError(f"{name}/result.json", "trial_name", problem))
            del found[name]
    return found


def _digests(found: dict[str, Read]) -> dict[str, str]:
    return {name: digest for name, (_, digest) in found.items()}


def _keys(found: dict[str, Read]) -> dict[AttemptKey, tuple[str, Read]]:
    """Name attempts: samples of a task in the order of their begin, which is all there is."""
    tasks: dict[str, str] = {}
    counts: Counter[str] = Counter()
    named: dict[AttemptKey, tuple[str, Read]] = {}

    def begin(item: tuple[str, Read]) -> tuple[float, str]:
        return moment(item[1][0].started_at) or 0.0, item[0]

    for name, read in sorted(found.items(), key=begin):
        task = read[0].task_name
        if task not in tasks:
            stem = _UNSAFE.sub("-", task)[:100].strip("-") or "task"
            taken = [*tasks.values()]
            tasks[task] = next(
                one
                for one in (stem, *(f"{stem}-{number}" for number in range(2, len(taken) + 3)))
                if one not in taken
            )
        key = AttemptKey(tasks[task], counts[task], 0)
        counts[task] += 1
        named[key] = (name, read)
    return named


def _add(report: ImportReport, key: AttemptKey, made: Trajectory) -> None:
    name = made.origin.trial_name if made.origin else str(key)
    report.attempts[name], report.keys[name] = made, str(key)


def _refuse(report: ImportReport, error: ImportRefusedError) -> None:
    report.refused.append({"file": error.file, "field": error.field, "problem": error.problem})


def _told(key: str, made: Trajectory) -> dict[str, Any]:
    return {
        "attempt": key,
        "trial": made.origin.trial_name if made.origin else None,
        "rewards": made.rewards,
        "failure": None if made.failure is None else made.failure.model_dump(mode="json"),
        "termination": made.termination.value,
        "steps": made.totals.steps,
        "warnings": list(made.warnings),
        "unknown": dict(made.unknown),
    }
