"""The node as a service, client and server on one machine.

python -m benchmarks.service --json [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from benchmarks._cpu import cpu_time, each_us
from benchmarks._measure import Baseline, baseline, percentile, report, say, summary
from benchmarks._serving import Service, serving
from coldframe import AsyncSandbox, AsyncSandboxClient
from coldframe.node.settings import NodeSettings

TRUE = ["/bin/true"]
MIB = 1 << 20
_PIECE = bytes(MIB)
_AROUND, _WARM = 200, 5
_IN_FLIGHT = 16
_SERIES = 1000
_KEPT_RESULTS = NodeSettings().result_count
_PAUSE_S = 0.005
"""Between two of the baseline: seldom enough to cost the measured commands next to nothing."""


async def measure_execs(
    sandboxes: dict[str, AsyncSandbox], base: Baseline, n: int
) -> dict[str, list[float]]:
    """Seconds of one command by each way, in turns, so that all see the same machine."""
    taken: dict[str, list[float]] = {way: [] for way in sandboxes}
    for sandbox in sandboxes.values():
        for _ in range(20):
            await sandbox.exec(TRUE)
    for _ in range(n):
        for way, sandbox in sandboxes.items():
            await base.sample()
            start = time.perf_counter()
            result = await sandbox.exec(TRUE)
            taken[way].append(time.perf_counter() - start)
            assert result.ok, result
    return taken


@dataclass
class InFlight:
    """Seconds of commands with many in flight, and of the baseline."""

    taken: list[float]
    interleaved: float
    """Median of the baseline, taken between them while they were in flight."""
    idle: float
    """Median of the baseline, taken right before and right after."""
    cpu_us: dict[str, float]
    """Processor time of each by part; none where there is no service."""

    def figures(self, way: str) -> dict[str, object]:
        """Under the names that the last line has."""
        p99, p50 = percentile(self.taken, 0.99), percentile(self.taken, 0.5)
        return {
            f"{way}exec_16_ms": summary(self.taken),
            f"{way}exec_p99_ratio_16": round(p99 / self.interleaved, 3),
            f"{way}exec_p99_ratio_16_idle": round(p99 / self.idle, 3),
            f"{way}exec_p50_ratio_16": round(p50 / self.interleaved, 3),
            f"{way}exec_p99_to_p50_16": round(p99 / p50, 3),
        }


async def measure_in_flight(
    sandbox: AsyncSandbox, base: Baseline, n: int, service: Service | None = None
) -> InFlight:
    """Take commands with 16 in flight, the baseline among them and around them."""
    at_once = _IN_FLIGHT
    taken: list[float] = []
    interleaved: list[float] = []
    idle = await base.take(_AROUND)

    async def worker(count: int) -> None:
        for _ in range(count):
            start = time.perf_counter()
            await sandbox.exec(TRUE)
            taken.append(time.perf_counter() - start)

    async def baseline_between() -> None:
        while True:
            interleaved.extend(await base.take())
            await asyncio.sleep(_PAUSE_S)

    await asyncio.gather(*(worker(_WARM) for _ in range(at_once)))
    taken.clear()
    before = cpu_time(service.pid) if service else {}
    between = asyncio.ensure_future(baseline_between())
    await asyncio.gather(*(worker(n // at_once) for _ in range(at_once)))
    between.cancel()
    cpu_us = each_us(before, cpu_time(service.pid), len(taken)) if service else {}
    await asyncio.gather(between, return_exceptions=True)
    idle += await base.take(_AROUND)
    return InFlight(taken, percentile(interleaved, 0.5), percentile(idle, 0.5), cpu_us)


async def measure_machine(bases: list[Baseline]) -> float:
    """p99 to p50 of 16 waiting baselines: what the machine alone makes of equal work.

    Each of `bases` starts one after the other, as many at once as there are processors; with 16
    waiting, who comes next waits for its share of them in a row.
    """
    in_a_row = _IN_FLIGHT // len(bases)
    series = await asyncio.gather(*(base.take(_SERIES) for base in bases))
    waits = [sum(one[i : i + in_a_row]) for one in series for i in range(_SERIES - in_a_row + 1)]
    return percentile(waits, 0.99) / percentile(waits, 0.5)


async def measure_rate(
    client: AsyncSandboxClient, service: Service, image: str, seconds: float
) -> dict[str, float]:
    """Commands a second, 16 in flight in 8 sandboxes; memory and descriptors at both ends.

    First as many as the node keeps results for: what it keeps for replays grows until then, and is
    bounded.
    """
    sandboxes = [await client.create_sandbox(image) for _ in range(8)]

    async def run(until: Callable[[int], bool]) -> int:
        done = 0

        async def worker(number: int) -> None:
            nonlocal done
            while not until(done):
                await sandboxes[number % 8].exec(TRUE)
                done += 1

        await asyncio.gather(*(worker(number) for number in range(16)))
        return done

    await run(lambda done: done >= _KEPT_RESULTS)
    memory, descriptors = service.memory_mib(), service.descriptors()
    end = time.perf_counter() + seconds
    done = await run(lambda _: time.perf_counter() >= end)
    figures = {
        "exec_per_s": round(done / seconds, 1),
        "rate_memory_growth_mib": round(service.memory_mib() - memory, 2),
        "rate_descriptor_growth": service.descriptors() - descriptors,
    }
    await asyncio.gather(*(sandbox.delete() for sandbox in sandboxes))
    return figures


async def measure_burst(
    client: AsyncSandboxClient, image: str, sandboxes: int, commands: int = 4
) -> dict[str, float]:
    """Seconds until so many sandboxes have run so many commands and are deleted.

    `burst_succeeded` of `burst_total` commands did.
    """

    async def one() -> int:
        succeeded = 0
        try:
            async with await client.create_sandbox(image) as sandbox:
                for _ in range(commands):
                    succeeded += (await sandbox.exec(TRUE)).ok
        except Exception as error:  # noqa: BLE001 - counted, and told
            say(f"burst: {error}")
        return succeeded

    start = time.perf_counter()
    done = await asyncio.gather(*(one() for _ in range(sandboxes)))
    return {
        "burst_wall_s": round(time.perf_counter() - start, 2),
        "burst_sandboxes": sandboxes,
        "burst_succeeded": sum(done),
        "burst_total": sandboxes * commands,
    }


async def measure_transfer(sandbox: AsyncSandbox, service: Service, mib: int) -> dict[str, float]:
    """MB a second up and down, and what the server took in memory for it."""

    async def content() -> AsyncIterator[bytes]:
        for _ in range(mib):
            yield _PIECE

    service.reset_peak()
    before = service.memory_mib()
    start = time.perf_counter()
    assert await sandbox.files.write("/tmp/big", content()) == mib * MIB
    up = time.perf_counter() - start
    start = time.perf_counter()
    size = 0
    async for piece in sandbox.files.iterate("/tmp/big"):
        size += len(piece)
    down = time.perf_counter() - start
    assert size == mib * MIB
    await sandbox.files.remove("/tmp/big")
    return {
        "upload_mb_s": round(mib * MIB / up / 1e6, 1),
        "download_mb_s": round(mib * MIB / down / 1e6, 1),
        "transfer_server_mib": round(service.peak_mib() - before, 1),
    }


async def measure_stalled(service: Service, image: str, readers: int, stalled: int) -> float:
    """Of readers of output at once: how the others' p99 changes when some do not read."""
    with_none = await _p99_of_readers(service, image, readers, 0)
    with_some = await _p99_of_readers(service, image, readers, stalled)
    return round(with_some / with_none, 2)


