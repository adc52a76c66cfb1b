"""Egress under a policy, against a direct connection in the same run.

python -m benchmarks.egress --json

The servers stand in a network namespace of their own, behind a cable of the kernel's (veth). A
direct client is the same program on the bare host. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator

from benchmarks._measure import percentile, report, say
from coldframe import AsyncSandbox, AsyncSandboxClient, NetworkPolicy
from coldframe.images.store import ImageStore
from coldframe.node.settings import NodeSettings
from coldframe.protocol.ids import new_node_id, new_operation_id, new_sandbox_id
from coldframe.protocol.models import ExecRequest, SandboxSpec
from coldframe.runtimes.native import NativeRuntime

NODE, SERVER = "203.0.113.1", "203.0.113.10"
STREAM_PORT, REQUEST_PORT, CLOSED_PORT = 9001, 9002, 9003
ALLOWED = NetworkPolicy.parse(f"{SERVER}:{STREAM_PORT},{REQUEST_PORT}")
NAMED = NetworkPolicy.parse(f"bench.example:{STREAM_PORT},{REQUEST_PORT}")

_SERVER = """
import asyncio, sys
PIECE = bytes(1 << 20)
async def stream(reader, writer):
    count = int(await reader.readline())
    for _ in range(count >> 20):
        writer.write(PIECE)
        await writer.drain()
    writer.close()
async def request(reader, writer):
    while await reader.readline():
        while (await reader.readline()).strip():
            pass
        writer.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\n\\r\\nok")
async def main(host):
    await asyncio.start_server(stream, host, 9001, backlog=1024)
    await asyncio.start_server(request, host, 9002, backlog=1024)
    print("ready", flush=True)
    await asyncio.Event().wait()
asyncio.run(main(sys.argv[1]))
"""

_CLIENT = """
import json, socket, sys, time
host, what, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
clock = time.perf_counter
def stream():
    link = socket.create_connection((host, 9001))
    link.sendall(b"%d\\n" % count)
    room = bytearray(1 << 20)
    start, total = clock(), 0
    while got := link.recv_into(room): total += got
    assert total == count, total
    return count * 8 / (clock() - start) / 1e9
def request():
    start = clock()
    with socket.create_connection((host, 9002)) as link:
        link.sendall(b"GET / HTTP/1.1\\r\\nHost: bench.example\\r\\n\\r\\n")
        answer = b""
        while not answer.endswith(b"ok"): answer += link.recv(4096)
    return clock() - start
def refused():
    start = clock()
    try:
        with socket.create_connection((host, 9003)) as link:
            link.recv(1)
            raise SystemExit("it was not refused")
    except ConnectionError: pass
    return clock() - start
def unresolved():
    start = clock()
    try: socket.getaddrinfo("refused.example", 80)
    except socket.gaierror: pass
    return clock() - start
def hold():
    link = socket.create_connection((host, 9002))
    print("ready", flush=True)
    try: link.recv(1)
    except ConnectionError: pass
    return clock()
work = {"stream": stream, "request": request, "refused": refused, "unresolved": unresolved}
if what == "stream": print(json.dumps([stream()]))
elif what == "hold": print(hold())
else:
    work[what]()
    print(json.dumps([work[what]() for _ in range(count)]))
"""
"""The clock is the machine's: CLOCK_MONOTONIC, the same inside and outside."""


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextlib.contextmanager
def network() -> Iterator[None]:
    """A server's network, joined to this process' own by a cable."""
    tag = secrets.token_hex(3)
    name, cable = f"cfb{tag}", f"cfb{tag}"
    with contextlib.ExitStack() as stack:
        _ip("netns", "add", name)
        stack.callback(_ip, "netns", "del", name)
        _ip("link", "add", cable, "type", "veth", "peer", "name", "far", "netns", name)
        _ip("addr", "add", f"{NODE}/32", "peer", f"{SERVER}/32", "dev", cable)
        _ip("link", "set", cable, "up")
        _ip("-n", name, "addr", "add", f"{SERVER}/32", "peer", f"{NODE}/32", "dev", "far")
        _ip("-n", name, "link", "set", "far", "up")
        command = ["ip", "netns", "exec", name, sys.executable, "-c", _SERVER, SERVER]
        server = subprocess.Popen(command, stdout=subprocess.PIPE)
        stack.callback(server.wait)
        stack.callback(server.kill)
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        yield


async def resolve(name: str) -> list[str]:
    """The names of the benchmark."""
    return [SERVER] if name == "bench.example" else []


async def named_requests(image_name: str, n: int) -> list[float]:
    """Requests to a host that a rule names: resolved inside, and each looked at."""
    settings = NodeSettings.from_environment()
    node_id = new_node_id()
    with ImageStore(settings.home / "images") as store:
        image = store.resolve(image_name)
        runtime = NativeRuntime(
            node_id, store.layers_directory, settings.home / "nodes" / node_id, resolve=resolve
        )
        await runtime.start()
        try:
            spec = SandboxSpec(image=image_name, network=NAMED)
            sandbox = await runtime.create(new_sandbox_id(node_id), spec, image)
            argv = ("python3", "-c", _CLIENT, "bench.example", "request", str(n))
            running = await sandbox.start_exec(ExecRequest(argv=argv), new_operation_id())
            result = await running.wait()
            assert result.ok, result.stderr
        finally:
            await runtime.close()
    values: list[float] = json.loads(result.stdout)
    return values


