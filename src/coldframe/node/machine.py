"""What the machine has, and what of it is free: read anew whenever it is asked for."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Part:
    """One kind of thing that a machine has; memory and disk in bytes."""

    whole: float
    free: float


@dataclass(frozen=True)
class Machine:
    """What one machine has."""

    cpu: Part
    """Processors that this process may use; free: what the last minute's load leaves."""
    memory: Part
    disk: Part


def measure(home: Path) -> Machine:
    """Look at this machine, and at the file system of a node's home."""
    processors = float(len(os.sched_getaffinity(0)))
    lines = Path("/proc/meminfo").read_text().splitlines()
    memory = {name: text for name, _, text in (line.partition(":") for line in lines)}
    total, available = (int(memory[k].split()[0]) << 10 for k in ("MemTotal", "MemAvailable"))
    disk = os.statvfs(home)
    return Machine(
        Part(processors, max(0.0, processors - os.getloadavg()[0])),
        Part(total, available),
        Part(disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize),
    )
