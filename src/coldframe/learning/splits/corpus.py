"""What a split needs to know of a task: its keys, its group, what it asks and how it is graded.

Read leniently: a task that our own runner refuses may still be one that must not leak.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from coldframe.learning.splits.manifest import SplitError, SplitTask
from coldframe.learning.splits.similarity import normal, sketch

ALONE = "task"
"""Each task is a group of its own."""
_REMOTE = re.compile(r"^(?:[a-z+]+://)?(?:[^@/]+@)?([^:/]+)(?::\d+)?[:/]+(.+?)(?:\.git)?/*$")


@dataclass(frozen=True)
class CorpusTask:
    """A task and the values that it may be grouped by."""

    directory: Path
    name: str
    digest: str
    metadata: dict[str, Any]
    instruction: tuple[str, ...]
    tests: tuple[str, ...]

    def group(self, by: str) -> str:
        """Return the group that it belongs to.

        Raises:
            SplitError: it does not say.
        """
        value = self.name if by == ALONE else self.metadata.get(by)
        if by == "time":
            return moment(value, f"{self.directory / 'task.toml'}: [metadata] time").isoformat()
        if isinstance(value, bool) or not isinstance(value, str | int) or not str(value).strip():
            said = f"{by} is not said" if value is None else f"{by} = {value!r} names no group"
            raise SplitError(f"{self.directory / 'task.toml'}: [metadata] {said}")
        text = normal(str(value)).strip()
        remote = _REMOTE.match(text) if by == "repository" else None
        return text if remote is None else f"{remote[1]}/{remote[2]}"

    def entry(self, by: str) -> SplitTask:
        """Return what a manifest keeps of it."""
        return SplitTask(
            key=self.directory.name,
            name=self.name,
            group=self.group(by),
            digest=self.digest,
            instruction=sketch(self.instruction),
            tests=sketch(self.tests),
        )


def moment(value: object, what: str) -> datetime:
    """Return a date, a time, or the ISO text of either as a time in UTC.

    Raises:
        SplitError: it is none.
    """
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            raise SplitError(f"{what} = {value!r} is no date") from None
    if isinstance(value, datetime):
        try:
            return value.replace(tzinfo=value.tzinfo or UTC).astimezone(UTC)
        except OverflowError:  # at the ends of time, where another zone is beyond them
            raise SplitError(f"{what} = {value.isoformat()!r} is no date") from None
    if isinstance(value, date):
        return datetime(value.year, value.month, value.day, tzinfo=UTC)
    raise SplitError(f"{what} = {value!r} is no date")


def read_corpus_task(directory: Path, digest: str) -> CorpusTask:
    """Read a task directory.

    Args:
        digest: of its content, by whoever knows what of it counts.
    Raises:
        SplitError: there is no task.toml that can be read, or no instruction.
    """
    file = directory / "task.toml"
    try:
        data = tomllib.loads(file.read_text("utf-8"))
    except OSError as error:
        raise SplitError(f"{file}: {error.strerror or error}") from error
    except ValueError as error:
        raise SplitError(f"{file}: not TOML: {error}") from error
    task, metadata = data.get("task"), data.get("metadata")
    source = {"source": data["source"]} if "source" in data else {}
    steps = sorted(one for one in (directory / "steps").glob("*") if one.is_dir())
    instruction = tuple(
        _text(one / "instruction.md")
        for one in (directory, *steps)
        if (one / "instruction.md").is_file()
    )
    if not instruction:
        raise SplitError(f"{directory}: has no instruction.md")
    name = task.get("name") if isinstance(task, dict) else None
    return CorpusTask(
        directory=directory,
        name=name if isinstance(name, str) else directory.name,
        digest=digest,
        metadata=source | (metadata if isinstance(metadata, dict) else {}),
        instruction=instruction,
        tests=tuple(_text(file) for one in (directory, *steps) for file in _files(one / "tests")),
    )


def _files(directory: Path) -> Iterator[Path]:
    for path in sorted(directory.rglob("*")):
        if path.is_file() and not path.is_symlink() and "__pycache__" not in path.parts:
            yield path


def _text(file: Path) -> str:
    return file.read_bytes().decode("utf-8", "replace")