async def inside(sandbox: AsyncSandbox, host: str, what: str, count: int) -> list[float]:
    """What the client program measures in a sandbox."""
    result = await sandbox.exec(["python3", "-c", _CLIENT, host, what, str(count)])
    assert result.ok, result.stderr
    values: list[float] = json.loads(result.stdout)
    return values


async def outside(what: str, count: int) -> list[float]:
    """What the same program measures on the host, with a direct connection."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _CLIENT, SERVER, what, str(count), stdout=subprocess.PIPE
    )
    answer, _ = await process.communicate()
    values: list[float] = json.loads(answer)
    return values


async def policy_change(client: AsyncSandboxClient, image: str, n: int) -> list[float]:
    """Seconds from asking for another policy until an open connection inside has felt it."""
    taken = []
    async with await client.create_sandbox(image, network=ALLOWED) as sandbox:
        for _ in range(n):
            await sandbox.set_network(ALLOWED)
            holding = await sandbox.start(["python3", "-c", _CLIENT, SERVER, "hold", "1"])
            async for chunk in holding.output():
                if b"ready" in chunk.data:
                    break
            await asyncio.sleep(0.02)
            start = time.perf_counter()
            await sandbox.set_network(f"{SERVER}:1")
            returned = time.perf_counter() - start
            result = await holding.wait()
            felt = float(result.stdout.split()[-1]) - start
            taken.append(max(returned, felt))
    return taken


async def create_ratio(client: AsyncSandboxClient, image: str, n: int) -> dict[str, float]:
    """Create → first exec with a policy, and without, one after the other."""
    taken: dict[str, list[float]] = {"with": [], "without": []}
    for _ in range(n):
        for key, policy in (("without", None), ("with", ALLOWED)):
            start = time.perf_counter()
            sandbox = await client.create_sandbox(image, network=policy)
            result = await sandbox.exec(["/bin/true"])
            taken[key].append(time.perf_counter() - start)
            assert result.ok, result
            await sandbox.delete()
    without, with_egress = (percentile(taken[key], 0.5) for key in ("without", "with"))
    return {
        "create_ratio_with_egress": round(with_egress / without, 3),
        "create_ms": round(without * 1e3, 3),
        "create_with_egress_ms": round(with_egress * 1e3, 3),
    }


async def run(args: argparse.Namespace) -> dict[str, object]:
    """Take every figure."""
    size = args.mib << 20
    async with AsyncSandboxClient(in_process=True) as client:
        say("streams")
        async with await client.create_sandbox(args.image, network=ALLOWED) as sandbox:
            streams, direct_streams = [], []
            for _ in range(args.rounds):
                streams += await inside(sandbox, SERVER, "stream", size)
                direct_streams += await outside("stream", size)
            say("requests")
            requests, direct_requests, refusals = [], [], []
            for _ in range(args.rounds):
                requests += await inside(sandbox, SERVER, "request", args.n)
                direct_requests += await outside("request", args.n)
                refusals += await inside(sandbox, SERVER, "refused", args.n)
            unresolved = await inside(sandbox, SERVER, "unresolved", args.n)
        named = await named_requests(args.image, args.n)
        say("policy changes")
        changes = await policy_change(client, args.image, args.changes)
        say("creates")
        creates = await create_ratio(client, args.image, args.creates)
        ledger = await client.ledger()
    request, direct = percentile(requests, 0.5), percentile(direct_requests, 0.5)
    return {
        "stream_gbit_s": round(percentile(streams, 0.5), 3),
        "direct_stream_gbit_s": round(percentile(direct_streams, 0.5), 3),
        "request_added_ms": round((request - direct) * 1e3, 4),
        "request_ms": round(request * 1e3, 4),
        "direct_request_ms": round(direct * 1e3, 4),
        "named_request_ms": round(percentile(named, 0.5) * 1e3, 4),
        "refusal_ms": round(percentile(refusals, 0.5) * 1e3, 4),
        "refused_name_ms": round(percentile(unresolved, 0.5) * 1e3, 4),
        "policy_change_ms": round(percentile(changes, 0.5) * 1e3, 4),
        "policy_change_p95_ms": round(percentile(changes, 0.95) * 1e3, 4),
        **creates,
        "leaked": ledger.leaked,
    }


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--image", default="debian:bookworm")
    parser.add_argument("--mib", type=int, default=1024, help="size of one stream")
    parser.add_argument("--n", type=int, default=200, help="requests and refusals per round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--changes", type=int, default=20)
    parser.add_argument("--creates", type=int, default=60)
    parser.add_argument("--json", action="store_true", help="one object on the last line")
    args = parser.parse_args()
    with network():
        result = asyncio.run(run(args))
    report(result, as_json=args.json)


if __name__ == "__main__":
    main()
