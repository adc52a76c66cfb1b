"""`coldframe gc`: reap what killed processes left, and layers that nothing needs any more.

Found from the kernel and the disk alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from coldframe.cli import flags, machine, render
from coldframe.host import orphans
from coldframe.host.gc import reap_dead_nodes
from coldframe.node.settings import NodeSettings
from coldframe.rollouts import scratch


def gc(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Say what would be reaped, and reap nothing.")
    ] = False,
    everything: Annotated[
        bool,
        typer.Option(
            "--all", help="End nodes, too, that no process serves and that wait for the next one."
        ),
    ] = False,
    as_json: flags.Json = False,
) -> int:
    """Reap what nodes and runs left behind that were killed, and layers that no image needs.

    A node is dead when nobody holds its lock. Live nodes, and those of another COLDFRAME_HOME,
    are never touched. One whose service was killed lives on with its sandboxes until the next
    service of this home; with --all it is ended. Exit code: 0 nothing is left, 1 something could
    not be reaped.
    """
    machine.require_root("gc")
    home = NodeSettings.from_environment().home
    if dry_run:
        reaped = machine.survey(home).reapable + _layers(home, dry_run=True)
        reaped += _scratch(dry_run=True)
        if everything:
            reaped += tuple(f"node {one}, which no process serves" for one in orphans.left(home))
        remaining: tuple[str, ...] = ()
    else:
        # Nodes first: the layers that a dead one held are free then.
        reaped = (orphans.end_left if everything else reap_dead_nodes)(home)
        reaped += _layers(home, dry_run=False) + _scratch(dry_run=False)
        remaining = machine.survey(home).reapable
    if as_json:
        key = "would_reap" if dry_run else "reaped"
        print(json.dumps({key: list(reaped), "remaining": list(remaining)}, indent=2))
    else:
        _print(reaped, remaining, dry_run=dry_run)
    return 1 if remaining else 0


def _layers(home: Path, *, dry_run: bool) -> tuple[str, ...]:
    from coldframe.images.store import ImageStore

    if not (home / "images").is_dir():
        return ()
    with ImageStore(home / "images") as store:
        layers = store.unneeded() if dry_run else store.gc().layers
    return tuple(f"layer {digest}" for digest in layers)


def _scratch(*, dry_run: bool) -> tuple[str, ...]:
    """Where a killed `task check`, or a killed Harbor, held tests and logs."""
    place = scratch.system_directory()
    found = tuple(scratch.left(place)) if dry_run else scratch.reap(place)
    return tuple(f"scratch {path}" for path in found)


def _print(reaped: tuple[str, ...], remaining: tuple[str, ...], *, dry_run: bool) -> None:
    word = "would reap" if dry_run else "reaped"
    for line in reaped:
        print(f"{word} {render.safe(line)}")
    for line in remaining:
        print(f"could not reap {render.safe(line)}")
    if not reaped and not remaining:
        print("nothing to reap")
