"""Where a trial of Harbor's comes from, for the manifest of its batch."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from coldframe.integrations.harbor_rl.specs import field_of
from coldframe.learning.contracts import Provenance
from coldframe.rollouts.digests import tree_digest


def harbor_version() -> str | None:
    """Return the version of the Harbor that is installed here, if one is."""
    try:
        return metadata.version("harbor")
    except metadata.PackageNotFoundError:
        return None


def provenance(trial: Any, *, reward_schema: str | None, version: str | None) -> Provenance | None:
    """Return where a trial is from; None if anything of it is not known.

    The verifier's digest is that of the task's tests if they lie on this machine, else of the whole
    task, which holds them.
    """
    config, agent = field_of(trial, "config"), field_of(trial, "agent_info")
    task_digest = field_of(trial, "task_checksum")
    times = [_seconds(field_of(trial, name)) for name in ("started_at", "finished_at")]
    trials_dir = field_of(config, "trials_dir")
    known = (version, reward_schema, agent, task_digest, trials_dir, *times)
    if any(one is None for one in known):
        return None
    asked = field_of(config, "agent")
    kwargs = field_of(asked, "kwargs")
    agent_config = dict(kwargs) if isinstance(kwargs, Mapping) else {}
    return Provenance(
        run_id=Path(str(trials_dir)).name,
        runner=f"harbor {version}",
        agent=f"{field_of(agent, 'name')} {field_of(agent, 'version')}",
        agent_config=agent_config | {"model_name": field_of(asked, "model_name")},
        task_digest=str(task_digest),
        verifier_digest=_tests_digest(field_of(config, "task")) or str(task_digest),
        reward_schema=str(reward_schema),
        started_at=times[0] or 0.0,
        ended_at=times[1] or 0.0,
    )


def _tests_digest(task: Any) -> str | None:
    path, remote = field_of(task, "path"), field_of(task, "git_url")
    if path is None or remote is not None or not Path(str(path)).is_dir():
        return None
    root = Path(str(path))
    names = [
        "tests",
        *sorted(f"steps/{one.parent.name}/tests" for one in root.glob("steps/*/tests")),
    ]
    return tree_digest(root, names)


def _seconds(value: Any) -> float | None:
    """Return Unix seconds; None for a time without its zone, which could be any."""
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            return None
    return value.timestamp() if isinstance(value, datetime) and value.tzinfo else None
