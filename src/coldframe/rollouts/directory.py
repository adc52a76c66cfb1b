"""A run's directory: what was asked, what it ran on, one trajectory per attempt, a summary.

    config.json  lock.json  blobs/  summary.json
    attempts/<task>.<sample>.<attempt>/{trajectory.json, artifacts/, calls.jsonl}

A result is a trajectory that reads back. Whatever a killed process left beside that is not a
result, and its attempt is made again under the same number.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coldframe.protocol import strict_json
from coldframe.protocol.errors import RunError
from coldframe.trajectories.calls import CALLS_FILE
from coldframe.trajectories.holding import LOCK_FILE, held
from coldframe.trajectories.schema import Trajectory
from coldframe.trajectories.store import (
    TRAJECTORY_FILE,
    BlobStore,
    TrajectoryInvalidError,
    read_regular,
    read_trajectory,
    sync_file,
    write_json,
    write_trajectory,
)

CONFIG_SCHEMA = "coldframe.run/1"
LOCK_SCHEMA = "coldframe.lock/2"
SUMMARY_SCHEMA = "coldframe.summary/2"
SUMMARY_FILE = "summary.json"
_ATTEMPT = re.compile(r"(?P<task>[A-Za-z0-9_-]+)\.(?P<sample>[0-9]+)\.(?P<attempt>[0-9]+)")

# What a process that was killed before it wrote config.json may have left.
_BEGUN = frozenset({LOCK_FILE, "attempts"})


@dataclass(frozen=True, order=True)
class AttemptKey:
    """Names one attempt, and its directory; ordered by task, sample and attempt."""

    task: str
    sample: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.task}.{self.sample}.{self.attempt}"


class RunDirectory:
    """One run on disk, held by at most one process at a time."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.attempts = root / "attempts"
        self.blobs = BlobStore(root / "blobs")

    @property
    def exists(self) -> bool:
        """Whether a run was begun here."""
        return (self.root / "config.json").is_file()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the directory; the kernel lets go of it when the process dies.

        Raises:
            RunError: another process holds it, or it is no place for a run.
        """
        if not self.exists and self.root.exists():
            names = {one.name for one in self.root.iterdir()} - _BEGUN
            if names:
                raise RunError(
                    f"{self.root}: not a run and not empty ({sorted(names)[0]} lies there); "
                    "give another --out"
                )
        taken = RunError(f"{self.root}: another process is running this run")
        with contextlib.ExitStack() as stack:
            try:
                self.attempts.mkdir(parents=True, exist_ok=True)
                stack.enter_context(held(self.root, taken))
            except OSError as error:
                raise RunError(f"{self.root}: {error.strerror}") from error
            yield

    def begin(self, run_id: str, asked: dict[str, Any]) -> str:
        """Write what is asked, or check that it is what was asked when the run began.

        Returns:
            The run's id: that of its beginning when it is resumed.
        Raises:
            RunError: the run was begun with something else; what, is named.
        """
        if not self.exists:
            config = {
                "schema_version": CONFIG_SCHEMA,
                "run_id": run_id,
                "created_at": time.time(),
                "asked": asked,
            }
            write_json(self.root / "config.json", config)
            return run_id
        config = self.read("config.json", CONFIG_SCHEMA)
        changed = differences(config["asked"], json.loads(json.dumps(asked)))
        if changed:
            raise RunError(
                f"{self.root}: begun with another configuration ({'; '.join(changed)}); "
                "give the same one, or another --out"
            )
        return str(config["run_id"])

    def lock(self, lock: dict[str, Any]) -> dict[str, Any]:
        """Write what the run depends on, or check that it has not changed since it began.

        Raises:
            RunError: a task, harness or version is another one; which, is named.
        """
        if not (self.root / "lock.json").is_file():
            self.write_lock(lock)
            return lock
        known = self.read("lock.json", LOCK_SCHEMA)
        images = known.get("images", {})
        changed = differences(
            {**known, "images": {}}, json.loads(json.dumps({**lock, "images": {}}))
        )
        if changed:
            raise RunError(
                f"{self.root}: what it runs on has changed since it began "
                f"({'; '.join(changed)}); give another --out"
            )
        return {**lock, "images": images}

    def write_lock(self, lock: dict[str, Any]) -> None:
        """Write lock.json."""
        write_json(self.root / "lock.json", lock)

    def read(self, name: str, schema: str) -> dict[str, Any]:
        """Return one of the run's JSON files.

        Raises:
            RunError: it is missing, cut or of another schema.
        """
        path = self.root / name
        try:
            value = strict_json.parse(read_regular(path))
        except FileNotFoundError:
            raise RunError(f"{path}: no such file; {self.root} is not a run") from None
        except (OSError, ValueError) as error:
            raise RunError(f"{path}: cannot be read: {error}") from error
        if not isinstance(value, dict) or value.get("schema_version") != schema:
            raise RunError(f"{path}: not of schema {schema}")
        return value

    def save(self, key: AttemptKey, trajectory: Trajectory) -> None:
        """Write an attempt's result; afterwards it survives loss of power, its tokens too."""
        with contextlib.suppress(FileNotFoundError):  # nothing was captured
            sync_file(self.calls(key))
        write_trajectory(self.attempts / str(key), trajectory, self.blobs)

    def results(self) -> dict[AttemptKey, Trajectory]:
        """Return every attempt that has a result, in order; see the module.

        Raises:
            RunError: there is no run.
        """
        found: dict[AttemptKey, Trajectory] = {}
        for key in self.written():
            with contextlib.suppress(TrajectoryInvalidError):
                found[key] = self.result(key)
        return found

    def result(self, key: AttemptKey) -> Trajectory:
        """Return an attempt's result. Raises TrajectoryInvalidError: it does not read back."""
        return read_trajectory(self.attempts / str(key) / TRAJECTORY_FILE, self.blobs)

    def written(self) -> list[AttemptKey]:
        """Return every attempt for which a result was written, in order.

        Raises:
            RunError: there is no run.
        """
        if not self.attempts.is_dir():
            raise RunError(f"{self.root}: not a run; it has no attempts")
        names = filter(None, (_ATTEMPT.fullmatch(one.name) for one in self.attempts.iterdir()))
        keys = {AttemptKey(one["task"], int(one["sample"]), int(one["attempt"])) for one in names}
        return sorted(
            key for key in keys if os.path.lexists(self.attempts / str(key) / TRAJECTORY_FILE)
        )

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write summary.json."""
        write_json(self.root / SUMMARY_FILE, summary)

    def summary(self) -> dict[str, Any] | None:
        """Return what `write_summary` wrote; None: the run has not come to its end."""
        written = (self.root / SUMMARY_FILE).is_file()
        return self.read(SUMMARY_FILE, SUMMARY_SCHEMA) if written else None

    def artifacts(self, key: AttemptKey) -> Path:
        """Return where an attempt's artifacts are kept."""
        return self.attempts / str(key) / "artifacts"

    def calls(self, key: AttemptKey) -> Path:
        """Return where the journal of an attempt's calls of its model is kept."""
        return self.attempts / str(key) / CALLS_FILE

    def clear(self, key: AttemptKey) -> None:
        """Remove what an interrupted attempt left."""
        directory = self.attempts / str(key)
        if directory.exists():
            shutil.rmtree(directory)

    def sweep(self) -> None:
        """Remove temporary files and spools of a process that was killed while it wrote."""
        for path in [*self.root.rglob(".*.tmp")]:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def open_run(root: Path) -> tuple[dict[str, Any], dict[AttemptKey, Trajectory]]:
    """Return the configuration and the results, in order, of a run, finished or not.

    Raises:
        RunError: there is no run.
    """
    directory = RunDirectory(root)
    if not directory.exists:
        raise RunError(f"{root}: not a run; it has no config.json")
    return directory.read("config.json", CONFIG_SCHEMA), directory.results()


def differences(before: Any, after: Any, name: str = "") -> list[str]:
    """Return what differs between two JSON values, by dotted name."""
    if isinstance(before, dict) and isinstance(after, dict):
        return [
            line
            for key in sorted({*before, *after})
            for line in differences(before.get(key), after.get(key), f"{name}.{key}".lstrip("."))
        ]
    if before == after and type(before) is type(after):
        return []
    return [f"{name}: {_brief(before)} is now {_brief(after)}"]


def _brief(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."
