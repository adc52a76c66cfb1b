"""`coldframe rewards`: what verdicts are worth by a schema, and where that changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from coldframe.cli import flags, render
from coldframe.cli.groups import group
from coldframe.learning.schemas import (
    DerivedReward,
    DerivedStore,
    RewardSchema,
    derive,
    drift,
    load_schema,
)
from coldframe.protocol.errors import InvalidRequestError
from coldframe.trajectories.store import TRAJECTORY_FILE, BlobStore, read_trajectory

app = group()


@app.callback()
def rewards() -> None:
    """Compute rewards again by a schema, beside the old ones, and list what changed."""


@app.command("derive")
def derive_run(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run.")],
    schema: Annotated[Path, typer.Option(help="The reward schema, a rewards.toml.")],
    out: Annotated[Path, typer.Option(help="File of records; lines are only ever added.")],
    as_json: flags.Json = False,
) -> int:
    """Add a record per attempt of a run: its scalar by the schema, or why it has none."""
    made = _records(run, load_schema(schema))
    added = DerivedStore(out).add(made)
    worth = sum(one.value is not None for one in made)
    if as_json:
        told = {"added": added, "there": len(made) - added, "with_scalar": worth}
        print(json.dumps(told, indent=2))
    else:
        print(f"{added} records added, {len(made) - added} were there; {worth} have a scalar")
    return 0


def _records(run: Path, schema: RewardSchema) -> list[DerivedReward]:
    files = sorted(run.glob(f"attempts/*/{TRAJECTORY_FILE}"))
    if not files:
        raise InvalidRequestError(f"{run}: holds no attempts; name the directory of a run")
    blobs, made = BlobStore(run / "blobs"), []
    for file in files:
        found = read_trajectory(file, blobs)
        who = found.identity
        if who.verifier.digest is None:
            raise InvalidRequestError(
                f"{file}: which verifier graded is not known "
                f"({found.unknown['identity.verifier.digest']}), so no drift could be told"
            )
        made.append(
            derive(
                schema,
                trial=f"{who.run_id}/{file.parent.name}",
                task=who.task.key,
                parts=found.rewards,
                verifier_digest=who.verifier.digest,
            )
        )
    return made


@app.command("drift")
def list_drift(
    records: Annotated[Path, typer.Argument(metavar="FILE", help="Records that were derived.")],
    as_json: flags.Json = False,
) -> int:
    """List every trial whose worth changed from one schema or verifier to the next."""
    if records.is_dir():
        raise InvalidRequestError(
            f"{records}: is a directory; name the file that coldframe rewards derive --out wrote"
        )
    if not records.is_file():
        raise InvalidRequestError(f"{records}: no such file; make it with coldframe rewards derive")
    found = drift(DerivedStore(records).read())
    if as_json:
        changes = [
            {
                "before": one.before.model_dump(mode="json"),
                "after": one.after.model_dump(mode="json"),
                "changed": list(one.changed),
            }
            for one in found
        ]
        print(json.dumps({"changes": changes}, indent=2))
        return 0
    rows = [
        [
            render.safe(one.after.trial),
            f"{one.before.schema_label} {one.before.verifier_digest[:12]}",
            f"{one.after.schema_label} {one.after.verifier_digest[:12]}",
            _worth(one.before),
            _worth(one.after),
            ", ".join(one.changed),
        ]
        for one in found
    ]
    if rows:
        print(render.table(["TRIAL", "FROM", "TO", "WAS", "IS", "CHANGED"], rows))
    print(f"{len(rows)} changes of what a trial is worth")
    return 0


def _worth(record: DerivedReward) -> str:
    return "refused" if record.value is None else f"{record.value:g}"
