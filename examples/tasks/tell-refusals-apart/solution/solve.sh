#!/bin/sh
cat > /srv/reach/reach <<'END'
#!/usr/bin/python3
import socket
import sys
from concurrent.futures import ThreadPoolExecutor


def address(host, port, kind):
    return socket.getaddrinfo(host, port, type=kind)[0]


def tcp(host, port):
    family, _, _, _, where = address(host, port, socket.SOCK_STREAM)
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.settimeout(3)
        try:
            sock.connect(where)
        except TimeoutError:
            return "silent"
        sock.settimeout(1)
        try:
            return "open" if sock.recv(1) else "cut"
        except TimeoutError:
            return "open"


def udp(host, port):
    family, _, _, _, where = address(host, port, socket.SOCK_DGRAM)
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.settimeout(1)
        sock.connect(where)
        sock.send(b"?")
        try:
            sock.recv(65536)
        except TimeoutError:
            return "silent"
        return "open"


def word(target):
    kind, host, port = target
    try:
        return {"tcp": tcp, "udp": udp}[kind](host, port)
    except socket.gaierror:
        return "unknown"
    except ConnectionRefusedError:
        return "closed"
    except (ConnectionResetError, BrokenPipeError, ConnectionAbortedError):
        return "cut"
    except OSError:
        return "unreachable"


def parse(line):
    kind, host, port = line.split(" ")
    if kind not in ("tcp", "udp") or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(line)
    return kind, host, int(port)


def main():
    lines = sys.stdin.read().splitlines()
    try:
        targets = [parse(line) for line in lines]
    except ValueError:
        return 2
    with ThreadPoolExecutor(max(len(targets), 1)) as pool:
        for line, said in zip(lines, pool.map(word, targets)):
            print(line, said)
    return 0


sys.exit(main())
END
chmod 755 /srv/reach/reach
/srv/reach/reach < /srv/reach/targets > /srv/reach/report