async def _p99_of_readers(service: Service, image: str, readers: int, stalled: int) -> float:
    async with AsyncSandboxClient(url=service.tcp) as client:
        sandboxes = [await client.create_sandbox(image) for _ in range(10)]
        floods = [
            await sandboxes[number % 10].start("yes | head -c 33554432; sleep 60")
            for number in range(stalled)
        ]
        silent = [await _stalled_reader(service, flood.operation_id) for flood in floods]
        taken: list[float] = []

        async def read(number: int) -> None:
            start = time.perf_counter()
            stream = sandboxes[number % 10].stream("seq 1 1000")
            size = 0
            async for chunk in stream:
                size += len(chunk.data)
            assert size == 3893
            taken.append(time.perf_counter() - start)

        await asyncio.gather(*(read(number) for number in range(readers - stalled)))
        for connection in silent:
            connection.close()
        await asyncio.gather(*(sandbox.delete() for sandbox in sandboxes))
    return percentile(taken, 0.99)


async def _stalled_reader(service: Service, operation_id: str) -> socket.socket:
    """Ask for a command's output and never read the answer."""
    host, port = service.tcp.removeprefix("http://").split(":")
    loop = asyncio.get_running_loop()
    silent = socket.socket()
    silent.setblocking(False)
    await loop.sock_connect(silent, (host, int(port)))
    ask = f"GET /v1/execs/{operation_id}/events HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n"
    await loop.sock_sendall(silent, ask.encode())
    return silent


