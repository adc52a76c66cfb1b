"""Read `[agent]`, `[verifier]` and `[[steps]]`, and make of them the steps that are run.

What the root says once is every step's default. A step replaces it field by field, except that
`env` is merged, and that artifacts and collect hooks are added to the root's.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from coldframe.rollouts.artifacts import Artifact, clash, with_convention
from coldframe.rollouts.fields import Table, brief
from coldframe.rollouts.layout import StepFiles, TaskFiles
from coldframe.rollouts.networks import Declared, read_network
from coldframe.rollouts.sections import (
    read_artifacts,
    read_collect,
    read_environment,
    read_healthcheck,
    read_min_reward,
)
from coldframe.rollouts.task import (
    DEFAULT_VERIFIER_S,
    AgentSpec,
    CollectHook,
    EnvironmentSpec,
    TaskStep,
    VerifierSpec,
)

_NAME = re.compile(r'[^\x00-\x1f\x7f<>:"/\\|?*]+(?<![. ])')


@dataclass(frozen=True)
class _Agent:
    """`[agent]` as it stands there; None: not said."""

    timeout_s: float | None
    user: str | int | None
    network: Declared | None


@dataclass(frozen=True)
class _Verifier:
    """`[verifier]` as it stands there; None: not said."""

    timeout_s: float | None
    user: str | int | None
    env: Mapping[str, str]
    network: Declared | None
    mode: str | None
    """shared or separate; an environment of its own means separate."""
    environment: EnvironmentSpec | None
    collect: tuple[CollectHook, ...]


def read_steps(root: Table, environment: EnvironmentSpec, files: TaskFiles) -> list[TaskStep]:
    """Return the steps of a task; what is wrong with them is noted in the table's source."""
    agent, verifier = _agent(root.table("agent")), _verifier(root.table("verifier"), files)
    artifacts = read_artifacts(root)
    maker = _Maker(root, environment, files, agent, verifier, artifacts)
    tables = root.tables("steps")
    if not tables:
        return [maker.only()]
    return [maker.step(table, name) for table, name in _named(tables)]


