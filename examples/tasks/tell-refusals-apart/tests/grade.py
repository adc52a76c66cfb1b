"""Grade the report, then the program: against the policy, and against servers on loopback."""

import contextlib
import json
import os
import pathlib
import socket
import struct
import subprocess
import threading
import time

PROGRAM = "/srv/reach/reach"
TARGETS = "/srv/reach/targets"
REPORT = "/srv/reach/report"
NOBODY = 65534

# What the policy makes of each; the same on every machine.
REFUSED = {
    "tcp 127.0.0.1 9": "closed", "tcp 203.0.113.7 80": "cut", "tcp 192.0.2.44 22": "cut", "tcp 2001:db8::1 443": "cut",
    "tcp 10.20.30.40 5432": "cut", "tcp 169.254.169.254 80": "cut", "tcp packages.example 443": "unknown",
    "udp 127.0.0.1 9": "closed", "udp 198.51.100.5 53": "closed", "udp time.example 123": "unknown",
}  # fmt: skip
OTHERS = {
    "tcp 198.51.100.99 8080": "cut", "tcp 172.16.0.1 1": "cut", "tcp 2001:db8:1::2 22": "cut", "tcp ::1 9": "closed",
    "udp 203.0.113.200 4500": "closed", "tcp no-such-name.example 80": "unknown", "tcp localhost 9": "closed",
}  # fmt: skip


class Servers:
    """Listeners on loopback, each with a manner of its own."""

    def __init__(self):
        self.kept, self.sent = [], []

    def tcp(self, manner, family=socket.AF_INET, host="127.0.0.1"):
        server = socket.socket(family, socket.SOCK_STREAM)
        server.bind((host, 0))
        server.listen(512)
        threading.Thread(target=self.serve, args=(server, manner), daemon=True).start()
        return f"tcp {host} {server.getsockname()[1]}"

    def serve(self, server, manner):
        while True:
            sock, _ = server.accept()
            threading.Thread(target=self.handle, args=(sock, manner), daemon=True).start()

    def handle(self, sock, manner):
        self.kept.append(sock)
        with contextlib.suppress(OSError):
            if manner == "greets":
                sock.sendall(b"hello\r\n")
            elif manner == "greets late":
                time.sleep(0.4)
                sock.sendall(b"hello\r\n")
            elif manner == "ends":
                sock.close()
            elif manner == "ends late":
                time.sleep(0.2)
                sock.close()
            elif manner == "resets":
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                sock.close()
            elif manner == "listens":
                sock.settimeout(10)
                self.sent.append(sock.recv(100))

    def udp(self, answers):
        server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        server.bind(("127.0.0.1", 0))

        def run():
            while True:
                data, peer = server.recvfrom(100)
                if answers and data == b"?":
                    server.sendto(b"!", peer)

        threading.Thread(target=run, daemon=True).start()
        self.kept.append(server)
        return f"udp 127.0.0.1 {server.getsockname()[1]}"


def run(lines):
    """Return (exit code, output, seconds)."""
    begun = time.monotonic()
    ended = subprocess.run(
        [PROGRAM], user=NOBODY, group=NOBODY, extra_groups=[], cwd="/", timeout=15, capture_output=True,
        env={"PATH": "/usr/bin:/bin"}, input="".join(f"{line}\n" for line in lines).encode(),
    )  # fmt: skip
    return ended.returncode, ended.stdout.decode("utf-8", "replace"), time.monotonic() - begun


def difference(said, right):
    lines = [f"{target} {word}" for target, word in right.items()]
    for told, line in zip(said.splitlines(), lines):
        if told != line:
            return f"{told[:80]!r} instead of {line!r}"
    return None if said == "".join(f"{line}\n" for line in lines) else "another number of lines"


def check():
    if os.path.islink(REPORT) or not os.path.isfile(REPORT):
        return f"{REPORT}: no such file"
    if pathlib.Path(TARGETS).read_text().split("\n")[:-1] != list(REFUSED):
        return f"{TARGETS} was changed"
    problem = difference(pathlib.Path(REPORT).read_bytes().decode("utf-8", "replace"), REFUSED)
    if problem:
        return f"{REPORT}: {problem}"
    servers = Servers()
    manners = {"greets": "open", "greets late": "open", "ends": "cut", "ends late": "cut", "resets": "cut", "listens": "open"}
    right = {servers.tcp(manner): word for manner, word in manners.items()} | OTHERS
    right |= {servers.tcp("greets", socket.AF_INET6, "::1"): "open", servers.udp(True): "open", servers.udp(False): "silent"}
    code, out, _ = run(right)
    problem = f"exit code {code}" if code else difference(out, right)
    if problem:
        return problem
    if any(servers.sent):
        return f"it sent {servers.sent} over TCP"
    many = [servers.tcp("listens")] * 200 + [servers.udp(False)] * 100
    code, out, took = run(many)
    words = [line.rsplit(" ", 1)[-1] for line in out.splitlines()]
    if code or words != ["open"] * 200 + ["silent"] * 100:
        return f"300 targets at once: exit code {code}, {sorted(set(words))}"
    if took > 8:
        return f"300 silent targets took {took:.1f} s"
    for lines in (["tcp 127.0.0.1"], ["sctp 127.0.0.1 9"], ["tcp 127.0.0.1 0"], ["tcp 127.0.0.1 x"], [""], ["tcp 127.0.0.1 9", "tcp"]):
        code, out, _ = run(lines)
        if (code, out) != (2, ""):
            return f"{lines}: exit code {code}, {out!r}"
    return None


def main():
    try:
        problem = check()
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        problem = f"it could not be run: {error}"
    print(problem or "all is right", flush=True)
    pathlib.Path("/logs/verifier/reward.json").write_text(json.dumps({"reward": 0.0 if problem else 1.0}))
    os._exit(0)


main()
