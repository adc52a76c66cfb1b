"""Much traffic, many connections, limits, and policies that change under them."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from dataclasses import replace

import pytest

from coldframe.host.egress import desk, relay
from coldframe.host.egress.flows import Budget
from coldframe.protocol.ids import new_operation_id
from coldframe.protocol.models import ExecRequest
from coldframe.protocol.network import EgressDecision
from coldframe.runtimes.base import RunningExec
from tests.fixtures.egress import OTHER, WEB, Internet, MakeFenced, open_flows
from tests.fixtures.waiting import until
from tests.integration.egress.conftest import SWAP, TALK

GIB = 1 << 30
TEN_THOUSAND = 10_000

HOLD = """
import socket, sys
links = [socket.create_connection((host, 7), 5) for host in sys.argv[1:]]
for link in links: link.recv(6)
print("ready", flush=True)
sys.stdin.readline()
for host, link in zip(sys.argv[1:], links):
    try:
        link.sendall(b"still")
        print(host, link.recv(5))
    except OSError as error: print(host, type(error).__name__)
"""


async def test_gibibyte_each_way_at_once_arrives_whole(
    servers: Internet, fenced: MakeFenced
) -> None:
    """Images, data sets and pushes: nothing may be lost, doubled or kept in memory."""

    async def both(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def send() -> None:
            piece = bytes(range(256)) * 4096
            for _ in range(GIB // len(piece)):
                writer.write(piece)
                await writer.drain()
            writer.write_eof()

        sending = asyncio.ensure_future(send())
        total = 0
        while data := await reader.read(1 << 20):
            total += len(data)
        await sending
        received.set_result(total)

    received: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    await servers.serve(WEB, 9, both)
    box = await fenced(WEB)
    script = """
import hashlib, socket, threading
link = socket.create_connection(("203.0.113.10", 9))
def send():
    piece = b"\\0" * (1 << 20)
    for _ in range(1024): link.sendall(piece)
    link.shutdown(socket.SHUT_WR)
threading.Thread(target=send).start()
seen = hashlib.sha256()
while data := link.recv(1 << 20): seen.update(data)
print(seen.hexdigest())
"""
    said = await box.python(script, deadline_s=100)

    expected = hashlib.sha256()
    for _ in range(1024):
        expected.update(bytes(range(256)) * 4096)
    assert (said.strip(), await received) == (expected.hexdigest(), GIB)
    closed = await box.event(decision=EgressDecision.CLOSED)
    assert (closed.bytes_out, closed.bytes_in) == (GIB, GIB)


async def line(running: RunningExec) -> bytes:
    """What a command says up to the end of its first line, or of itself."""
    said = b""
    while not said.endswith(b"\n"):
        chunk = await running.read("stdout", len(said), 100)
        said += chunk.data
        if chunk.eof:
            break
    return said


@pytest.mark.timeout(300)
async def test_ten_thousand_connections_are_carried_at_once(
    servers: Internet, fenced: MakeFenced
) -> None:
    """Crawlers and load tests; a process may have 20,000 descriptors on many machines.

    All are open before the first byte is said, and a new policy cuts them all.
    """
    box = await fenced(f"{WEB}:77")
    script = """
import resource, socket, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
links = [socket.create_connection(("203.0.113.10", 77), 60) for _ in range(10000)]
for link in links: link.sendall(b"x")
print(sum(link.recv(1) == b"x" for link in links), flush=True)
sys.stdin.readline()
cut = 0
for link in links:
    try: link.recv(1)
    except ConnectionResetError: cut += 1
print(cut)
"""
    request = ExecRequest(argv=("python3", "-c", script), stdin_open=True, deadline_s=250)
    gateway = box.sandbox.parts.egress._gateway
    assert gateway is not None
    with servers.echo_process(WEB, 77):
        running = await box.sandbox.start_exec(request, new_operation_id())
        said = await line(running)
        assert said == b"%d\n" % TEN_THOUSAND, (await running.wait()).stderr
        assert open_flows(gateway.desk) == TEN_THOUSAND
        await box.set(OTHER)
        await running.write_stdin(b"\n")
        result = await running.wait()

    assert result.stdout == said + b"%d\n" % TEN_THOUSAND
    await until(lambda: open_flows(gateway.desk) == 0)
    ends = box.events(decision=EgressDecision.CUT)
    assert {(event.bytes_out, event.bytes_in) for event in ends} == {(1, 1)}


async def test_new_policy_cuts_open_connections_that_it_does_not_allow(
    servers: Internet, fenced: MakeFenced
) -> None:
    """A phase that ends must not leave a door open; what is still allowed lives on."""
    box = await fenced(WEB, OTHER, "six.example")
    request = ExecRequest(argv=("python3", "-c", HOLD, WEB, OTHER, "six.example"), stdin_open=True)
    running = await box.sandbox.start_exec(request, new_operation_id())
    await running.read("stdout", 0, 100)

    await box.set("203.0.113.8/30:7")
    await running.write_stdin(b"\n")
    result = await running.wait()

    assert result.stdout.decode().splitlines() == [
        "ready",
        f"{WEB} b'still'",
        f"{OTHER} b'still'",
        "six.example ConnectionResetError",
    ]
    cut = await box.event(decision=EgressDecision.CUT)
    assert (cut.name, cut.address) == ("six.example", "2001:db8::10")
    assert "new policy" in cut.reason


async def test_byte_limit_cuts_exactly_and_a_new_policy_counts_anew(
    servers: Internet, fenced: MakeFenced
) -> None:
    """What may leave is bounded to the byte, both ways counted."""
    box = await fenced(WEB, max_bytes=1000)

    said = await box.python(TALK, WEB, "7", (b"x" * 5000).hex())
    after = await box.python(TALK, WEB, "7", "")

    cut = await box.event(decision=EgressDecision.CUT)
    assert cut.bytes_out + cut.bytes_in == 1000
    assert said.count("x") < 1000
    assert after.startswith("ERROR")
    await box.set(WEB, max_bytes=1_000_000)
    assert (await box.python(TALK, WEB, "7", (b"x" * 5000).hex())).count("x") == 5000


async def test_rate_limit_slows_all_connections_together(
    servers: Internet, fenced: MakeFenced
) -> None:
    """One sandbox must not take the whole line; the limit is for all it opens."""
    box = await fenced(WEB, rate_bytes_s=1_000_000)
    loop = asyncio.get_running_loop()
    script = """
