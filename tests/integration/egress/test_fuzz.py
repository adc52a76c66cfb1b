"""Whatever bytes come, the node answers, refuses or closes; nothing of it breaks."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

from coldframe.protocol.network import Credential
from tests.fixtures.egress import WEB, Internet, MakeFenced, hello, open_flows
from tests.fixtures.waiting import until
from tests.integration.egress.conftest import TALK

FUZZ = """
import random, socket, ssl, struct, sys
random.seed(int(sys.argv[1]))
incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
hello = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="web.example")
try: hello.do_handshake()
except ssl.SSLError: pass
tls = outgoing.read()
name = b"\\3web\\7example\\0"
dns = struct.pack("!6H", 7, 0x100, 1, 0, 0, 1) + name + struct.pack("!2H", 1, 1)
dns += struct.pack("!BHHIH", 0, 41, 4096, 0, 0)
get = b"GET http://web.example/ HTTP/1.1\\r\\nHost: web.example\\r\\n\\r\\n"
post = b"POST / HTTP/1.1\\r\\nHost: web.example\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n"
post += b"5;a=b\\r\\nhello\\r\\n0\\r\\nA: b\\r\\n\\r\\n"
sized = b"PUT /x HTTP/1.1\\r\\nHost: web.example\\r\\nContent-Length: 5\\r\\n\\r\\nhello" * 2
upgrade = b"GET / HTTP/1.1\\r\\nHost: web.example\\r\\nUpgrade: websocket\\r\\n"
upgrade += b"Connection: Upgrade\\r\\n\\r\\n\\x81\\5frame"
connect = b"CONNECT web.example:443 HTTP/1.1\\r\\nHost: web.example\\r\\n\\r\\n"
seeds = [tls, struct.pack("!H", len(dns)) + dns, get, post, sized, upgrade, connect, connect + tls]
odd = [b"\\r\\n", b"\\n", b"\\0", b"\\xff", b" ", b"\\t", b":", b"0", b"9" * 20, b"chunked"]
doors = [("127.0.0.53", 3128), ("127.0.0.53", 53), ("web.example", 80), ("web.example", 443)]
datagram = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
def change(data):
    data = bytearray(data)
    for _ in range(random.choice([0, 1, 1, 2, 5])):
        at = random.randrange(len(data) + 1)
        act = random.randrange(4)
        if act == 0: data[at:at + 1] = bytes([random.randrange(256)])
        elif act == 1: data[at:at] = random.choice(odd)
        elif act == 2: del data[at:at + random.randrange(1, 9)]
        else: data[at:at] = data[at:at + random.randrange(1, 40)]
    return bytes(data)
for turn in range(int(sys.argv[2])):
    data = change(random.choice(seeds))
    if turn % 4 == 0:
        try: datagram.sendto(change(dns)[:1400], ("127.0.0.53", 53))
        except OSError: pass
    try:
        with socket.create_connection(random.choice(doors), 5) as link:
            link.settimeout(0.02)
            cut = random.randrange(len(data) + 1)
            link.sendall(data[:cut])
            link.sendall(data[cut:])
            if random.random() < 0.7: link.shutdown(socket.SHUT_WR)
            while link.recv(65536): pass
    except OSError: pass
print("done")
"""


async def test_bytes_of_every_kind_break_nothing(
    servers: Internet, fenced: MakeFenced, tls_server: ssl.SSLContext
) -> None:
    """An exception that nobody meant would leave a connection, or the node, in an odd state."""
    await servers.serve(WEB, 443, hello, ssl=tls_server)
    unmeant: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: unmeant.append(context))
    secret = Credential(host="other.example", value="x", tls=False)
    box = await fenced("web.example", "other.example", credentials=(secret,))
    gateway = box.sandbox.parts.egress._gateway
    assert gateway is not None

    for seed in ("1", "2", "3"):
        assert await box.python(FUZZ, seed, "400", deadline_s=60.0) == "done\n"

    await until(lambda: open_flows(gateway.desk) == 0)
    assert await box.python(TALK, "web.example", "7", b"x".hex()) == "hello\nx"
    ours = [one for one in unmeant if "egress" in str(one.get("future") or one.get("exception"))]
    assert ours == []
