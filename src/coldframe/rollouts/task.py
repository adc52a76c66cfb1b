"""Load a single-step task in Harbor's directory format, or refuse it by name.

    task.toml  instruction.md  environment/  tests/test.sh  solution/solve.sh  wrong/<name>/solve.sh

`wrong/` is an extension: solutions that must fail. What is asked for and not honoured refuses
the task, naming the field and the file, so that nothing runs on terms that its author did not
set. See docs/rollouts.md for every field.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coldframe.protocol.errors import TaskError
from coldframe.rollouts.digests import tree_digest
from coldframe.rollouts.fields import SCHEMA_VERSIONS, Fields

DIGESTED = ("task.toml", "instruction.md", "environment", "tests", "solution")
DEFAULT_VERIFIER_S = 600.0
DEFAULT_BUILD_S = 600.0
COMPOSE_FILES = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
_CANARY = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")


@dataclass(frozen=True)
class EnvironmentSpec:
    """What the sandbox is made from, and its limits. None: our own default."""

    docker_image: str | None
    dockerfile: Path | None
    """Used when there is no `docker_image`."""
    context: Path
    build_timeout_s: float
    cpus: float | None
    memory_mb: int | None
    storage_mb: int | None
    env: dict[str, str]
    workdir: str | None
    network_declared: str | None
    """None: the task says nothing, and gets no network."""


@dataclass(frozen=True)
class Task:
    """One task, checked. Paths are on this machine."""

    key: str
    """Names the task in a run: its directory's name."""
    name: str
    """`[task] name`, else the key."""
    directory: Path
    digest: str
    """Of everything but `wrong/`, which the agent's attempt does not depend on."""
    tests_digest: str
    schema_version: str
    source: str | None
    instruction: str
    environment: EnvironmentSpec
    agent_timeout_s: float | None
    agent_user: str | int | None
    verifier_timeout_s: float
    verifier_user: str | int | None
    verifier_env: dict[str, str]
    solution_env: dict[str, str]
    full_kill: bool
    pass_threshold: float
    metadata: dict[str, Any] = field(default_factory=dict)
    repository_commit: str | None = None
    secrets: frozenset[str] = frozenset()
    """Values that must not be written down: what the task took from this machine."""

    @property
    def tests(self) -> Path:
        """The verifier's directory."""
        return self.directory / "tests"

    @property
    def solution(self) -> Path | None:
        """The reference's directory, if there is a script in it."""
        found = self.directory / "solution"
        return found if (found / "solve.sh").is_file() else None

    @property
    def wrong(self) -> dict[str, Path]:
        """Solutions that must fail, by name."""
        root = self.directory / "wrong"
        if not root.is_dir():
            return {}
        return {one.name: one for one in sorted(root.iterdir()) if (one / "solve.sh").is_file()}


def strip_canary(text: str) -> str:
    """Return an instruction without the marker lines that lead it, and the blank lines after."""
    lines = text.split("\n")
    while lines and _CANARY.fullmatch(lines[0].strip()):
        lines.pop(0)
    while lines and not lines[0].strip():
        lines.pop(0)
    return "\n".join(lines)


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        raise TaskError(f"{path}: no such file; a task needs it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{path}: cannot be read: {error}") from error


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
        data = tomllib.loads(_read(file))
    except tomllib.TOMLDecodeError as error:
        raise TaskError(f"{file}: not TOML: {error}") from error
    fields = Fields(file, data, host_env or {})
    fields.check_known()
    version = _schema_version(fields)
    environment = _environment(fields, directory / "environment")
    key = _UNSAFE.sub("-", directory.name).strip("-") or "task"
    instruction = strip_canary(_read(directory / "instruction.md"))
    _check_layout(fields, directory, instruction)
    values = {
        "name": fields.text("task", "name") or key,
        "source": fields.text("", "source"),
        "agent_timeout_s": fields.number("agent", "timeout_sec"),
        "agent_user": fields.user("agent"),
        "verifier_timeout_s": fields.number("verifier", "timeout_sec") or DEFAULT_VERIFIER_S,
        "verifier_user": fields.user("verifier"),
        "verifier_env": fields.environment("verifier"),
        "solution_env": fields.environment("solution"),
        "full_kill": fields.extension("full_kill", False, bool),
        "pass_threshold": float(fields.extension("pass_threshold", 1.0, (int, float))),
    }
    if fields.problems:
        raise TaskError("; ".join(fields.problems))
    return Task(
        key=key,
        directory=directory,
        digest=tree_digest(directory, DIGESTED),
        tests_digest=tree_digest(directory / "tests"),
        schema_version=version,
        instruction=instruction,
        environment=environment,
        metadata={k: v for k, v in fields.section("metadata").items() if k != "coldframe"},
        repository_commit=_commit(directory),
        secrets=frozenset(fields.resolved),
        **values,
    )


def _schema_version(fields: Fields) -> str:
    for name in ("schema_version", "version"):
        version = fields.text("", name)
        if version is None:
            continue
        if version not in SCHEMA_VERSIONS:
            known = ", ".join(SCHEMA_VERSIONS)
            fields.problem("", name, f"= {version!r} is none of {known}")
        return version
    return "1.0"


def _environment(fields: Fields, context: Path) -> EnvironmentSpec:
    image = fields.text("environment", "docker_image")
    dockerfile = context / "Dockerfile"
    for name in COMPOSE_FILES:
        if (context / name).exists():
            fields.problems.append(f"{context / name}: compose environments are not honoured yet")
    if image is None and not dockerfile.is_file():
        fields.problems.append(
            f"{fields.file}: [environment] docker_image is not set and {dockerfile} does not exist"
        )
    workdir = fields.text("environment", "workdir")
    if workdir is not None and not workdir.startswith("/"):
        fields.problem("environment", "workdir", f"= {workdir!r} is not absolute")
    return EnvironmentSpec(
        docker_image=image,
        dockerfile=dockerfile if dockerfile.is_file() else None,
        context=context,
        build_timeout_s=fields.number("environment", "build_timeout_sec") or DEFAULT_BUILD_S,
        cpus=fields.number("environment", "cpus"),
        memory_mb=fields.megabytes("memory_mb", "memory"),
        storage_mb=fields.megabytes("storage_mb", "storage"),
        env=fields.environment("environment"),
        workdir=workdir,
        network_declared=fields.network(),
    )


def _check_layout(fields: Fields, directory: Path, instruction: str) -> None:
    if (directory / "steps").exists():
        fields.problems.append(f"{directory / 'steps'}: multi-step tasks are not honoured yet")
    if not (directory / "tests" / "test.sh").is_file():
        fields.problems.append(f"{directory / 'tests' / 'test.sh'}: no such file; it grades")
    if not instruction.strip():
        fields.problems.append(f"{directory / 'instruction.md'}: the instruction is empty")


def _commit(directory: Path) -> str | None:
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


def find_tasks(paths: Iterable[Path]) -> list[Path]:
    """Return task directories: each path itself, or the tasks directly below it, without repeats.

    Raises:
        TaskError: a path is neither a task nor a directory of tasks.
    """
    found: dict[Path, None] = {}
    for path in paths:
        directory = (path.parent if path.name == "task.toml" else path).resolve()
        if (directory / "task.toml").exists():
            found[directory] = None
            continue
        if not directory.is_dir():
            raise TaskError(f"{path}: no such directory")
        below = sorted(one for one in directory.iterdir() if (one / "task.toml").exists())
        if not below:
            raise TaskError(f"{path}: neither it nor a directory in it holds a task.toml")
        found.update(dict.fromkeys(below))
    return list(found)
