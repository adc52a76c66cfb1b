"""List what exists of a node in the kernel and on disk, from their own state and not from ours.

Cgroups in every hierarchy, processes in user namespaces of ours, mounts, namespaces that
descriptors of ours hold, loop devices, directories. Whatever belongs to no live sandbox is a stray.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from coldframe.host import cgroups
from coldframe.host.idranges import is_sandbox_base
from coldframe.host.spares import SPARE

_DYING = " (deleted)"
"""The kernel's mark on a cgroup that is removed: what is still in it has ended already."""
_BLANK = "blank\n"
_NAMESPACE = re.compile(r"(?:cgroup|ipc|mnt|net|pid|user|uts):\[(\d+)\]")


@dataclass(frozen=True)
class Scope:
    """What belongs to one node, and what of it should be there."""

    node_id: str
    state: Path
    """The node's directory."""
    cgroup_bases: tuple[Path, ...] = ()
    """`coldframe/<node id>` in each hierarchy; empty: looked for below our own cgroups."""
    processes: tuple[int, ...] = ()
    """The node's own processes and its spawner's, whose descriptors are looked at."""
    live: frozenset[str] = frozenset()
    """Ids of the sandboxes that should be there."""
    live_ids: frozenset[int] = frozenset()
    """First host ids of their ranges."""
    own_ids: frozenset[int] = frozenset()
    """First host ids of every range that is this node's to give out."""
    live_namespaces: frozenset[int] = frozenset()
    """Inode numbers of their namespaces."""
    uppers: tuple[str, ...] = ()
    """What the storage holds, by sandbox id."""
    alive: bool = False
    """Whether spares in its directory of uppers are in use, or will be: the storage knows which."""
    known_names: frozenset[str] = frozenset(
        {"lock", "daemon", "counts", "uppers", "spool", "workers"}
        | {"expired", "expired.new", "effects", "effects.new"}
    )
    """What may lie in the node's directory."""

    @property
    def looked_at(self) -> tuple[int | str, ...]:
        """Processes whose mounts and descriptors are looked at."""
        return ("self", *self.processes)


def strays(scope: Scope) -> tuple[str, ...]:
    """Describe everything of the node's that belongs to no live sandbox, a line each."""
    return tuple(
        sorted(
            {
                *_stray_cgroups(scope),
                *_stray_processes(scope),
                *_stray_mounts(scope),
                *_stray_namespaces(scope),
                *_stray_directories(scope),
            }
        )
    )


# --- cgroups, processes ---------------------------------------------------------------


def node_cgroups(node_id: str) -> list[Path]:
    """Find `coldframe/<node id>` wherever it is in any hierarchy."""
    return [path for path in all_node_cgroups() if path.name == node_id]


def all_node_cgroups() -> list[Path]:
    """Find every node's cgroup in every hierarchy that is mounted."""
    found: list[Path] = []
    for mount in cgroups.mounts():
        for top, names, _ in os.walk(mount):
            if Path(top).name == cgroups.NAME:
                found += [Path(top, name) for name in names]
                names.clear()  # a node's sandboxes may be thousands
    return found


def holds_blank(cgroup: Path) -> bool:
    """Whether a sandbox's cgroup, in any hierarchy, holds a half-made one (host/blanks.py).

    Its pid 1 says so by its name, and once it is made by another: nothing inside can change that.
    """
    for place in (cgroup, cgroup / "init"):
        with contextlib.suppress(OSError):  # it went meanwhile
            pids = (place / "cgroup.procs").read_text().split()
            if pids:
                return all(Path(f"/proc/{pid}/comm").read_text() == _BLANK for pid in pids)
    return False


def _stray_cgroups(scope: Scope) -> Iterator[str]:
    for base in scope.cgroup_bases or tuple(node_cgroups(scope.node_id)):
        with contextlib.suppress(FileNotFoundError):
            for path in base.iterdir():
                if path.is_dir() and path.name not in scope.live:
                    yield f"cgroup {path}"


def sandbox_processes() -> Iterator[tuple[int, int]]:
    """Yield (pid, first host id) of every process in a user namespace of Coldframe's."""
    for name in os.listdir("/proc"):  # noqa: PTH208 - thousands of names, twice a Path's price
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/uid_map", "rb") as file:  # noqa: PTH123
                words = file.read(4096).split()
        except OSError:  # ended meanwhile
            continue
        if len(words) == 3 and words[0] == b"0" and is_sandbox_base(int(words[1])):
            yield int(name), int(words[1])


