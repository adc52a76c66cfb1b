"""Where the files of a task lie, and which of them are missing.

    task.toml  instruction.md  environment/  tests/test.sh  solution/solve.sh  wrong/NAME/solve.sh

and, for a task of several steps, in place of instruction.md

    steps/STEP/{instruction.md, tests/, solution/, workdir/[setup.sh]}  wrong/NAME/STEP/solve.sh

where tests/ and solution/ of the task are what every step has in common. `wrong/` is ours.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from coldframe.protocol.errors import TaskError

COMPOSE_FILES = (
    "docker-compose.yaml",
    "docker-compose.yml",
    "compose.yaml",
    "compose.yml",
    "singularity-compose.yaml",
)
MAX_INSTRUCTION = 200_000
"""Characters: all of it is shown to the model, under every harness."""
_CANARY = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)


@dataclass(frozen=True)
class StepFiles:
    """The files of one step."""

    instruction: str
    tests: tuple[Path, ...]
    own_tests: Path | None
    """The step's own directory of tests; None in a single-step task."""
    test_script: Path
    """Where its test.sh is missed, if there is none."""
    reference: Path | None
    wrong: Mapping[str, Path]
    workdir: Path | None = None


@dataclass(frozen=True)
class TaskFiles:
    """The directory of one task."""

    directory: Path
    problems: list[str] = field(default_factory=list)

    @property
    def environment(self) -> Path:
        """The context of the image."""
        return self.directory / "environment"

    @property
    def tests(self) -> Path:
        """The verifier's files, or those that all steps share."""
        return self.directory / "tests"

    def only(self) -> StepFiles:
        """Return the files of a single-step task."""
        if (self.directory / "steps").exists():
            self.problems.append(f"{self.directory / 'steps'}: task.toml has no [[steps]] for it")
        self._refuse_compose(self.environment, self.tests)
        wrong = {one.name: one for one in self._wrong() if self._solves(one)}
        return StepFiles(
            instruction=self._instruction(self.directory),
            tests=(self.tests,),
            own_tests=None,
            test_script=self.tests / "test.sh",
            reference=_with_script(self.directory / "solution"),
            wrong=wrong,
        )

    def step(self, name: str) -> StepFiles:
        """Return the files of a step."""
        directory = self.directory / "steps" / name
        own = directory / "tests"
        self._refuse_compose(own)
        workdir = directory / "workdir"
        solution = _with_script(directory / "solution")
        if solution is None and not (directory / "solution").exists():
            solution = _with_script(self.directory / "solution")
        return StepFiles(
            instruction=self._instruction(directory),
            tests=tuple(one for one in (self.tests, own) if one.is_dir()),
            own_tests=own,
            test_script=own / "test.sh",
            reference=solution,
            wrong={
                one.name: one / name
                for one in self._wrong()
                if (one / name).exists() and self._solves(one / name)
            },
            workdir=workdir if workdir.is_dir() else None,
        )

    def check_steps(self, names: list[str]) -> None:
        """Note directories that belong to no step."""
        self._refuse_compose(self.environment, self.tests)
        steps, known = self.directory / "steps", set(names)
        parents = [steps, *self._wrong()] if steps.is_dir() else self._wrong()
        for parent in parents:
            for one in _directories(parent):
                if one.name not in known:
                    self.problems.append(f"{one}: task.toml has no step of this name")
        for one in self._wrong():
            if not any((one / name).exists() for name in known):
                self.problems.append(f"{one}: has no STEP/solve.sh; nothing in it would be wrong")

    def _refuse_compose(self, *directories: Path) -> None:
        """Note a compose file: its side services would silently not be there."""
        for directory in directories:
            self.problems.extend(
                f"{directory / name}: side services are not honoured yet"
                for name in COMPOSE_FILES
                if (directory / name).exists()
            )

    def _wrong(self) -> list[Path]:
        root = self.directory / "wrong"
        return _directories(root) if root.is_dir() else []

    def _solves(self, directory: Path) -> bool:
        if (directory / "solve.sh").is_file():
            return True
        self.problems.append(f"{directory / 'solve.sh'}: no such file")
        return False

    def _instruction(self, directory: Path) -> str:
        prior = directory / "trajectory.json"
        if prior.exists():
            self.problems.append(f"{prior}: prior context is not honoured yet")
        path = directory / "instruction.md"
        try:
            text = strip_canary(read_text(path))
        except TaskError as error:
            self.problems.append(str(error))
            return ""
        if len(text) > MAX_INSTRUCTION:
            self.problems.append(
                f"{path}: {len(text)} characters; an instruction has at most {MAX_INSTRUCTION}, "
                "put what is longer into the image"
            )
        if not text.strip():
            self.problems.append(f"{path}: the instruction is empty")
        return text


def _directories(parent: Path) -> list[Path]:
    return sorted(one for one in parent.iterdir() if one.is_dir() and one.name[0] != ".")


def _with_script(directory: Path) -> Path | None:
    return directory if (directory / "solve.sh").is_file() else None


def read_text(path: Path) -> str:
    """Return the text of a file that a task needs.

    Raises:
        TaskError: it is not there, or no UTF-8.
    """
    try:
        return path.read_text("utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise TaskError(f"{path}: no such file; a task needs it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{path}: cannot be read: {error}") from error


def strip_canary(text: str) -> str:
    """Return an instruction without the marker lines that lead it, and the blank lines after."""
    lines = text.split("\n")
    while lines and _CANARY.fullmatch(lines[0].strip()):
        lines.pop(0)
    while lines and not lines[0].strip():
        lines.pop(0)
    return "\n".join(lines)


def find_tasks(paths: Iterable[Path]) -> list[Path]:
    """Return task directories: each path itself, or the tasks directly below it, without repeats.

    Files beside tasks count for nothing: a shell's `tasks/*` names a rewards.toml, too.

    Raises:
        TaskError: a path is neither a task nor a directory of tasks, or there are files only.
    """
    found: dict[Path, None] = {}
    beside: list[Path] = []
    for path in paths:
        directory = (path.parent if path.name == "task.toml" else path).resolve()
        if (directory / "task.toml").exists():
            found[directory] = None
            continue
        if directory.is_file() and path.name != "task.toml":
            beside.append(path)
            continue
        if not directory.is_dir():
            raise TaskError(f"{path}: no such directory")
        below = sorted(one for one in directory.iterdir() if (one / "task.toml").exists())
        if not below:
            raise TaskError(f"{path}: neither it nor a directory in it holds a task.toml")
        found.update(dict.fromkeys(below))
    if beside and not found:
        raise TaskError(f"{beside[0]}: a file; name the task's directory")
    return list(found)


def repository_commit(directory: Path) -> str | None:
    """Return the commit of the repository that holds the task, read without running git."""
    for parent in (directory, *directory.parents):
        git = parent / ".git"
        if not git.is_dir():
            continue
        try:
            head = (git / "HEAD").read_text().strip()
            if not head.startswith("ref: "):
                return head
            ref = head.removeprefix("ref: ")
            if (git / ref).is_file():
                return (git / ref).read_text().strip()
            packed = (git / "packed-refs").read_text().splitlines()
        except OSError:
            return None
        found = [line.split()[0] for line in packed if line.endswith(f" {ref}")]
        return found[0] if found else None
    return None
