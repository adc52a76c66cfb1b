"""What the machine has, and what of it is free: read anew whenever it is asked for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from coldframe.protocol.resources import Amounts, NodeResources


def resources(
    home: Path, used: Amounts, *, most: int, running: int, waiting: Mapping[str, int]
) -> NodeResources:
    """Look at this machine, and at the file system of a node's home.

    Args:
        home: of the node.
        used: what live sandboxes are limited to, together.
        most: how many sandboxes there may be.
        running: commands; `waiting`: the depth of each queue.
    """
    processors = float(len(os.sched_getaffinity(0)))
    lines = Path("/proc/meminfo").read_text().splitlines()
    memory = {name: text for name, _, text in (line.partition(":") for line in lines)}
    total, available = (int(memory[k].split()[0]) << 10 for k in ("MemTotal", "MemAvailable"))
    disk = os.statvfs(home)
    return NodeResources(
        capacity=Amounts(
            sandboxes=most,
            cpu=processors,
            memory_bytes=total,
            disk_bytes=disk.f_blocks * disk.f_frsize,
        ),
        in_use=used,
        free=Amounts(
            sandboxes=max(0, most - used.sandboxes),
            cpu=max(0.0, processors - os.getloadavg()[0]),
            memory_bytes=available,
            disk_bytes=disk.f_bavail * disk.f_frsize,
        ),
        running=running,
        waiting=waiting,
    )
