"""One sandbox after another: create, exec, idle, memory.

python -m benchmarks.sandbox --json [--compare docker,runc,bwrap]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import time

from benchmarks import compare
from benchmarks._measure import Baseline, baseline, memory_used_mib, report, say, summary
from coldframe import AsyncSandboxClient

TRUE = ["/bin/true"]
IDLE_S = 0.2


async def measure_create(
    client: AsyncSandboxClient, image: str, base: Baseline, n: int
) -> list[float]:
    """Seconds from asking for a sandbox to having the result of its first command."""
    taken = []
    for _ in range(n):
        await base.sample(2)
        start = time.perf_counter()
        sandbox = await client.create_sandbox(image)
        result = await sandbox.exec(TRUE)
        taken.append(time.perf_counter() - start)
        assert result.ok, result
        await sandbox.delete()
    return taken


async def measure_exec(
    client: AsyncSandboxClient, image: str, base: Baseline, n: int, *, idle_s: float = 0.0
) -> list[float]:
    """Seconds of one command in a live sandbox, each after `idle_s` of nothing."""
    taken = []
    async with await client.create_sandbox(image) as sandbox:
        for _ in range(20):
            await sandbox.exec(TRUE)
        for _ in range(n):
            await base.sample()
            if idle_s:
                await asyncio.sleep(idle_s)
            start = time.perf_counter()
            result = await sandbox.exec(TRUE)
            taken.append(time.perf_counter() - start)
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
    async with AsyncSandboxClient() as client:
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
    async with baseline() as base, AsyncSandboxClient() as client:
        await base.sample(20)
        base.seconds.clear()
        say("create → first exec")
        create = await measure_create(client, args.image, base, args.n)
        say("exec")
        execs = await measure_exec(client, args.image, base, args.n * 3)
        say("exec after idleness")
        idle = await measure_exec(client, args.image, base, max(20, args.n // 4), idle_s=IDLE_S)
        sleeps = await measure_concurrent_sleeps(client, args.image)
        ledger = await client.ledger()
        host, create_ms = summary(base.seconds), summary(create)
        exec_ms, idle_ms = summary(execs), summary(idle)
        result: dict[str, object] = {
            "host_ms": host,
            "create_first_exec_ms": create_ms,
            "exec_ms": exec_ms,
            "exec_after_200ms_idle_ms": idle_ms,
            "create_ratio": round(create_ms["p50"] / host["p50"], 3),
            "exec_ratio": round(exec_ms["p50"] / host["p50"], 3),
            "exec_after_idle_ratio": round(idle_ms["p50"] / host["p50"], 3),
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
