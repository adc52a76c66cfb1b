"""Which processes belong to the command that may write in a guarded directory."""

from __future__ import annotations

import threading
from pathlib import Path

_ADMITTED_S = 2.0


class GuardedCommand:
    """Told from the rest of its sandbox by cgroups. Used by one thread at a time, but for `admit`.

    Its processes may open files before whoever started it could say that they are its own.
    """

    def __init__(self, others: frozenset[str]) -> None:
        """`others` are the cgroups of what lived before; without any, who is not known is its."""
        self.others = others
        self.pid = 0
        """Its first process, on the host, once admitted."""
        self._cgroup: str | None = None
        self._admitted = threading.Event()
        self._outsiders: dict[int, bool] = {}

    def admit(self, host_pid: int) -> None:
        """Say which process began it."""
        self.pid, self._cgroup = host_pid, cgroup_of(host_pid)
        self._admitted.set()

    def wait_until_admitted(self) -> None:
        """Wait a moment for `admit`."""
        self._admitted.wait(_ADMITTED_S)

    def is_outsider(self, pid: int) -> bool:
        """Whether a process is the sandbox's, but not the command's."""
        known = False if pid == self.pid else self._outsiders.get(pid)
        if known is not None:
            return known
        cgroup = cgroup_of(pid)
        if cgroup is None:
            return bool(self.others)
        result = cgroup in self.others and cgroup != self._cgroup
        if result and not self._admitted.is_set():
            return True  # unless it is the command, in the cgroup of one that has just ended
        self._outsiders[pid] = result
        return result


def cgroup_of(pid: int) -> str | None:
    """Return a process' cgroup in the unified hierarchy; None: it has ended."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return None
    return next((line[3:] for line in lines if line.startswith("0::")), "")