async def run(args: argparse.Namespace) -> dict[str, object]:
    """Take every figure of this module; see SPECIFICATION.md for what they must reach."""
    image, scale = args.image, 0.1 if args.quick else 1.0
    with serving() as service:
        async with contextlib.AsyncExitStack() as stack:
            base = await stack.enter_async_context(baseline())
            await base.sample(20)
            base.seconds.clear()
            processors = len(os.sched_getaffinity(0))
            bases = [base] + [
                await stack.enter_async_context(baseline())
                for _ in range(min(processors, _IN_FLIGHT) - 1)
            ]
            clients = {
                "process": await stack.enter_async_context(
                    AsyncSandboxClient(in_process=True, runtime="native")
                ),
                "socket": await stack.enter_async_context(AsyncSandboxClient(url=service.unix)),
                "http": await stack.enter_async_context(AsyncSandboxClient(url=service.tcp)),
            }
            sandboxes = {way: await clients[way].create_sandbox(image) for way in clients}
            say("exec by each way")
            taken = await measure_execs(sandboxes, base, args.n)
            host = base.p50
            say("exec, 16 in flight")
            flying = await measure_in_flight(sandboxes["http"], base, args.n * 16, service)
            own = await measure_in_flight(sandboxes["process"], base, args.n * 16)
            result: dict[str, object] = {
                "host_ms": summary(base.seconds),
                **{f"{way}_exec_ms": summary(times) for way, times in taken.items()},
                "process_exec_ratio": round(percentile(taken["process"], 0.5) / host, 3),
                "socket_exec_ratio": round(percentile(taken["socket"], 0.5) / host, 3),
                "exec_ratio": round(percentile(taken["http"], 0.5) / host, 3),
                **flying.figures(""),
                "exec_cpu_us_16": flying.cpu_us,
                "exec_mean_16_bound_ms": round(
                    _IN_FLIGHT * flying.cpu_us["all"] / processors / 1e3, 2
                ),
                "machine_p99_to_p50_16": round(await measure_machine(bases), 3),
                **own.figures("process_"),
            }
            say("transfer")
            result |= await measure_transfer(sandboxes["http"], service, round(1024 * scale))
            say("commands a second")
            result |= await measure_rate(clients["http"], service, image, 60 * scale)
            say("burst")
            result |= await measure_burst(clients["http"], image, round(1000 * scale))
            ledger = await clients["socket"].ledger()
            result["leaked"] = ledger.leaked
        say("stalled readers")
        result["stalled_readers_p99_ratio"] = await measure_stalled(
            service, image, round(500 * scale), round(50 * scale)
        )
    return result


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--image", default="debian:bookworm")
    parser.add_argument("--n", type=int, default=400, help="commands by each way")
    parser.add_argument("--quick", action="store_true", help="a tenth of the load")
    parser.add_argument("--json", action="store_true", help="one object on the last line")
    args = parser.parse_args()
    os.environ.pop("COLDFRAME_URL", None)
    report(asyncio.run(run(args)), as_json=args.json)


if __name__ == "__main__":
    main()
