"""Many sandboxes alive at once, each running its commands, deletion included.

python -m benchmarks.burst --sandboxes 1000 --commands 4 --json
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import time

from benchmarks._measure import pid_namespaces, report, say
from coldframe import AsyncSandbox, AsyncSandboxClient
from coldframe.protocol.errors import ColdframeError

CURVE = (1, 4, 16, 64, 256, 1000)


async def talk(sandbox: AsyncSandbox, commands: int) -> int:
    """Run the commands one after another; count those that echoed their own nonce."""
    succeeded = 0
    for _ in range(commands):
        nonce = secrets.token_hex(8)
        try:
            result = await sandbox.exec(f"echo {nonce}")
        except ColdframeError as error:
            say(f"{sandbox.id}: {error}")
            continue
        succeeded += result.ok and result.stdout == nonce.encode() + b"\n"
    return succeeded


async def burst(client: AsyncSandboxClient, image: str, n: int, commands: int) -> dict[str, object]:
    """One burst: create all, meet at a barrier, talk to all, delete all."""
    start = time.perf_counter()
    made = await asyncio.gather(
        *(client.create_sandbox(image) for _ in range(n)), return_exceptions=True
    )
    created = time.perf_counter()
    sandboxes = [s for s in made if isinstance(s, AsyncSandbox)]
    for failure in (s for s in made if isinstance(s, BaseException)):
        say(f"create: {failure!r}")
    alive = len(pid_namespaces({sandbox.id for sandbox in sandboxes}))
    counted = time.perf_counter()
    succeeded = sum(await asyncio.gather(*(talk(s, commands) for s in sandboxes)))
    talked = time.perf_counter()
    await asyncio.gather(*(s.delete() for s in sandboxes))
    end = time.perf_counter()
    ledger = await client.ledger()
    return {
        "sandboxes": n,
        "wall_s": round(end - start - (counted - created), 3),
        "create_s": round(created - start, 3),
        "commands_s": round(talked - counted, 3),
        "delete_s": round(end - talked, 3),
        "succeeded": succeeded,
        "total": n * commands,
        "distinct_pid_namespaces": alive,
        "leaked": ledger.leaked,
    }


async def run(args: argparse.Namespace) -> dict[str, object]:
    """The curve up to the size asked for; its last point is the result."""
    points = []
    for n in sorted({*(c for c in CURVE if c < args.sandboxes), args.sandboxes}):
        async with AsyncSandboxClient(in_process=True) as client:
            async with await client.create_sandbox(args.image) as first:
                await first.exec(["/bin/true"])
            points.append(await burst(client, args.image, n, args.commands))
        say(f"{n} sandboxes: {points[-1]['wall_s']} s")
    return {**points[-1], "curve": points}


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--image", default="debian:bookworm")
    parser.add_argument("--sandboxes", type=int, default=1000)
    parser.add_argument("--commands", type=int, default=4)
    parser.add_argument("--json", action="store_true", help="one object on the last line")
    args = parser.parse_args()
    report(asyncio.run(run(args)), as_json=args.json)


if __name__ == "__main__":
    main()
