"""Look at every node of this machine from outside: by its lock, the kernel and the disk.

None is started, so it can be looked at what a killed process left. What a node that lives has
leaked it alone can tell in full: the one that serves the home is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from coldframe.host import census, gc, orphans, tally
from coldframe.protocol import places
from coldframe.protocol.errors import CapabilityError, ColdframeError
from coldframe.protocol.models import Ledger

_ANSWER_S = 30.0
"""How long a node may take to look at everything."""
_SANDBOX = re.compile(r"sb-[0-9a-z]{6}-[0-9a-z]{10}")


@dataclass(frozen=True)
class NodeView:
    """One node, as the kernel and the disk have it."""

    id: str
    alive: bool
    """Whether its owner holds its lock."""
    waits: bool
    """Whether it lives and no process serves it: its spawners wait for the next one."""
    sandboxes: tuple[str, ...]
    """Ids that have a cgroup; those that are only half made ahead are nobody's yet."""
    counts: Mapping[str, int]
    """How its sandboxes began and ended, as it counted them."""
    leaks: tuple[str, ...] = ()
    """A line each. Of a dead node: everything that is left of it. Of one that lives: what belongs
    to no sandbox of its; where it does not answer, what cannot belong to one."""


@dataclass(frozen=True)
class Survey:
    """All nodes of a home, and sandboxes of nodes that belong to another home."""

    nodes: tuple[NodeView, ...]
    ended: Mapping[str, int]
    """Counts of all nodes that have ended."""
    elsewhere: tuple[str, ...]
    """Ids of sandboxes whose node has no directory in this home: not ours to judge."""

    @property
    def reapable(self) -> tuple[str, ...]:
        """What dead nodes left behind."""
        return tuple(leak for node in self.nodes if not node.alive for leak in node.leaks)

    def ledger(self) -> Ledger:
        """Count every sandbox there ever was; what a dead node had alive is lost."""
        counts = dict(self.ended)
        for node in self.nodes:
            of_node = node.counts if node.alive else tally.settled(node.counts)
            counts = {name: count + of_node[name] for name, count in counts.items()}
        leaks = tuple(leak for node in self.nodes for leak in node.leaks)
        live = sum(tally.live_of(node.counts) for node in self.nodes if node.alive)
        return Ledger(**counts, live=live, leaked=len(leaks), leaks=leaks)


def require_root(what: str) -> None:
    """Refuse to look with half of the eyes: other users' processes cannot be seen.

    Raises:
        CapabilityError: this is not root.
    """
    if os.geteuid() != 0:
        raise CapabilityError(f"`coldframe {what}` must see every process; run it as root")


def survey(home: Path) -> Survey:
    """Look at every node of a home. Changes nothing, and disturbs no node."""
    by_node: dict[str, set[str]] = {}
    for cgroup in census.all_node_cgroups():
        names = {
            entry.name
            for entry in _entries(cgroup)
            if _SANDBOX.fullmatch(entry.name) and not census.holds_blank(entry)
        }
        by_node.setdefault(cgroup.name, set()).update(names)
    directories = {entry.name: entry for entry in _entries(home / "nodes")}
    nodes = tuple(
        _view(home, node_id, directory, tuple(sorted(by_node.get(node_id, ()))))
        for node_id, directory in sorted(directories.items())
    )
    elsewhere = sorted(
        name for node_id, names in by_node.items() if node_id not in directories for name in names
    )
    return Survey(nodes, tally.read_totals(home), tuple(elsewhere))


def _view(home: Path, node_id: str, directory: Path, sandboxes: tuple[str, ...]) -> NodeView:
    alive = is_held(directory)
    leaks = tuple((_leaked_by if alive else _left_of)(home, node_id, directory))
    counts = tally.read_counts(directory / tally.FILE)
    waits = node_id in orphans.left(home)
    return NodeView(node_id, alive, waits, sandboxes, counts, leaks)


def is_held(directory: Path) -> bool:
    """Whether somebody holds the lock of a node's directory.

    A node that may just be taking it counts as one that holds it: to try would be in its way.
    """
    try:
        return gc.being_made(directory) or gc.is_held(directory / gc.LOCK)
    except OSError:
        return False


def _leaked_by(home: Path, node_id: str, directory: Path) -> Iterator[str]:
    if _is_served(directory):
        with contextlib.suppress(ColdframeError):  # it does not answer
            return iter(asyncio.run(_told(home)))
    # Which of its sandboxes should be there only it knows.
    own = re.compile(rf"sb-{re.escape(node_id)}-[0-9a-z]{{10}}")
    found = census.strays(census.Scope(node_id, directory, alive=True))
    return (line for line in found if not own.search(line))


def _is_served(directory: Path) -> bool:
    """Whether a node is the one that serves its home: only that one has this lock."""
    try:
        return gc.is_held(directory / gc.DAEMON)
    except OSError:
        return False


async def _told(home: Path) -> list[str]:
    """Ask a node of any version: no protocol is claimed, and only JSON is read."""
    from coldframe.client._calls import call
    from coldframe.client._connection import Address
    from coldframe.client._http import Http

    http = Http(Address("localhost", unix=places.socket_of(home)), [])
    with contextlib.closing(http):
        told = await call(http, "GET", "/v1/ledger", replay=False, within_s=_ANSWER_S)
        leaks: list[str] = json.loads(told.body)["leaks"]
        return leaks


def _left_of(home: Path, node_id: str, directory: Path) -> Iterator[str]:
    yield from census.strays(census.Scope(node_id, directory))
    yield from (f"cgroup {path}" for path in census.node_cgroups(node_id))
    pool = home / "pools" / f"{node_id}.img"
    if pool.exists():
        yield f"pool {pool}"
    yield f"directory {directory}"


def _entries(directory: Path) -> list[Path]:
    try:
        return [entry for entry in directory.iterdir() if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
