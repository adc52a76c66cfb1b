"""Find where this process may make cgroups, and make the node's directory in each hierarchy.

Two shapes behind one face: pure v2 (what most machines have) and hybrid (v1 controllers and a
v2 tree without any). Processes that are not ours are never moved.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from coldframe.protocol.errors import CapabilityError

NAME = "coldframe"
UNIFIED = "unified"
CONTROLLERS = ("memory", "cpu", "pids")
_IO = "io"
_SELF_LEAF = "coldframe.self"
_REMEDY = (
    "run it where cgroups may be made: as root, or under "
    "`systemd-run --scope -p Delegate=yes COMMAND`, or in a container with its own writable "
    "cgroup tree"
)


@dataclass(frozen=True)
class Hierarchy:
    """One mounted cgroup tree."""

    name: str
    """`unified`, or the v1 controller that it carries."""
    mount: Path
    own: Path
    """This process' cgroup in it."""


def hierarchies(
    mountinfo: str | None = None, membership: str | None = None
) -> dict[str, Hierarchy]:
    """Return the trees that matter by name: `unified`, and memory, cpu, pids on v1.

    The arguments stand in for /proc/self/mountinfo and /proc/self/cgroup in tests.
    """
    mountinfo = Path("/proc/self/mountinfo").read_text() if mountinfo is None else mountinfo
    membership = Path("/proc/self/cgroup").read_text() if membership is None else membership
    own_paths: dict[str, str] = {}
    for line in membership.splitlines():
        _, carried, path = line.split(":", 2)
        for name in carried.split(",") if carried else [UNIFIED]:
            own_paths[name] = path
    found: dict[str, Hierarchy] = {}
    for kind, root, mount, options in _cgroup_mounts(mountinfo):
        names = [UNIFIED] if kind == "cgroup2" else [c for c in CONTROLLERS if c in options]
        for name in names:
            if name in own_paths and name not in found:
                found[name] = Hierarchy(name, mount, _below(mount, root, own_paths[name]))
    return found


def mounts() -> list[Path]:
    """Where every cgroup hierarchy is mounted, those without a use here too."""
    mountinfo = Path("/proc/self/mountinfo").read_text()
    return [mount for _, _, mount, _ in _cgroup_mounts(mountinfo)]


def _cgroup_mounts(mountinfo: str) -> Iterator[tuple[str, str, Path, set[str]]]:
    """Yield (type, root, mount point, options) of each cgroup mount."""
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        if kind in {"cgroup", "cgroup2"}:
            fields = left.split(" ")
            yield kind, _unescape(fields[3]), Path(_unescape(fields[4])), set(options.split(","))


def _unescape(text: str) -> str:
    return text.encode().decode("unicode_escape") if "\\" in text else text


def _below(mount: Path, root: str, own: str) -> Path:
    """Where a cgroup path is visible below a mount that may show only a part of the tree."""
    if root != "/" and (own == root or own.startswith(root + "/")):
        own = own[len(root) :]
    return mount / own.lstrip("/")


@dataclass(frozen=True)
class NodeCgroups:
    """The node's directory in each hierarchy, as the spawner wants them."""

    paths: Mapping[str, Path]
    limits: frozenset[str]
    """Controllers whose limits are enforced."""

    def remove(self) -> None:
        """Remove the node's directories, which must be empty; those of others stay."""
        for path in self.paths.values():
            with contextlib.suppress(FileNotFoundError):
                path.rmdir()
            with contextlib.suppress(OSError):  # another node's, or gone
                path.parent.rmdir()


@dataclass(frozen=True)
class Strain:
    """What a sandbox has used, and was refused, since it was made."""

    cpu_s: float
    forks_refused: int
    """Processes and threads that were not made because it has as many as it may."""


def strain(bases: Mapping[str, Path], sandbox_id: str) -> Strain:
    """Read a sandbox's counters, given the node's directory in each hierarchy; gone: zeros."""
    usage = _counter(bases[UNIFIED] / sandbox_id / "cpu.stat", "usage_usec")
    pids = bases.get("pids", bases[UNIFIED]) / sandbox_id / "pids.events"
    return Strain(usage / 1e6, _counter(pids, "max"))


