"""End nodes that no process serves any more, though their spawners keep everything for the next."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from pathlib import Path

from coldframe.host import gc, wire, workers
from coldframe.host.answers import decode_worker
from coldframe.host.roottree import closing
from coldframe.host.wire import Type

_ANSWER_S = 10.0
_END_S = 60.0
_LOOK_S = 0.02


def left(home: Path) -> tuple[str, ...]:
    """Return the ids of all nodes of a home that live and that no process serves."""
    found = []
    for node_id in gc.node_ids(home):
        directory = home / "nodes" / node_id
        with contextlib.suppress(OSError):  # none that could be left, or it is just going
            if not gc.is_held(directory / gc.DAEMON) and gc.is_held(directory / gc.LOCK):
                found.append(node_id)
    return tuple(found)


def end_left(home: Path) -> tuple[str, ...]:
    """End these, with all their sandboxes, and reap what is left; return what was done, in lines.

    Blocks while they end.
    """
    lines: list[str] = []
    for node_id in left(home):
        directory = home / "nodes" / node_id
        daemon = gc.hold_node(directory, gc.DAEMON)
        if daemon is None:
            continue  # somebody has just taken it over
        with closing(daemon):
            if _end(directory):
                lines.append(f"node {node_id}, which no process served")
    return (*lines, *gc.reap_dead_nodes(home))


def _end(directory: Path) -> bool:
    """End the workers of one node; return whether nothing of it lives any more."""
    reached, _ = workers.connect_all(directory / "workers")
    pids = [pid for pid in map(_ask_to_end, reached) if pid]
    for patience_s in (_END_S, _ANSWER_S):
        until = time.monotonic() + patience_s
        while time.monotonic() < until:
            try:
                if not gc.is_held(directory / gc.LOCK):
                    return True
            except OSError:
                return True
            time.sleep(_LOOK_S)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return False


def _ask_to_end(sock: socket.socket) -> int:
    """Return the worker's pid; 0: it does not answer."""
    splitter = wire.Splitter()
    first = time.monotonic_ns()
    with sock:
        sock.settimeout(_ANSWER_S)
        try:
            sock.sendall(wire.encode(Type.ATTACH, first, []) + wire.encode(Type.END, first + 1, []))
            pid = 0
            while data := sock.recv(1 << 16):
                for kind, _, request_id, body in splitter.feed(data):
                    if kind == Type.OK and request_id == first:
                        pid = decode_worker(wire.decode_fields(body), [])[1]
                    elif request_id == first + 1:
                        return pid
        except (OSError, wire.ProtocolError):
            return 0
    return 0
