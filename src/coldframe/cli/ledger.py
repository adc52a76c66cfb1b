"""`coldframe ledger`: account for every sandbox of this machine, against the kernel."""

from __future__ import annotations

import json

from coldframe.cli import flags, machine, render
from coldframe.node.settings import NodeSettings
from coldframe.protocol.models import Ledger


def ledger(
    as_json: flags.Json = False,
) -> int:
    """Account for every sandbox of this machine's nodes, against the kernel.

    A node lives while its owner holds its lock; the one that serves is asked. What belongs to no
    sandbox of a node that lives is a leak, and all that a dead one left behind: cgroups, processes,
    mounts, directories. `coldframe gc` reaps the latter. Exit code: 0 nothing is leaked, 1
    something is.
    """
    machine.require_root("ledger")
    found = machine.survey(NodeSettings.from_environment().home)
    total = found.ledger()
    if as_json:
        print(json.dumps(_as_json(found, total), indent=2))
    else:
        _print(found, total)
    return 0 if total.balanced else 1


def _as_json(found: machine.Survey, total: Ledger) -> dict[str, object]:
    return {
        **total.model_dump(mode="json"),
        "balanced": total.balanced,
        "nodes": [
            {
                "id": node.id,
                "alive": node.alive,
                "waits": node.waits,
                "sandboxes": list(node.sandboxes),
            }
            for node in found.nodes
        ],
        "elsewhere": list(found.elsewhere),
    }


def _owner(node: machine.NodeView) -> str:
    if node.waits:
        return "none; waits for a service"
    return "alive" if node.alive else "dead"


def _print(found: machine.Survey, total: Ledger) -> None:
    rows = [
        (node.id, _owner(node), str(len(node.sandboxes)), str(len(node.leaks)))
        for node in found.nodes
    ]
    if rows:
        print(render.table(("NODE", "OWNER", "SANDBOXES", "LEAKS"), rows))
    print(
        f"created {total.created} = deleted {total.deleted} + expired {total.expired} + "
        f"failed {total.failed} + lost {total.lost} + live {total.live}; leaked {total.leaked}"
    )
    if any(node.waits for node in found.nodes):
        print("what waits goes on with the next coldframe serve; coldframe gc --all ends it")
    if found.elsewhere:
        print(f"{len(found.elsewhere)} sandboxes of another COLDFRAME_HOME are not counted")
    for leak in total.leaks:
        print(f"  leak: {render.safe(leak)}")
    if found.reapable:
        print("reap what dead nodes left with: coldframe gc")
    if any(node.alive and node.leaks for node in found.nodes):
        print("what a live node leaked: end the node, then coldframe gc reaps it")
