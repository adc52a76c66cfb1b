"""Processor time by process: unlike the time of a clock it holds on a busy machine, too."""

from __future__ import annotations

import os
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PARENT, _REAPED = 1, slice(13, 15)
"""In `/proc/PID/stat`, behind the name: the parent; user and system time of reaped children."""

CpuTime = dict[str, float]
"""Seconds by part: client, service, spawner, commands."""


def cpu_time(service: int) -> CpuTime:
    """What this process, a service, its spawner and its commands that have ended have used.

    The spawner is its workers, what they start commands through, and every pid 1.
    """
    parents = {pid: int(_stat(pid)[_PARENT]) for pid in _pids()}
    workers = [pid for pid, parent in parents.items() if parent == service]
    firsts = [pid for pid, parent in parents.items() if parent in workers]
    return {
        "client": _own(os.getpid()),
        "service": _own(service),
        "spawner": sum(map(_own, (*workers, *firsts))) + sum(map(_reaped, workers)),
        "commands": sum(map(_reaped, firsts)),
    }


def each_us(before: CpuTime, after: CpuTime, count: int) -> dict[str, float]:
    """Microseconds by part for each of so many commands, and all together."""
    parts = {part: round((after[part] - before[part]) / count * 1e6, 1) for part in after}
    return {**parts, "all": round(sum(parts.values()), 1)}


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _stat(pid: int) -> list[str]:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # it has ended
        return ["0"] * 40
    return text.rpartition(")")[2].split()


def _own(pid: int) -> float:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
    except OSError:  # it has ended
        return 0.0


def _reaped(pid: int) -> float:
    return sum(map(int, _stat(pid)[_REAPED])) * _TICK_S