import socket, threading
def pull():
    link = socket.create_connection(("203.0.113.10", 7))
    threading.Thread(target=lambda: (link.sendall(b"x" * 300000), link.shutdown(1))).start()
    total = 0
    while data := link.recv(65536): total += len(data)
    print(total)
many = [threading.Thread(target=pull) for _ in range(2)]
for one in many: one.start()
for one in many: one.join()
"""
    began = loop.time()
    said = await box.python(script)

    assert said.split() == ["300006"] * 2
    assert loop.time() - began > 0.8  # 1.2 MB at 1 MB/s: a lower bound, however slow the machine


async def test_connection_that_a_side_resets_is_reset_on_the_other(
    servers: Internet, fenced: MakeFenced
) -> None:
    """An end of file in place of a reset would make half a file look whole."""

    async def broken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"half")
        await writer.drain()
        await reader.read(1)
        writer.transport.abort()

    async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        import socket
        import struct

        made = writer.get_extra_info("socket")
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await broken(reader, writer)

    await servers.serve(WEB, 9, reset)
    box = await fenced(WEB, "web.example")

    assert (await box.python(TALK, WEB, "9", b"x".hex())).startswith("halfERROR ConnectionReset")


async def test_sandbox_that_ends_with_open_connections_leaves_nothing(
    servers: Internet, fenced: MakeFenced
) -> None:
    """Listeners and connections hold the namespace; the node must let go of them first."""
    threads = threading.active_count()
    box = await fenced(WEB)
    request = ExecRequest(argv=("python3", "-c", HOLD, WEB, WEB), stdin_open=True)
    running = await box.sandbox.start_exec(request, new_operation_id())
    await running.read("stdout", 0, 100)

    await box.sandbox.destroy()

    assert box.sandbox.parts.egress.active is False
    assert threading.active_count() <= threads + 8


async def test_bytes_arrive_whole_when_no_pipe_is_to_be_had(
    servers: Internet, fenced: MakeFenced, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of stuck connections must not take the node's descriptors."""
    monkeypatch.setattr(relay, "_MOST_PIPES", 0)
    box = await fenced(WEB)
    assert await box.python(SWAP, "8") == "True\n"


async def test_connections_of_all_sandboxes_have_one_budget_and_give_back(
    servers: Internet, fenced: MakeFenced, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sandbox must not starve the node of descriptors."""
    monkeypatch.setattr(desk, "_SCARCE", 2.0)  # no other process carries
    box = await fenced(WEB)
    gateway = box.sandbox.parts.egress._gateway
    assert gateway is not None
    gateway.desk.room = replace(gateway.desk.room, near=Budget(6))
    script = """
import socket, sys
def reach():
    try:
        links.append(socket.create_connection(("203.0.113.10", 7), 5))
        return links[-1].recv(6)
    except OSError as error: return type(error).__name__
links = []
for _ in range(int(sys.argv[1])): print(reach())
"""
    many = (await box.python(script, "4")).split("\n")
    await until(lambda: open_flows(gateway.desk) == 0)
    few = (await box.python(script, "3")).split("\n")

    assert many[:4] == [*["b'hello\\n'"] * 3, "ConnectionResetError"]
    assert few[:3] == ["b'hello\\n'"] * 3


async def test_connection_that_showed_no_name_does_not_outlive_public(
    servers: Internet, fenced: MakeFenced
) -> None:
    """Under `public` nobody looked which host it means: a host's rule cannot vouch for it."""
    box = await fenced("public")
    request = ExecRequest(argv=("python3", "-c", HOLD, "web.example"), stdin_open=True)
    running = await box.sandbox.start_exec(request, new_operation_id())
    await running.read("stdout", 0, 100)

    await box.set("web.example")
    await running.write_stdin(b"\n")

    assert b"ConnectionResetError" in (await running.wait()).stdout
    assert await box.python(TALK, "web.example", "7", "") == "hello\n"


async def test_new_limits_hold_for_connections_that_are_open(
    servers: Internet, fenced: MakeFenced
) -> None:
    """A limit that only new connections feel is none for whoever keeps one open."""
    box = await fenced(WEB)
    request = ExecRequest(argv=("python3", "-c", HOLD, WEB), stdin_open=True)
    running = await box.sandbox.start_exec(request, new_operation_id())
    await running.read("stdout", 0, 100)

    await box.set(WEB, max_bytes=0)
    await running.write_stdin(b"\n")

    assert b"ConnectionResetError" in (await running.wait()).stdout
    cut = await box.event(decision=EgressDecision.CUT)
    assert "max_bytes" in cut.reason
