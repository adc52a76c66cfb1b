"""`coldframe export`: attempts in the formats of others."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from coldframe.cli import flags, render
from coldframe.cli.groups import group
from coldframe.protocol.errors import InferenceError, InvalidRequestError
from coldframe.rollouts.directory import CONFIG_SCHEMA, AttemptKey, RunDirectory

app = group()


@app.callback()
def outgoing() -> None:
    """Write attempts in the formats of others."""


@app.command("atif")
def atif(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Gets one ATTEMPT.json per attempt.")],
    attempt: Annotated[
        str | None, typer.Option(metavar="TASK.SAMPLE.ATTEMPT", help="Only this one.")
    ] = None,
    as_json: flags.Json = False,
) -> int:
    """Write attempts as ATIF 1.7, which Harbor's own validator takes.

    A step holds the answer, its tool calls, what the model was shown, and, where the run was
    captured with --capture tokens, the exact token ids and log-probabilities. Rewards, failures and
    what is not known stand under extra.coldframe. What ATIF cannot hold, such as an attempt without
    any step, and what does not read back are refused by name. Exit code: 0 all are written, 1 some
    were refused, 2 RUN is none or has no such attempt.

    Example: coldframe export atif runs/mine --out atif
    """
    from coldframe.integrations.harbor_trials import AtifExportError
    from coldframe.trajectories.store import StoreError, write_json

    directory = RunDirectory(run)
    directory.read("config.json", CONFIG_SCHEMA)
    results = directory.written()
    chosen = [key for key in results if attempt in (None, str(key))]
    if not chosen:
        known = ", ".join(map(str, results[:20])) or "none"
        wanted = "an attempt" if attempt is None else f"{attempt!r}"
        raise InvalidRequestError(f"{run}: {wanted} has no result; there are: {known}")
    out.mkdir(parents=True, exist_ok=True)
    written: list[str] = []
    refused: list[dict[str, str]] = []
    for key in chosen:
        path = out / f"{key}.json"
        try:
            write_json(path, _document(directory, key))
            written.append(str(path))
        except (AtifExportError, StoreError, InferenceError) as error:
            refused.append({"attempt": str(key), "problem": str(error)})
    if as_json:
        print(json.dumps({"written": written, "refused": refused}))
    else:
        for gone in refused:
            print(render.sentence(f"refused: {gone['problem']}"))
        print(f"{len(written)} attempts written to {out}, {len(refused)} refused")
    return 1 if refused else 0


def _document(directory: RunDirectory, key: AttemptKey) -> dict[str, Any]:
    from coldframe.integrations.harbor_trials import to_atif
    from coldframe.trajectories.calls import read_calls

    journal = directory.calls(key)
    calls = read_calls(journal) if os.path.lexists(journal) else None
    return to_atif(directory.result(key), directory.blobs, str(key), calls)
