"""What the benchmarks share: percentiles, the C baseline, the machine's memory."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import tempfile
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from coldframe.host import census
from coldframe.host.cgroups import make_node_cgroups
from coldframe.host.spawner import Spawner, SpawnerConfig
from coldframe.protocol.ids import new_node_id

BASELINE_PROGRAM = "/bin/true"


def percentile(values: Sequence[float], fraction: float) -> float:
    """Nearest-rank percentile; `fraction` in (0, 1]."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """p50, p95 and p99 in milliseconds, and how many there were."""
    return {
        **{f"p{p}": round(percentile(seconds, p / 100) * 1e3, 4) for p in (50, 95, 99)},
        "n": len(seconds),
    }


class Baseline:
    """vfork + execve + wait of `/bin/true` by the C program itself, on the bare host."""

    def __init__(self, spawner: Spawner) -> None:
        self._spawner = spawner
        self.seconds: list[float] = []

    async def take(self, n: int = 1) -> list[float]:
        """Return `n` measurements in seconds."""
        return [ns / 1e9 for ns in await self._spawner.measure(n, BASELINE_PROGRAM)]

    async def sample(self, n: int = 1) -> None:
        """Take `n` more measurements; call it between the measured calls."""
        self.seconds += await self.take(n)

    @property
    def p50(self) -> float:
        """Median in seconds."""
        return percentile(self.seconds, 0.5)


@asynccontextmanager
async def baseline() -> AsyncIterator[Baseline]:
    """A worker of the spawner that only measures; it holds no sandbox."""
    cgroups = make_node_cgroups(new_node_id())
    try:
        with tempfile.TemporaryDirectory(prefix="coldframe-bench-") as scratch:
            config = SpawnerConfig(Path(scratch), Path(scratch), cgroups.paths, workers=1)
            spawner = Spawner(config, gone=lambda _: None, lost=lambda _: None)
            await spawner.start()
            try:
                yield Baseline(spawner)
            finally:
                await spawner.close()
    finally:
        cgroups.remove()


def memory_used_mib() -> float:
    """The whole machine's memory that is not available to a new program, in MiB."""
    fields = dict(
        line.split(":", 1) for line in Path("/proc/meminfo").read_text("ascii").splitlines()
    )
    total, available = (int(fields[k].split()[0]) for k in ("MemTotal", "MemAvailable"))
    return (total - available) / 1024


def pid_namespaces(sandbox_ids: Collection[str]) -> set[str]:
    """The pid namespaces that processes of these sandboxes live in, from the kernel alone."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            of = census.sandbox_of(int(entry.name))
            if of is not None and of[1] in sandbox_ids:
                with contextlib.suppress(OSError):  # it ended meanwhile
                    found.add(str((entry / "ns/pid").readlink()))
    return found


def say(text: str) -> None:
    """Progress, on stderr, so that stdout stays machine-readable."""
    print(text, file=sys.stderr, flush=True)


def report(result: dict[str, object], *, as_json: bool) -> None:
    """Print the result: one object on the last line, or a line per figure."""
    if as_json:
        print(json.dumps(result), flush=True)
        return
    for key, value in result.items():
        print(f"{key:32} {value}")
