"""Which processes belong to the command that may write in a guarded directory."""

from __future__ import annotations

from pathlib import Path


class GuardedCommand:
    """Told from the rest of its sandbox by cgroups. Used by one thread at a time, but for `admit`.

    Its processes may open files before whoever started it could say that they are its own.
    """

    def __init__(self, others: frozenset[str]) -> None:
        """`others` are the cgroups of what lived before; without any, who is not known is its."""
        self.others = others
        self.pid = 0
        """Its first process, on the host; 0: it is not admitted yet."""
        self._cgroup: str | None = None
        self._outsiders: dict[int, bool] = {}

    def admit(self, host_pid: int) -> None:
        """Say which process began it."""
        self._cgroup = cgroup_of(host_pid)
        self.pid = host_pid

    def is_outsider(self, pid: int) -> bool:
        """Whether a process is the sandbox's, but not the command's."""
        known = False if pid == self.pid else self._outsiders.get(pid)
        if known is not None:
            return known
        admitted, cgroup = self.pid != 0, cgroup_of(pid)
        if cgroup is None:
            return bool(self.others)
        result = cgroup in self.others and cgroup != self._cgroup
        if result and not admitted:
            return True  # unless it is the command, in the cgroup of one that has just ended
        self._outsiders[pid] = result
        return result


def cgroup_of(pid: int) -> str | None:
    """Return a process' cgroup in the unified hierarchy; None: it has ended."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    return next((line[3:] for line in lines if line.startswith("0::")), "")