def sandbox_of(pid: int) -> tuple[str, str] | None:
    """Return (node id, sandbox id) that a process' cgroups name."""
    with contextlib.suppress(OSError):  # it ended meanwhile
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            parts = line.split("/")
            if cgroups.NAME in parts:
                at = parts.index(cgroups.NAME)
                if len(parts) > at + 2:
                    return parts[at + 1], parts[at + 2]
    return None


def _only_init_can_reap(pid: int) -> bool:
    """Whether it is dead and its parent was too: it holds nothing, and the machine's init,
    which may take seconds to collect it, is all that can take its number back."""
    with contextlib.suppress(OSError):
        state, parent = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[:2]
        return state == b"Z" and parent == b"1"
    return True


def _stray_processes(scope: Scope) -> Iterator[str]:
    for pid, first_id in sandbox_processes():
        if first_id in scope.live_ids or _only_init_can_reap(pid):
            continue
        named = sandbox_of(pid)
        if named is not None and named[1].endswith(_DYING):
            continue
        if named is not None and named[0] == scope.node_id and named[1] not in scope.live:
            yield f"process {pid} of sandbox {named[1]}"
        elif named is None and first_id in scope.own_ids:
            yield f"process {pid} with ids from {first_id:#x}, outside every cgroup of ours"


# --- mounts, namespaces ---------------------------------------------------------------


def mounts_of(scope: Scope, pid: int | str = "self") -> Iterator[tuple[str, str]]:
    """Yield (mount point, description) of mounts that mention the node's paths or sandboxes."""
    state = str(scope.state)
    sandbox = re.compile(rf"sb-{re.escape(scope.node_id)}-[0-9a-z]{{10}}")
    try:
        lines = Path(f"/proc/{pid}/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        left, _, right = line.partition(" - ")
        point = left.split(" ")[4]
        ids = set(sandbox.findall(line))
        mentions = point == state or point.startswith(state + "/") or f"{state}/" in right
        if (ids - scope.live) or (mentions and not ids):
            yield point, f"mount {point} ({right.split(' ', 1)[0]}) seen by process {pid}"


def _stray_mounts(scope: Scope) -> Iterator[str]:
    for pid in scope.looked_at:
        for _, description in mounts_of(scope, pid):
            yield description


def _stray_namespaces(scope: Scope) -> Iterator[str]:
    own = _own_namespaces(scope.looked_at)
    for pid in scope.looked_at:
        for fd, target in _descriptors(pid):
            match = _NAMESPACE.fullmatch(target)
            if match is None:
                continue
            number = int(match.group(1))
            if number not in scope.live_namespaces and number not in own:
                yield f"namespace {target} held by descriptor {fd} of process {pid}"


def _own_namespaces(pids: Iterable[int | str]) -> set[int]:
    """Namespaces that our own processes live in."""
    found: set[int] = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it ended meanwhile
            for link in Path(f"/proc/{pid}/ns").iterdir():
                match = _NAMESPACE.fullmatch(str(link.readlink()))
                if match is not None:
                    found.add(int(match.group(1)))
    return found


def _descriptors(pid: int | str) -> Iterator[tuple[str, str]]:
    directory = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):  # it ended meanwhile
        for name in os.listdir(directory):  # noqa: PTH208 - as above
            with contextlib.suppress(OSError):
                yield name, os.readlink(f"{directory}/{name}")  # noqa: PTH115


# --- directories ----------------------------------------------------------------------


def _stray_directories(scope: Scope) -> Iterator[str]:
    for name in dict.fromkeys((*scope.uppers, *_names_in(scope.state / "uppers"))):
        if name not in scope.live and not (scope.alive and name.startswith(SPARE)):
            yield f"upper {name}"
    with contextlib.suppress(FileNotFoundError):
        for path in scope.state.iterdir():
            if path.name not in scope.known_names:
                yield f"directory {path}"
    with contextlib.suppress(FileNotFoundError):
        for path in (scope.state / "spool").iterdir():
            yield f"spool {path}"


def _names_in(directory: Path) -> list[str]:
    try:
        return [path.name for path in directory.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