@dataclass(frozen=True)
class _Maker:
    """Everything that the steps of one task have in common."""

    root: Table
    environment: EnvironmentSpec
    files: TaskFiles
    agent: _Agent
    verifier: _Verifier
    artifacts: list[Artifact]

    def only(self) -> TaskStep:
        """Return the step of a single-step task."""
        return self._made(self.root, self.files.only(), self.agent, self.verifier, [])

    def step(self, table: Table, name: str) -> TaskStep:
        """Return the step of one `[[steps]]` table."""
        agent, verifier = (
            _agent(table.table("agent")),
            _verifier(table.table("verifier"), self.files),
        )
        health = read_healthcheck(table.table("healthcheck"))
        artifacts, least = read_artifacts(table), read_min_reward(table)
        table.close()
        files = self.files.step(name)
        made = self._made(
            table,
            files,
            _Agent(
                agent.timeout_s or self.agent.timeout_s,
                _first(agent.user, self.agent.user),
                agent.network or self.agent.network,
            ),
            self._merged(verifier),
            artifacts,
        )
        return replace(made, name=name, min_reward=least, healthcheck=health, workdir=files.workdir)

    def _merged(self, own: _Verifier) -> _Verifier:
        base = self.verifier
        return _Verifier(
            timeout_s=own.timeout_s or base.timeout_s,
            user=_first(own.user, base.user),
            env={**base.env, **own.env},
            network=own.network or base.network,
            mode=own.mode or base.mode,
            environment=own.environment,
            collect=base.collect + own.collect,
        )

    def _made(
        self,
        table: Table,
        files: StepFiles,
        agent: _Agent,
        verifier: _Verifier,
        artifacts: list[Artifact],
    ) -> TaskStep:
        spec = self.environment
        baseline = Declared(spec.network_declared or "public", spec.network)
        acting = agent.network or baseline
        return TaskStep(
            name=None,
            instruction=files.instruction,
            agent=AgentSpec(agent.timeout_s, agent.user, acting.policy, acting.mode),
            verifier=self._verifier_spec(files, verifier, baseline),
            artifacts=self._all_artifacts(table, artifacts),
            reference=files.reference,
            wrong=files.wrong,
        )

    def _verifier_spec(
        self, files: StepFiles, verifier: _Verifier, baseline: Declared
    ) -> VerifierSpec:
        environment, tests = None, files.tests
        if verifier.mode == "separate":
            environment, own_image = self._separate(files, verifier)
            baseline = Declared(environment.network_declared or "public", environment.network)
            tests = () if own_image else tests
        network = verifier.network or baseline
        spec = VerifierSpec(
            timeout_s=verifier.timeout_s or DEFAULT_VERIFIER_S,
            user=verifier.user,
            env=verifier.env,
            network=network.policy,
            network_mode=network.mode,
            environment=environment,
            tests=tests,
            collect=verifier.collect,
        )
        if tests is files.tests and spec.script is None:
            self.root.source.problems.append(f"{files.test_script}: no such file; it grades")
        return spec

    def _separate(self, files: StepFiles, verifier: _Verifier) -> tuple[EnvironmentSpec, bool]:
        """Return what a separate verifier is made from, and whether it is an image of its own.

        The nearest image or tests/Dockerfile counts, and holds the tests itself. Without any it
        is a fresh sandbox like the agent's, to which the tests are uploaded.
        """
        named = verifier.environment or self.verifier.environment
        spec = replace(named or self.environment, mcp_servers=(), skills_dir=None)
        nearest = [(self.verifier.environment, self.files.tests)]
        if files.own_tests is not None:
            nearest.insert(0, (verifier.environment, files.own_tests))
        for environment, directory in nearest:
            image = None if environment is None else environment.docker_image
            dockerfile = directory / "Dockerfile"
            if image is None and not dockerfile.is_file():
                continue
            # What is asked of the agent's image means nothing to another one.
            health = None if named is None else named.healthcheck
            return replace(
                spec,
                docker_image=image,
                dockerfile=dockerfile,
                context=directory,
                healthcheck=health,
            ), True
        task = self.environment
        return replace(
            spec,
            docker_image=task.docker_image,
            dockerfile=task.dockerfile,
            context=task.context,
        ), False

    def _all_artifacts(self, table: Table, own: list[Artifact]) -> tuple[Artifact, ...]:
        artifacts = with_convention([*self.artifacts, *own])
        both = clash(artifacts)
        if both is not None:
            first, second = (f"{one.source!r} at {str(one.target)!r}" for one in both)
            table.problem("artifacts", f"would put {second} into the place of {first}")
        return artifacts


def _agent(table: Table) -> _Agent:
    made = _Agent(table.number("timeout_sec"), table.user(), read_network(table))
    table.close()
    return made


def _verifier(table: Table, files: TaskFiles) -> _Verifier:
    environment = None
    if table.has("environment") and not (own := table.table("environment")).empty:
        for name in ("mcp_servers", "skills_dir"):
            own.refuse(name, ([], ""), "is for agents; a verifier has no use for it")
        environment = read_environment(own, files.environment)
    mode = table.choice("environment_mode", ("shared", "separate"))
    if mode == "shared" and environment is not None:
        table.problem("environment_mode", '= "shared" contradicts an environment of its own')
    made = _Verifier(
        timeout_s=table.number("timeout_sec"),
        user=table.user(),
        env=table.environment(),
        network=read_network(table),
        mode=mode or (None if environment is None else "separate"),
        environment=environment,
        collect=read_collect(table),
    )
    table.close()
    return made


def _first(own: Any, inherited: Any) -> Any:
    return inherited if own is None else own


def _named(tables: list[Table]) -> list[tuple[Table, str]]:
    """Return the tables whose name may name a directory, each with it; note the others."""
    named, seen = [], set()
    for table in tables:
        name = table.raw("name")
        if not (isinstance(name, str) and _NAME.fullmatch(name) and len(name.encode()) <= 255):
            table.problem("name", f"= {brief(name)} cannot name a directory below steps/")
            continue
        folded = unicodedata.normalize("NFC", name).casefold()
        if folded in seen:
            table.problem("name", "stands there twice, capital letters aside")
        seen.add(folded)
        named.append((table, name))
    return named