def oom_kills(bases: Mapping[str, Path], sandbox_id: str) -> int:
    """Return how many processes of a sandbox the OOM killer has ended. Given as for `strain`."""
    v1 = bases.get("memory")
    file = bases[UNIFIED] / sandbox_id / "memory.events"
    return _counter(file if v1 is None else v1 / sandbox_id / "memory.oom_control", "oom_kill")


def _counter(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[0] == name), 0)


def make_node_cgroups(node_id: str) -> NodeCgroups:
    """Make `<own>/coldframe/<node id>` in every hierarchy.

    Raises:
        CapabilityError: no tree can be written, or v2 controllers cannot be given to children.
    """
    trees = hierarchies()
    if UNIFIED not in trees:
        raise CapabilityError(
            "no cgroup v2 tree is mounted; `mount -t cgroup2 cgroup2 /sys/fs/cgroup/unified`"
        )
    paths: dict[str, Path] = {}
    v1 = [name for name in CONTROLLERS if name in trees]
    try:
        for name in v1:
            paths[name] = _make(trees[name].own / NAME / node_id)
        if len(v1) == len(CONTROLLERS):
            paths[UNIFIED] = _make(trees[UNIFIED].own / NAME / node_id)
            return NodeCgroups(paths, frozenset(v1))
        base, controllers = _delegated(trees[UNIFIED])
        wanted = [name for name in CONTROLLERS if name not in v1 and name in controllers]
        paths[UNIFIED] = _make(base / NAME / node_id)
        for cgroup in (base, base / NAME, paths[UNIFIED]):
            _enable(cgroup, wanted)
            # Limits nothing, but counts what each command reads and writes, where it is there.
            _can_enable(cgroup, [_IO])
    except OSError as error:
        raise CapabilityError(f"cgroups cannot be made: {error}; {_REMEDY}") from error
    return NodeCgroups(paths, frozenset([*v1, *wanted]))


def _make(path: Path) -> Path:
    path.mkdir(mode=0o755, parents=True, exist_ok=True)
    return path


def _delegated(tree: Hierarchy) -> tuple[Path, set[str]]:
    """Return a cgroup of the v2 tree whose children can have controllers, and those.

    Our own first; else, when nobody else lives in it, our own after we have stepped aside into a
    leaf; else, as root, the nearest one above that holds no processes itself.
    """
    # Where we, or who started us, stepped aside to is a leaf: what was delegated is around it.
    own = tree.own.parent if tree.own.name == _SELF_LEAF else tree.own
    available = set((own / "cgroup.controllers").read_text().split())
    wanted = [name for name in CONTROLLERS if name in available]
    if _can_enable(own, wanted) or (_step_aside(own) and _can_enable(own, wanted)):
        return own, available
    for above in own.parents:
        if not above.is_relative_to(tree.mount):
            break
        available = set((above / "cgroup.controllers").read_text().split())
        wanted = [name for name in CONTROLLERS if name in available]
        if len(wanted) == len(CONTROLLERS) and _can_enable(above, wanted):
            return above, available
    raise CapabilityError(
        f"the cgroup {own} holds other processes, so its children get no controllers; {_REMEDY}"
    )


def _can_enable(cgroup: Path, controllers: list[str]) -> bool:
    try:
        _enable(cgroup, controllers)
    except OSError as error:
        if error.errno in {errno.EBUSY, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT}:
            return False
        raise
    return True


def _enable(cgroup: Path, controllers: list[str]) -> None:
    control = cgroup / "cgroup.subtree_control"
    missing = set(controllers) - set(control.read_text().split())
    if missing:
        control.write_text(" ".join(f"+{name}" for name in sorted(missing)))


def _step_aside(own: Path) -> bool:
    """Move this process into a leaf of its cgroup if it is alone in it."""
    if (own / "cgroup.procs").read_text().split() != [str(os.getpid())]:
        return False
    leaf = own / _SELF_LEAF
    leaf.mkdir(exist_ok=True)
    (leaf / "cgroup.procs").write_text(str(os.getpid()))
    return True
