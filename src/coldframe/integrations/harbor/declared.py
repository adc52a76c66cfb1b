"""Read what Harbor's objects declare into the values that rollouts work with.

`[metadata.coldframe]` of the task's own task.toml counts here too, so that both roads run a task
on the same terms. Harbor does not hand it on; it lies above the environment's directory.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coldframe.protocol.errors import TaskError
from coldframe.protocol.network import NetworkPolicy
from coldframe.rollouts.fields import Source, Table
from coldframe.rollouts.load import read_metadata
from coldframe.rollouts.networks import PUBLIC, read_network
from coldframe.rollouts.task import EnvironmentSpec, Healthcheck

_LEVELS = 3
"""The file lies above `environment`, `tests`, or `steps/NAME/tests`."""


@dataclass(frozen=True)
class Terms:
    """What `[metadata.coldframe]` says, and how many verdicts the task comes to."""

    full_kill: bool = False
    start_cmd: bool = False
    key_inputs: tuple[str, ...] = ()
    agent_paths: tuple[str, ...] = ()
    steps: int = 1


def read_terms(environment_dir: Path) -> Terms:
    """Return the terms of the task that an environment's directory is part of.

    Raises:
        TaskError: `[metadata.coldframe]` has faults.
    """
    above = [*environment_dir.resolve().parents][:_LEVELS]
    file = next((one for each in above if (one := each / "task.toml").is_file()), None)
    if file is None:
        return Terms()
    data = tomllib.loads(file.read_text())
    source = Source(file, {})
    said = read_metadata(Table(source, data))
    if source.problems:
        raise TaskError("; ".join(source.problems))
    return Terms(
        full_kill=bool(said["full_kill"]),
        start_cmd=bool(said["start_cmd"]),
        key_inputs=tuple(said["key_inputs"]),
        agent_paths=tuple(said["agent_paths"]),
        steps=max(1, len(data.get("steps", ()))),
    )


def policy_of(declared: Any) -> NetworkPolicy:
    """Return the policy that a `NetworkPolicy` of Harbor's means.

    Raises:
        TaskError: an entry of `allowed_hosts` is no host name, address or range.
    """
    source = Source(Path("task.toml"), {})
    hosts = list(declared.allowed_hosts)
    said = {"network_mode": declared.network_mode.value} | (
        {"allowed_hosts": hosts} if hosts else {}
    )
    found = read_network(Table(source, said))
    if source.problems:
        raise TaskError("; ".join(source.problems))
    return (found or PUBLIC).policy


def healthcheck_of(declared: Any) -> Healthcheck:
    """Return the healthcheck that a `HealthcheckConfig` of Harbor's means."""
    return Healthcheck(
        declared.command,
        interval_s=declared.interval_sec,
        timeout_s=declared.timeout_sec,
        start_period_s=declared.start_period_sec,
        start_interval_s=declared.start_interval_sec,
        retries=declared.retries,
    )


def spec_of(environment_dir: Path, declared: Any, *, force_build: bool = False) -> EnvironmentSpec:
    """Return what a sandbox is made from: an `EnvironmentConfig` of Harbor's and its directory.

    Args:
        force_build: build a Dockerfile that is there even if an image is named.
    """
    dockerfile = environment_dir / "Dockerfile"
    there = dockerfile.is_file()
    named = declared.docker_image or None
    return EnvironmentSpec(
        docker_image=None if there and force_build else named,
        dockerfile=dockerfile if there else None,
        context=environment_dir,
        build_timeout_s=declared.build_timeout_sec,
        workdir=declared.workdir or None,
        storage_mb=declared.storage_mb,
    )
