"""`coldframe import`: attempts that others made, as runs of ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from coldframe.cli import flags, render
from coldframe.cli.groups import group
from coldframe.cli.progress import outcome

app = group()


@app.callback()
def incoming() -> None:
    """Make runs of what other runners left."""


@app.command("harbor")
def harbor(
    job: Annotated[
        Path, typer.Argument(metavar="JOB_DIR", help="Of one job: holds a directory per trial.")
    ],
    out: Annotated[Path, typer.Option(metavar="RUN", help="Directory of the run that it becomes.")],
    as_json: flags.Json = False,
) -> int:
    """Import the trials of a Harbor job (0.18 or later, agents' logs in ATIF 1.0 to 1.8).

    Each trial that ended becomes an attempt, which `rollout show` and `export atif` read. Samples
    of a task are numbered by their begin. What Harbor does not keep is null and listed with its
    reason under `unknown`; a missing reward stays missing. Nothing is followed by a link, and a
    trial that cannot be read is refused by file and field and stops no other. The report is also
    kept as import.json in RUN. Exit code: 0 all trials are imported, 1 some were refused, 2 JOB_DIR
    is no job or RUN no place for it.

    Example: coldframe import harbor jobs/2026-11-30__12-00-00 --out runs/from-harbor
    """
    from coldframe.integrations.harbor_trials import import_job

    report = import_job(job, out)
    if as_json:
        print(json.dumps(report.document()))
        return 1 if report.refused else 0
    rows = [
        [report.keys[name], render.safe(name), outcome(one)[:70], str(one.totals.steps)]
        for name, one in report.attempts.items()
    ]
    if rows:
        print(render.table(["ATTEMPT", "TRIAL", "OUTCOME", "STEPS"], rows))
    for name, one in report.attempts.items():
        for warning in one.warnings:
            print(render.sentence(f"{name}: {warning}"))
    for gone in report.refused:
        told = ": ".join(text for text in gone.values() if text)
        print(render.sentence(f"refused: {told}"))
    print(f"{len(rows)} trials imported into {out}, {len(report.refused)} refused")
    return 1 if report.refused else 0
