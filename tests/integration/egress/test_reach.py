"""What is reached and what is refused; every refusal beside the rule that lets it through."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import sys
from collections.abc import Iterator

from coldframe.protocol.network import EgressDecision, EgressKind
from tests.fixtures.egress import (
    METADATA,
    OTHER,
    PRIVATE,
    SHARED,
    WEB,
    WEB6,
    Fenced,
    Internet,
    MakeFenced,
    hello,
)
from tests.integration.egress.conftest import TALK, TLS

NODE = "203.0.113.1"

CASES = [
    # rules, host, reached
    (("web.example",), "web.example", True),
    (("WEB.example.",), "web.example", True),
    (("web.example:7",), "web.example", True),
    (("web.example:8,9-20",), "web.example", False),
    (("*.example",), "web.example", True),
    (("*.web.example",), "web.example", False),
    (("other.example",), "web.example", False),
    (("six.example:7",), "six.example", True),
    (("web.example:7",), WEB, False),  # never resolved under this policy's sandbox
    ((WEB,), WEB, True),
    ((f"{WEB}:7",), WEB, True),
    ((f"{WEB}:80",), WEB, False),
    ((OTHER,), WEB, False),
    (("203.0.113.8/29",), WEB, True),
    (("203.0.113.16/28",), WEB, False),
    (("2001:db8::/64",), WEB6, True),
    ((f"[{WEB6}]:7",), WEB6, True),
    (("2001:db8:1::/64",), WEB6, False),
    ((WEB,), f"::ffff:{WEB}", True),
    ((OTHER,), f"::ffff:{WEB}", False),
    (("public",), WEB, True),
    (("public",), WEB6, True),
    (("public",), "web.example", True),
    (("public",), PRIVATE, False),
    (("public",), f"::ffff:{PRIVATE}", False),
    (("0.0.0.0/0",), PRIVATE, False),
    (("0.0.0.0/0",), WEB, True),
    (("10.0.0.0/8",), PRIVATE, True),
    ((f"{PRIVATE}:7",), PRIVATE, True),
    ((f"{PRIVATE}:8",), PRIVATE, False),
    (("public",), METADATA, False),
    (("169.254.0.0/16",), METADATA, False),
    ((METADATA,), METADATA, True),
    (("public",), SHARED, False),
    ((SHARED,), SHARED, True),
    (("public",), NODE, False),
    (("203.0.113.0/24",), NODE, False),
    ((NODE,), NODE, True),
]


async def test_reach_is_what_the_rules_say_and_nothing_else(
    servers: Internet, fenced: MakeFenced
) -> None:
    """Default deny, and local addresses only by their very name, v4 and v6."""

    async def here(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await hello(reader, writer)
        writer.close()

    node = await asyncio.start_server(here, NODE, 7)
    try:
        for rules, host, reached in CASES:
            box = await fenced(*rules)
            said = await box.python(TALK, host, "7", b"ping".hex())
            events = box.events()
            await box.sandbox.destroy()
            assert said == ("hello\nping" if reached else said), (rules, host, said)
            assert said.startswith("hello") == reached, (rules, host, said)
            decisions = {event.decision for event in events[1:]}
            assert (EgressDecision.REFUSED in decisions) == (not reached), (rules, host, events)
    finally:
        node.close()


async def test_default_sandbox_has_loopback_only_and_nothing_of_ours(
    servers: Internet, fenced: MakeFenced
) -> None:
    """A policy that nobody asked for costs nothing: no listener, no route, no address."""
    box = await fenced()

    said = await box.python(TALK, WEB, "7", "")
    listening = await box.run("cat", "/proc/net/tcp", "/proc/net/udp", "/proc/net/tcp6")
    routes = await box.run("cat", "/proc/net/route")

    assert said == "ERROR OSError\n"
    assert [line for line in listening.splitlines() if "sl" not in line.split()] == []
    assert len(routes.splitlines()) == 1
    assert not box.sandbox.parts.egress.active


async def test_policy_that_becomes_empty_takes_everything_away(
    servers: Internet, fenced: MakeFenced
) -> None:
    """What a phase was allowed must not linger for the next one."""
    box = await fenced()
    # State 0A listens, 07 is UDP; connections that have ended linger for a while.
    look = "cat /etc/resolv.conf; cat /proc/net/tcp* /proc/net/udp* /proc/net/raw* | grep ' 0[A7] '"
    before = await box.run("sh", "-c", look)

    await box.set("web.example")
    assert await box.python(TALK, "web.example", "7", "") == "hello\n"
    assert "127.0.0.53" in await box.run("cat", "/etc/resolv.conf")
    assert await box.sandbox.listening_ports() == ()
    await box.set()

    after = await box.run("sh", "-c", look)
    assert after == before
    assert await box.python(TALK, WEB, "7", "") == "ERROR OSError\n"
    await box.set("web.example")
    assert await box.python(TALK, "web.example", "7", "") == "hello\n"


async def test_resolv_conf_that_the_sandbox_changed_is_left_alone(
    servers: Internet, fenced: MakeFenced
) -> None:
    """Restoring over somebody's own file would lose their work."""
    box = await fenced("web.example")
    await box.run("sh", "-c", "echo mine > /etc/resolv.conf")

    await box.set()

    assert await box.run("cat", "/etc/resolv.conf") == "mine\n"


