"""One sandbox after another: create, exec, idle, memory.

python -m benchmarks.sandbox --json [--compare docker,runc,bwrap]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import time

from benchmarks import compare
from benchmarks._measure import (
    Baseline,
    baseline,
    memory_used_mib,
    percentile,
    report,
    say,
    summary,
)
from coldframe import AsyncSandbox, AsyncSandboxClient

TRUE = ["/bin/true"]
IDLE_S = 0.2
QUIET_S = 0.005


def ratio(taken: list[float], host: list[float]) -> float:
    """Of the medians; `host` is the baseline, taken between the calls that are measured."""
    return round(percentile(taken, 0.5) / percentile(host, 0.5), 3)


async def measure_create(
    client: AsyncSandboxClient, image: str, base: Baseline, n: int
) -> list[float]:
    """Seconds from asking for a sandbox to having the result of its first command."""
    taken = []
    for _ in range(n):
        # The baseline shall not run beside what is still done about the sandbox before.
        await asyncio.sleep(QUIET_S)
        await base.sample(2)
        start = time.perf_counter()
        sandbox = await client.create_sandbox(image)
        result = await sandbox.exec(TRUE)
        taken.append(time.perf_counter() - start)
        assert result.ok, result
        await sandbox.delete()
    return taken


async def measure_exec(
    client: AsyncSandboxClient, image: str, base: Baseline, n: int
) -> list[float]:
    """Seconds of one command in a live sandbox."""
    taken = []
    async with await client.create_sandbox(image) as sandbox:
        for _ in range(20):
            await sandbox.exec(TRUE)
        for _ in range(n):
            await base.sample()
            taken.append(await _timed(sandbox))
    return taken


async def measure_idle(
    client: AsyncSandboxClient, image: str, base: Baseline, n: int
) -> tuple[list[float], list[float]]:
    """Seconds of one command after `IDLE_S` of nothing, and of the baseline after as long.

    The processor is slow after idleness for whoever comes: `base` is sampled right after a
    command, when it is not.
    """
    taken, host = [], []
    async with await client.create_sandbox(image) as sandbox:
        for _ in range(n):
            await asyncio.sleep(IDLE_S)
            taken.append(await _timed(sandbox))
            await sandbox.exec(TRUE)
            await base.sample()
            await asyncio.sleep(IDLE_S)
            host += await base.take()
    return taken, host


async def _timed(sandbox: AsyncSandbox) -> float:
    start = time.perf_counter()
    result = await sandbox.exec(TRUE)
    taken = time.perf_counter() - start
    assert result.ok, result
    return taken


async def measure_concurrent_sleeps(client: AsyncSandboxClient, image: str, n: int = 8) -> float:
    """Seconds until `n` commands of one second each, in one sandbox at once, have ended."""
    async with await client.create_sandbox(image) as sandbox:
        start = time.perf_counter()
        results = await asyncio.gather(*(sandbox.exec(["sleep", "1"]) for _ in range(n)))
        taken = time.perf_counter() - start
        assert all(r.ok for r in results), results
    return taken


async def measure_idle_memory(image: str, n: int) -> dict[str, float]:
    """MiB of the whole machine per idle sandbox: kernel, node and spawner included."""
    gc.collect()
    before = memory_used_mib()
    async with AsyncSandboxClient(in_process=True) as client:
        sandboxes = []
        for first in range(0, n, 50):
            batch = await asyncio.gather(
                *(client.create_sandbox(image) for _ in range(min(50, n - first)))
            )
            results = await asyncio.gather(*(s.exec(TRUE) for s in batch))
            assert all(r.ok for r in results)
            sandboxes += batch
            if first % 500 == 0:
                say(f"idle memory: {len(sandboxes)}/{n} sandboxes alive")
        gc.collect()
        await asyncio.sleep(2)
        used = memory_used_mib() - before
        ledger = await client.ledger()
        assert (ledger.live, ledger.leaked) == (n, 0), ledger
        say("idle memory: deleting")
    return {"idle_sandbox_mib": round(used / n, 4), "idle_sandboxes": n}


async def run(args: argparse.Namespace) -> dict[str, object]:
    """Take every figure of this module; see SPECIFICATION.md for what they must reach."""
    memory = await measure_idle_memory(args.image, args.idle_sandboxes)
    async with baseline() as base, AsyncSandboxClient(in_process=True) as client:
        await base.sample(20)
        say("create → first exec")
        base.seconds.clear()
        create = await measure_create(client, args.image, base, args.n)
        create_host = base.seconds[:]
        say("exec")
        base.seconds.clear()
        execs = await measure_exec(client, args.image, base, args.n * 3)
        exec_host = base.seconds[:]
        say("exec after idleness")
        base.seconds.clear()
        idle, idle_host = await measure_idle(client, args.image, base, max(20, args.n // 4))
        awake_host = base.seconds[:]
        sleeps = await measure_concurrent_sleeps(client, args.image)
        ledger = await client.ledger()
        result: dict[str, object] = {
            "host_ms": summary(create_host + exec_host + awake_host),
            "create_first_exec_ms": summary(create),
            "exec_ms": summary(execs),
            "exec_after_200ms_idle_ms": summary(idle),
            "host_after_200ms_idle_ms": summary(idle_host),
            "create_ratio": ratio(create, create_host),
            "exec_ratio": ratio(execs, exec_host),
            "exec_after_idle_ratio": ratio(idle, awake_host),
            "exec_after_idle_ratio_to_idle_host": ratio(idle, idle_host),
            "concurrent_sleep_s": round(sleeps, 3),
            **memory,
            "leaked": ledger.leaked,
            "storage": (await client.capabilities()).storage,
        }
        if args.compare:
            result["compare"] = await compare.run(args.compare.split(","), args.image, base)
    return result


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--image", default="debian:bookworm")
    parser.add_argument(
        "--n", type=int, default=200, help="sandboxes created; execs are 3 times as many"
    )
    parser.add_argument("--idle-sandboxes", type=int, default=2000)
    parser.add_argument("--compare", default="", help="comma-separated: docker,runc,bwrap")
    parser.add_argument("--json", action="store_true", help="one object on the last line")
    args = parser.parse_args()
    report(asyncio.run(run(args)), as_json=args.json)


if __name__ == "__main__":
    main()
