"""Take down what nobody owns any more: kill, wait, remove. Every step is idempotent."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterator, Sequence
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
    with _pidfds(pids) as fds:
        for fd in fds:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
    return pids


@contextlib.contextmanager
def _pidfds(pids: set[int]) -> Iterator[list[int]]:
    fds: list[int] = []
    try:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                fds.append(os.pidfd_open(pid))
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


def reap_cgroups(cgroups: Sequence[Path], wait_s: float = _WAIT_S) -> list[str]:
    """Kill what is in these cgroups (of all hierarchies), then remove them.

    Returns what was reaped, a line each. What does not go away within `wait_s` stays, and is
    found again next time.
    """
    reaped = []
    deadline = time.monotonic() + wait_s
    for cgroup in cgroups:
        if not cgroup.is_dir():
            continue
        killed = _kill_until_empty(cgroup, deadline)
        reaped += [f"process {pid} in cgroup {cgroup}" for pid in sorted(killed)]
        reaped += [f"cgroup {path}" for path in subtree(cgroup) if _remove(path, deadline)]
    return reaped


def _kill_until_empty(cgroup: Path, deadline: float) -> set[int]:
    killed: set[int] = set()
    while pids := kill_cgroup(cgroup):
        killed |= pids
        if time.monotonic() > deadline:
            break
        with _pidfds(pids) as fds:
            for fd in fds:
                select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
    return killed


def _remove(cgroup: Path, deadline: float) -> bool:
    """Remove one cgroup; right after its last process ended the kernel may still be busy."""
    while True:
        try:
            cgroup.rmdir()
        except FileNotFoundError:
            return False
        except OSError:
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        else:
            return True
