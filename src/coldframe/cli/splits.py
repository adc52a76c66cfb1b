"""`coldframe splits`: make splits that stay apart, and see that they do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from coldframe.cli import flags, render
from coldframe.cli.groups import group
from coldframe.learning.splits import (
    Overlap,
    SplitError,
    SplitPlan,
    make_splits,
    overlaps,
    read_corpus_task,
    read_manifest,
    write_manifests,
)
from coldframe.rollouts.digests import tree_digest
from coldframe.rollouts.layout import find_tasks
from coldframe.rollouts.task import DIGESTED

app = group()
Threshold = Annotated[
    float, typer.Option(help="Share of runs of words in common that makes two tasks nearly one.")
]


@app.callback()
def splits() -> None:
    """Split tasks by group into frozen manifests, and find what splits have in common."""


@app.command("make")
def make(
    tasks: Annotated[
        list[Path],
        typer.Argument(metavar="TASK...", help="Task directories, or directories of them."),
    ],
    by: Annotated[
        str,
        typer.Option(
            help="What keeps tasks together: repository, template, source, time, another key of "
            "[metadata]; or task: each is a group of its own."
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where NAME.json of each split goes.")],
    split: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=SHARE", help="Default: train=0.8 and eval=0.2."),
    ] = None,
    seed: Annotated[str, typer.Option(help="Another one gives other splits.")] = "0",
    cut: Annotated[
        str | None, typer.Option(metavar="DATE", help="By time: the second split begins here.")
    ] = None,
    threshold: Threshold = 0.8,
    as_json: flags.Json = False,
) -> int:
    """Split tasks so that no group is in two splits; the same tasks are split alike everywhere.

    Writes nothing, names both sides and exits with 1 if the splits have something in common
    nevertheless.
    """
    plan = SplitPlan(by, _shares(split or ["train=0.8", "eval=0.2"]), seed, cut)
    found = [read_corpus_task(one, tree_digest(one, DIGESTED)) for one in find_tasks(tasks)]
    made = make_splits(found, plan)
    shared = overlaps({one.name: one for one in made}, threshold=threshold)
    if shared:
        _tell(shared, as_json=as_json)
        return 1
    out.mkdir(parents=True, exist_ok=True)
    paths = {out / f"{one.name}.json": one for one in made}
    write_manifests(paths)
    written = {}
    for path, one in paths.items():
        groups = len({task.group for task in one.tasks})
        written[one.name] = {"path": str(path), "tasks": len(one.tasks), "groups": groups}
        if not as_json:
            print(f"{path}: {len(one.tasks)} tasks in {groups} groups")
    if as_json:
        print(json.dumps({"splits": written, "overlaps": []}, indent=2))
    return 0


@app.command("check")
def check(
    manifests: Annotated[list[Path], typer.Argument(metavar="MANIFEST...", help="Two or more.")],
    threshold: Threshold = 0.8,
    as_json: flags.Json = False,
) -> int:
    """Compare splits by keys, content, groups, and likeness of instructions and tests.

    Exit code: 0 nothing in common, 1 something, 2 a manifest cannot be read or was changed.
    """
    found = {str(one): read_manifest(one) for one in manifests}
    if len(found) < 2:
        raise SplitError("name two manifests or more: there is nothing to compare one with")
    shared = overlaps(found, threshold=threshold)
    _tell(shared, as_json=as_json)
    return 1 if shared else 0


def _shares(given: Sequence[str]) -> dict[str, float]:
    shares: dict[str, float] = {}
    for one in given:
        name, _, share = one.partition("=")
        try:
            number = float(share)
        except ValueError:
            raise SplitError(f"--split {one!r} is not NAME=SHARE, as train=0.8") from None
        if name in shares:
            raise SplitError(f"--split {name} is there twice")
        shares[name] = number
    return shares


def _tell(shared: Sequence[Overlap], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"overlaps": [asdict(one) for one in shared]}, sort_keys=True))
        return
    if shared:
        rows = [
            [
                render.safe(": ".join(one.left)),
                render.safe(": ".join(one.right)),
                render.sentence("; ".join(one.reasons)),
            ]
            for one in shared
        ]
        print(render.table(["TASK", "AND", "HAVE IN COMMON"], rows))
    print(f"{len(shared)} overlaps")
