"""What it costs a grader that its log directory is guarded, as ratios to the same one without.

python -m benchmarks.guard --json

Without, guarded, and guarded while something else lives in the sandbox take turns in one run. The
grader opens its log first: from then on executions are held back.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable

from benchmarks._measure import percentile, report, say
from coldframe import AsyncSandbox, AsyncSandboxClient
from coldframe.protocol.ids import new_operation_id

PROGRAMS, FILES = 200, 5000
GRADERS = {
    "nothing": ":",
    f"{PROGRAMS} programs": f"for i in $(seq {PROGRAMS}); do /bin/true; done",
    f"{FILES} files": "cat /many/* > /dev/null",
}
LINE = "exec 3> /graded/log; {work}; echo 1 > /graded/reward.txt"
PREPARE = f"mkdir /graded /many; for i in $(seq {FILES}); do echo $i > /many/$i; done"
SURVIVOR = "sleep 100000 > /dev/null 2>&1 &"

Way = Callable[[AsyncSandbox, str], Awaitable[float]]


async def unguarded(sandbox: AsyncSandbox, line: str) -> float:
    """Seconds of a grader."""
    begun = time.perf_counter()
    result = await sandbox.exec(line)
    taken = time.perf_counter() - begun
    assert result.ok, result
    return taken


async def guarded(sandbox: AsyncSandbox, line: str) -> float:
    """Seconds of a grader, of guarding its directory, and of learning what it wrote."""
    operation_id = new_operation_id()
    begun = time.perf_counter()
    await sandbox.guard("/graded", operation_id, ("reward.txt",))
    result = await sandbox.exec(line, operation_id=operation_id)
    told = await sandbox.guard_report()
    taken = time.perf_counter() - begun
    await sandbox.unguard()
    assert result.ok, result
    assert [file.vouched for file in told.files] == [True], told
    return taken


async def measure(client: AsyncSandboxClient, image: str, rounds: int) -> dict[str, object]:
    """Return the median of each grader without a guard, in ms, and the ratios to it with one."""
    async with (
        await client.create_sandbox(image) as alone,
        await client.create_sandbox(image) as beside,
    ):
        for sandbox in (alone, beside):
            assert (await sandbox.exec(PREPARE)).ok
        await beside.exec(SURVIVOR)
        ways: dict[str, tuple[AsyncSandbox, Way]] = {
            "without": (alone, unguarded),
            "guarded": (alone, guarded),
            "guarded, another lives": (beside, guarded),
        }
        found: dict[str, object] = {}
        for name, work in GRADERS.items():
            taken: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(rounds):
                for way, (sandbox, run) in ways.items():
                    taken[way].append(await run(sandbox, LINE.format(work=work)))
            medians = {way: percentile(each, 0.5) for way, each in taken.items()}
            without = medians.pop("without")
            found[f"{name}, ms without"] = round(without * 1e3, 2)
            for way, median in medians.items():
                found[f"{name}, {way}"] = round(median / without, 3)
            say(f"{name}: done")
    return found


async def main() -> None:
    """Measure with the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--image", default="debian:bookworm")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    async with AsyncSandboxClient(in_process=True) as client:
        report(await measure(client, arguments.image, arguments.rounds), as_json=arguments.json)


if __name__ == "__main__":
    asyncio.run(main())
