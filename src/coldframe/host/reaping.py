"""Take down what nobody owns any more: kill, wait, remove. Every step is idempotent."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

_WAIT_S = 10.0
_POLL_S = 0.01


def subtree(cgroup: Path) -> list[Path]:
    """Return a cgroup and all below it, children first; empty if it is not there."""
    found: list[Path] = []
    for top, _, _ in os.walk(cgroup, topdown=False):
        found.append(Path(top))
    return found


def pids_in(cgroup: Path) -> set[int]:
    """Return the processes of a cgroup and of all below it, those of other pid namespaces not."""
    pids: set[int] = set()
    for path in subtree(cgroup):
        with contextlib.suppress(OSError):  # removed meanwhile
            pids.update(int(word) for word in (path / "cgroup.procs").read_text().split())
    pids.discard(0)
    return pids


def kill_cgroup(cgroup: Path) -> set[int]:
    """Kill every process in a cgroup and below; return those that were there."""
    pids = pids_in(cgroup)
    killer = cgroup / "cgroup.kill"
    if pids and killer.exists():
        with contextlib.suppress(OSError):
            killer.write_text("1")
            return pids
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return pids


def reap_cgroups(cgroups: Sequence[Path], wait_s: float = _WAIT_S) -> list[str]:
    """Kill what is in these cgroups (of all hierarchies), then remove them.

    Returns what was reaped, a line each. What does not go away within `wait_s` stays, and is
    found again next time.
    """
    reaped = []
    deadline = time.monotonic() + wait_s
    for cgroup in cgroups:
        killed, removed = _reap(cgroup, deadline)
        reaped += [f"process {pid} in cgroup {cgroup}" for pid in sorted(killed)]
        reaped += [f"cgroup {path}" for path in removed]
    return reaped


def _reap(cgroup: Path, deadline: float) -> tuple[set[int], list[Path]]:
    """Again and again: a worker that ends as well may have made another one just before."""
    killed: set[int] = set()
    removed: list[Path] = []
    while True:
        killed |= kill_cgroup(cgroup)
        removed += filter(_remove, subtree(cgroup))
        if not cgroup.is_dir() or time.monotonic() > deadline:
            return killed, removed
        time.sleep(_POLL_S)


def _remove(cgroup: Path) -> bool:
    """Remove one cgroup, unless something in it still ends: the kernel takes its time."""
    try:
        cgroup.rmdir()
    except OSError:
        return False
    return True
