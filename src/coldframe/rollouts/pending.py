"""What a task may say and attempts do not do yet: it refuses the task by name until they do."""

from __future__ import annotations

from coldframe.protocol.errors import TaskError
from coldframe.rollouts.artifacts import CONVENTION
from coldframe.rollouts.task import Task


def refuse_pending(task: Task) -> None:
    """Refuse a task that asks for something that attempts do not do yet.

    Raises:
        TaskError: each reason is named.
    """
    spec, file = task.environment, task.directory / "task.toml"
    said = {
        "[[steps]]": task.multi_step,
        "[environment] network_mode": spec.network_declared in {"public", "allowlist"},
        "[environment] healthcheck": spec.healthcheck is not None,
    }
    for step in task.steps:
        baseline = spec.network_declared or "public"
        said |= {
            "artifacts": any(one.source != CONVENTION for one in step.artifacts),
            "[agent] network_mode": step.agent.network_mode not in {baseline, "no-network"},
            "[verifier] network_mode": step.verifier.network_mode not in {baseline, "no-network"},
            '[verifier] environment_mode = "separate"': step.verifier.separate,
            "[verifier] collect": bool(step.verifier.collect),
        }
    problems = [f"{file}: {name} is not honoured yet" for name, yes in said.items() if yes]
    if problems:
        raise TaskError("; ".join(problems))
