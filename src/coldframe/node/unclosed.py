"""Nodes that nobody closed: the end of the process reaps them, as the next node would."""

from __future__ import annotations

import atexit
import warnings
from pathlib import Path

from coldframe.host import forks, gc

_homes: dict[object, Path] = {}
"""Of the nodes that are open. Held: one that was collected could no longer let go of its lock."""


def opened(node: object, home: Path) -> None:
    """Reap what is in this home at the end of the process, unless the node is `closed`."""
    _homes[node] = home


def closed(node: object) -> None:
    """Forget an open node. Twice is fine."""
    _homes.pop(node, None)


def _bury() -> None:
    if not _homes:
        return
    warnings.warn(
        "a client was not closed: use `async with`, or await its close(); its sandboxes end now",
        ResourceWarning,
        stacklevel=1,
    )
    homes = set(_homes.values())
    forks.let_go()
    for home in homes:
        gc.reap_dead_nodes(home)


atexit.register(_bury)
