"""What a task is, checked and resolved: everything that an attempt needs, and nothing to look up.

A task is one environment and one or more steps. A single-step task has one step, so whoever
runs tasks knows steps only; what `[agent]`, `[verifier]` and the root say once for all steps is
already in each of them. `load_task` makes these from a directory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from coldframe.harnesses.base import McpServer, Offers
from coldframe.protocol.errors import TaskError
from coldframe.protocol.network import NetworkPolicy
from coldframe.rollouts.artifacts import Artifact

DIGESTED = ("task.toml", "instruction.md", "environment", "tests", "solution", "steps")
DEFAULT_VERIFIER_S = 600.0
DEFAULT_BUILD_S = 600.0

PUBLIC = NetworkPolicy(public=True)

RewardStrategy = Literal["mean", "final"]
NetworkMode = Literal["public", "no-network", "allowlist"]


@dataclass(frozen=True)
class Healthcheck:
    """A command that must succeed before an agent may act. All times in seconds.

    It is run again and again until it exits with 0. A failure counts once `start_period_s` has
    passed; `retries` failures that count, in a row, and what it checks is unhealthy.
    """

    command: str | tuple[str, ...]
    """A line for the shell, or argv."""
    interval_s: float = 5.0
    """From the end of one run to the next, once the start period is over."""
    timeout_s: float = 30.0
    """Of one run, which is killed then and has failed."""
    start_period_s: float = 0.0
    """How long failures do not count."""
    start_interval_s: float = 5.0
    """As `interval_s`, within the start period."""
    retries: int = 3

    @property
    def longest_s(self) -> float:
        """Seconds after which it has decided, whatever the command does."""
        grace = self.start_period_s + self.timeout_s if self.start_period_s else 0.0
        return grace + self.retries * (self.timeout_s + self.interval_s)


@dataclass(frozen=True)
class CollectHook:
    """A command run in the agent's sandbox when the agent is done, before artifacts are taken.

    It turns state that only a live process knows into files. Its failure is noted, and fatal to
    nothing.
    """

    command: str
    timeout_s: float = 60.0
    user: str | int | None = None
    """None: the sandbox's own."""


@dataclass(frozen=True)
class EnvironmentSpec:
    """What a sandbox is made from, and its limits. None: our own default."""

    docker_image: str | None
    dockerfile: Path | None
    """Used when there is no `docker_image`."""
    context: Path
    build_timeout_s: float = DEFAULT_BUILD_S
    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None
    network: NetworkPolicy = PUBLIC
    """The baseline: in force unless the agent or the verifier has a policy of its own."""
    network_declared: NetworkMode | None = None
    """None: the task says nothing, which means `public`."""
    healthcheck: Healthcheck | None = None
    """None: that of the image, if it has one."""
    mcp_servers: tuple[McpServer, ...] = ()
    skills_dir: str | None = None
    """In the sandbox; one directory with a SKILL.md per skill."""


@dataclass(frozen=True)
class AgentSpec:
    """On what terms the agent acts in one step."""

    timeout_s: float | None
    """None: no limit of the task's."""
    user: str | int | None
    """None: the sandbox's own."""
    network: NetworkPolicy
    network_mode: NetworkMode


@dataclass(frozen=True)
class VerifierSpec:
    """On what terms one step is graded."""

    timeout_s: float
    """Infinite: whoever asked for the verdict ends the wait."""
    user: str | int | None
    """None: root in the agent's sandbox, the image's own user in a separate one."""
    env: Mapping[str, str]
    network: NetworkPolicy
    network_mode: NetworkMode
    environment: EnvironmentSpec | None
    """Of the separate sandbox that grades; None: the agent's sandbox is graded in place."""
    tests: tuple[Path, ...]
    """Directories to upload to /tests in this order; a later file replaces an earlier one.
    Empty when the verifier's own image holds /tests/test.sh."""
    collect: tuple[CollectHook, ...] = ()

    @property
    def separate(self) -> bool:
        """Whether grading has a sandbox of its own."""
        return self.environment is not None

    @property
    def runs_as(self) -> str | int | None:
        """Who runs test.sh; None: the image's own user, who is in a separate sandbox."""
        return 0 if self.user is None and not self.separate else self.user

    @property
    def script(self) -> Path | None:
        """The test.sh that is run; None: that of the verifier's own image."""
        found = (one / "test.sh" for one in reversed(self.tests))
        return next((script for script in found if script.is_file()), None)


@dataclass(frozen=True)
class TaskStep:
    """One instruction, one agent phase, one verdict. All steps share the agent's sandbox."""

    name: str | None
    """None: the only step of a task without `[[steps]]`."""
    instruction: str
    agent: AgentSpec
    verifier: VerifierSpec
    artifacts: tuple[Artifact, ...]
    """What is taken from the sandbox when the agent is done: /logs/artifacts, the task's, the
    step's."""
    min_reward: Mapping[str, float] | None = None
    """By part: less than this, or no such part, ends the task after this step."""
    healthcheck: Healthcheck | None = None
    """After the step's setup, beside the environment's own."""
    workdir: Path | None = None
    """A directory whose content is put into the working directory before the step."""
    reference: Path | None = None
    """The directory of the solve.sh that must pass."""
    wrong: Mapping[str, Path] = field(default_factory=dict)
    """By the wrong solution's name, the directory of its solve.sh for this step."""

    @property
    def setup(self) -> Path | None:
        """The script in `workdir` that is run there, as the agent's user, before the step."""
        script = None if self.workdir is None else self.workdir / "setup.sh"
        return script if script is not None and script.is_file() else None


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
    environment: EnvironmentSpec
    steps: tuple[TaskStep, ...]
    """At least one."""
    reward_strategy: RewardStrategy = "mean"
    """How the rewards of several steps become those of the task."""
    solution_env: Mapping[str, str] = field(default_factory=dict)
    full_kill: bool = False
    start_cmd: bool = False
    """Start the images' CMD too, which otherwise is not."""
    key_inputs: tuple[str, ...] = ()
    """Paths that no verifier changes: if one is changed while it runs, its verdict is void."""
    agent_paths: tuple[str, ...] = ()
    """Paths whose code the verifier may run, though the agent has made it, in what writes the
    reward."""
    pass_threshold: float = 1.0
    metadata: Mapping[str, Any] = field(default_factory=dict)
    repository_commit: str | None = None
    secrets: frozenset[str] = frozenset()
    """Values that must not be written down: what the task took from this machine."""

    @property
    def multi_step(self) -> bool:
        """Whether the task names its steps."""
        return self.steps[0].name is not None

    @property
    def offers(self) -> Offers:
        """What the harness is to pass on to the agent."""
        return Offers(self.environment.mcp_servers, self.environment.skills_dir)

    @property
    def wrong(self) -> tuple[str, ...]:
        """Names of the solutions that must fail."""
        return tuple(sorted({name for step in self.steps for name in step.wrong}))

    def solution(self, step: TaskStep, wrong: str | None = None) -> Path | None:
        """Return the directory of the solve.sh for a step, or None if it has none.

        Args:
            wrong: that of this wrong solution; steps that it leaves out are solved rightly.
        Raises:
            TaskError: there is no wrong solution of that name.
        """
        if wrong is None:
            return step.reference
        if wrong not in self.wrong:
            raise TaskError(f"{self.directory / 'wrong' / wrong}: no such wrong solution")
        return step.wrong.get(wrong, step.reference)
