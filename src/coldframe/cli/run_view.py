"""How a run is shown: its summary, task by task, and a line of each attempt."""

from __future__ import annotations

from typing import Any

from coldframe.cli import render
from coldframe.cli.progress import outcome
from coldframe.rollouts.directory import AttemptKey
from coldframe.trajectories.schema import Trajectory

ATTEMPTS = (
    "ATTEMPT",
    "OUTCOME",
    "STEPS",
    "TOKENS",
    "CREATE",
    "MODEL",
    "EXEC",
    "VERIFY",
    "DELETE",
    "OTHER",
    "TOTAL",
)


def summary_table(summary: dict[str, Any]) -> str:
    """Return a run's summary: a table with a line per task, and what holds for all of them.

    Of what was refused only the count: the reasons are told as they come; see `refusals`.
    """
    rows = [
        [
            key,
            f"{task['passes']}/{task['verdicts']}",
            _number(task["mean_reward"]),
            str(task["missing"]),
            _number(task["pass_at_k"].get(str(task["samples"]))),
            _failures(task["failures_by_side"]),
            render.seconds(task["times"]["run_s"]),
        ]
        for key, task in summary["tasks"].items()
    ]
    totals = summary["totals"]
    header = ["TASK", "PASSED", "MEAN", "MISSING", "PASS@K", "FAILURES", "T_RUN"]
    lines = [render.table(header, rows), ""] if rows else []
    lines.append(
        f"{totals['passes']} passes in {totals['verdicts']} verdicts, {totals['missing']} missing, "
        f"{totals['attempts']} attempts, {totals['failed_attempts']} failed"
        + (f"; {len(summary['refused'])} tasks refused" if summary["refused"] else "")
    )
    lines += [f"{key}: {note}" for key, task in summary["tasks"].items() for note in _notes(task)]
    if not totals["attempts"]:
        return "\n".join(lines)
    spent = (f"{name} {phase['seconds']:.2f}" for name, phase in totals["phases"].items())
    lines.append(
        f"phases, in s: {', '.join(spent) or 'none'} "
        "(of all attempts together; build: what each waited for its image)"
    )
    times = totals["times"]
    names = ("create_s", "model_s", "exec_s", "verify_s", "delete_s")
    parts = " + ".join(f"{name[:-2]} {render.seconds(times[name])}" for name in names)
    lines.append(f"T_run {render.seconds(times['run_s'])} s = {parts}")
    return "\n".join(lines)


def refusals(summary: dict[str, Any]) -> list[str]:
    """Return a line for every task that was refused."""
    return [f"refused: {render.sentence(why)}" for why in summary["refused"].values()]


def without_summary(config: dict[str, Any]) -> str:
    """Say why a run has no summary: what was imported never gets one."""
    source = config["asked"].get("import")
    if source is not None:
        return f"imported from {source}: there is no summary, since nothing was run here"
    return "this run has no summary yet: it runs, or was killed; run it again to go on"


def _notes(task: dict[str, Any]) -> list[str]:
    """Say what casts doubt on a task's verdicts, and how its steps and its egress went."""
    tamper, egress = task["tamper"], task["egress"]
    notes = []
    if tamper["attempts"]:
        notes.append(f"{tamper['attempts']} attempts tampered with ({tamper['voided']} void)")
    if tamper["forgeable"]:
        notes.append(f"{tamper['forgeable']} verdicts that a survivor could have forged")
    for name, step in task["steps"].items():
        mean = _number(step["mean_reward"])
        notes.append(f"step {name}: {step['verdicts']} verdicts, mean {mean}")
    if egress:
        notes.append("egress: " + ", ".join(f"{count} {kind}" for kind, count in egress.items()))
    return notes


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _failures(sides: dict[str, dict[str, int]]) -> str:
    return ", ".join(f"{sum(codes.values())} {side}" for side, codes in sides.items()) or "-"


def brief(one: Trajectory) -> dict[str, Any]:
    """Return what a list of attempts says of one, as JSON values."""
    failure = one.failure
    return {
        "rewards": one.rewards,
        "termination": one.termination.value,
        "failure": None if failure is None else failure.model_dump(mode="json"),
        "totals": one.totals.model_dump(mode="json"),
        "times": {**one.times.model_dump(mode="json"), "run_s": one.times.run_s},
        "phases": [
            {
                "name": phase.name,
                "step": phase.step,
                "network": list(phase.network),
                "seconds": phase.ended_at - phase.started_at,
                "egress": phase.egress.asked,
            }
            for phase in one.phases
        ],
        "task_steps": [
            {"name": step.name, "rewards": step.rewards, "steps": step.totals.steps}
            for step in one.task_steps
        ],
        "tamper": [event.model_dump(mode="json") for event in one.tamper],
        "warnings": list(one.warnings),
    }


def row(key: AttemptKey, one: Trajectory) -> list[str]:
    """Return an attempt's line in the table under `ATTEMPTS`."""
    tokens, times = one.totals.completion_tokens, one.times
    known = tokens is not None and one.identity.model is not None
    parts = (times.create_s, times.model_s, times.exec_s, times.verify_s)
    seconds = (*parts, times.delete_s, times.other_s, times.total_s)
    return [
        str(key),
        outcome(one)[:70],
        str(one.totals.steps),
        str(tokens) if known else "-",
        *map(render.seconds, seconds),
    ]