NETLINK = """
import socket, struct
link = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
def ask(kind, body):
    link.send(struct.pack("=IHHII", 16 + len(body), kind, 5, 1, 0) + body)
    return struct.unpack_from("=i", link.recv(4096), 16)[0]
route = struct.pack("=BBBBBBBBI", 2, 0, 0, 0, 254, 4, 254, 2, 0) + struct.pack("=HHI", 8, 4, 1)
address = struct.pack("=BBBBI", 2, 32, 0, 0, 1)
address += struct.pack("=HH4B", 8, 2, 169, 254, 1, 1)
down = struct.pack("=BBHiII", 0, 0, 0, 1, 0, 1)
print(ask(25, route), ask(21, address), ask(16, down))
"""
"""Takes away the default route and the address, and loopback itself; prints errno each."""


async def test_sandbox_cannot_change_what_fences_it(servers: Internet, fenced: MakeFenced) -> None:
    """Its root holds no NET_ADMIN: routes, addresses and devices are not its own to change."""
    box = await fenced(WEB)
    attempts = """
import os
for name in ("ipv4/icmp_echo_ignore_all", "ipv4/ip_forward", "ipv4/conf/all/route_localnet"):
    try: open("/proc/sys/net/" + name, "w").write("0"); print("written")
    except OSError as error: print(type(error).__name__)
"""

    assert await box.python(NETLINK) == "-1 -1 -1\n"
    assert set((await box.python(attempts)).split()) <= {"PermissionError", "OSError"}
    capabilities = await box.run("grep", "-E", "^Cap(Eff|Bnd|Prm)", "/proc/self/status")
    for line in capabilities.splitlines():
        assert not int(line.split()[1], 16) & 1 << 12, line
    assert await box.python(TALK, WEB, "7", "") == "hello\n"
    # Who does hold it in that very namespace can: the host's root.
    with opened_network(box) as network:
        code = (
            "import ctypes, sys; libc = ctypes.CDLL(None, use_errno=True)\n"
            "assert libc.setns(int(sys.argv[1]), 0x40000000) == 0\n" + NETLINK
        )
        control = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, str(network), pass_fds=(network,), stdout=-1
        )
        assert (await control.communicate())[0] == b"0 0 0\n"
    assert (await box.python(TALK, WEB, "7", "")).startswith("ERROR")


@contextlib.contextmanager
def opened_network(box: Fenced) -> Iterator[int]:
    """The sandbox's network namespace."""
    fd = os.open(f"/proc/{box.sandbox.parts.created.pid}/ns/net", os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


async def test_rule_for_a_protocol_lets_nothing_else_through(
    servers: Internet, fenced: MakeFenced, tls_server: ssl.SSLContext
) -> None:
    """`tls://` means that what leaves cannot be read on the way, `http://` that it can."""
    await servers.serve(WEB, 443, hello, ssl=tls_server)
    request = b"GET / HTTP/1.1\r\nHost: web.example\r\nConnection: close\r\n\r\n".hex()
    for rule in ("tls://web.example", f"tls://{WEB}"):
        box = await fenced(rule, "unused.example")
        host = rule.removeprefix("tls://")
        assert await box.python(TLS, host, "443", "web.example") == "h2 b'hello\\n'\n", rule
        assert "200 OK" not in await box.python(TALK, host, "80", request), rule
        assert "ping" not in await box.python(TALK, host, "7", b"ping\n".hex()), rule
    for rule in ("http://web.example", f"http://{WEB}"):
        box = await fenced(rule)
        host = rule.removeprefix("http://")
        assert "200 OK" in await box.python(TALK, host, "80", request), rule
        assert (await box.python(TLS, host, "443", "web.example")).startswith("ERROR"), rule
        assert "ping" not in await box.python(TALK, host, "7", b"ping\n".hex()), rule


async def test_udp_is_refused_at_once_and_said(servers: Internet, fenced: MakeFenced) -> None:
    """QUIC falls back to TCP only if it is told; silence would cost seconds each time."""
    box = await fenced("public")
    script = """
import socket
for family, host in ((socket.AF_INET, "203.0.113.10"), (socket.AF_INET6, "2001:db8::10")):
    link = socket.socket(family, socket.SOCK_DGRAM)
    link.settimeout(5)
    link.connect((host, 443))
    link.send(b"quic")
    try: link.recv(1)
    except OSError as error: print(type(error).__name__)
"""
    assert (await box.python(script)).split() == ["ConnectionRefusedError"] * 2
    events = box.events(kind=EgressKind.UDP, decision=EgressDecision.REFUSED)
    assert [(event.address, event.port) for event in events] == [(WEB, 443), (WEB6, 443)]


async def test_raw_packets_and_pings_reach_nobody(servers: Internet, fenced: MakeFenced) -> None:
    """What is not TCP has no way out, and the kernel does not answer for the world."""
    box = await fenced("public")
    heard = servers.socket(socket.SOCK_DGRAM, WEB, 9999)
    script = """
import socket, struct
raw = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_UDP)
raw.sendto(struct.pack("!HHHH", 1234, 9999, 12, 0) + b"rawr", ("203.0.113.10", 0))
ping = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
ping.settimeout(0.3)
ping.sendto(struct.pack("!BBHHH", 8, 0, 0xF7FF - 1, 1, 0), ("203.0.113.10", 0))
try:
    while ping.recv(2048)[20] != 0: pass
    print("answered")
except TimeoutError: print("silence")
"""
    assert await box.python(script) == "silence\n"
    assert await box.python(TALK, WEB, "7", "") == "hello\n"
    try:
        data = heard.recv(100)
    except BlockingIOError:
        data = b""
    heard.close()
    assert data == b""


async def test_abstract_unix_socket_of_the_host_is_out_of_reach(
    servers: Internet, fenced: MakeFenced
) -> None:
    """Abstract names belong to the network namespace; the host's must not be the sandbox's."""
    box = await fenced("public")
    name = "\0coldframe-test-abstract"
    script = """
import socket
try: socket.socket(socket.AF_UNIX).connect("\\0coldframe-test-abstract"); print("reached")
except OSError as error: print(type(error).__name__)
"""
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as control:
        server.bind(name)
        server.listen()
        assert await box.python(script) == "ConnectionRefusedError\n"
        control.connect(name)


async def test_events_tell_rule_name_address_and_bytes_each_way(
    servers: Internet, fenced: MakeFenced
) -> None:
    """Whoever reads a trajectory must see what left the sandbox, and by whose leave."""
    box = await fenced("*.example:7")
    await box.python(TALK, "web.example", "7", b"12345".hex())
    await box.python(TALK, OTHER, "7", "")

    closed = await box.event(decision=EgressDecision.CLOSED)
    (refused,) = box.events(decision=EgressDecision.REFUSED)

    assert (closed.name, closed.address, closed.port) == ("web.example", WEB, 7)
    assert (closed.rule, closed.bytes_out, closed.bytes_in) == ("*.example:7", 5, 11)
    assert (refused.name, refused.address, refused.port) == (None, OTHER, 7)
    page = box.sandbox.egress_events(2, 2)
    assert [event.seq for event in page.events] == [2, 3]
    assert (page.next_cursor, page.dropped) == (4, 0)


async def test_server_that_speaks_first_and_half_closed_connections_work(
    servers: Internet, fenced: MakeFenced
) -> None:
    """SMTP, SSH and MySQL wait for the server; rsync and HTTP/1.0 close one way first."""

    async def sums(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = await reader.read()
        writer.write(b"%d bytes" % len(data))

    await servers.serve(WEB, 9, sums)
    box: Fenced = await fenced("web.example")

    assert await box.python(TALK, "web.example", "7", "") == "hello\n"
    assert await box.python(TALK, "web.example", "9", b"\0four".hex()) == "5 bytes"
