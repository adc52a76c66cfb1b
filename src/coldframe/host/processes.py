"""Look at a sandbox's processes and ports from the host, by numbers that are checked."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
from collections.abc import Container, Iterator, Sequence
from pathlib import Path

_TABLE_BYTES = 4 << 20
_LISTEN = b"0A"
_START_TIME = 18
"""Where it stands in /proc/PID/stat, behind the state."""


def has_exited(pidfd: int) -> bool:
    """Whether the process of a pidfd runs no more."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


class ProcessEnds:
    """Ends of processes, by pidfds that were opened while they ran."""

    def __init__(self, pidfds: dict[int, int]) -> None:
        self._pidfds = pidfds

    async def wait(self, pids: set[int]) -> None:
        """Return when those of `pids` that are watched have ended."""
        loop = asyncio.get_running_loop()
        for pid, fd in self._pidfds.items():
            if pid not in pids:
                continue
            ended = asyncio.Event()
            loop.add_reader(fd, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(fd)


@contextlib.contextmanager
def watching(pids: Sequence[int]) -> Iterator[ProcessEnds]:
    """Watch host processes for the block; those that have ended already are left out."""
    pidfds: dict[int, int] = {}
    try:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                pidfds[pid] = os.pidfd_open(pid)
        yield ProcessEnds(pidfds)
    finally:
        for fd in pidfds.values():
            os.close(fd)


def identity(pid: int) -> str | None:
    """Return what tells a host process from later ones with its pid; None: it is not there."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("ascii", "replace")
    except OSError:
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in "ZX" else f"{pid} {fields[_START_TIME]}"


def is_there(known: str) -> bool:
    """Whether the process of an `identity` lives."""
    return identity(int(known.split(maxsplit=1)[0])) == known


def listening_ports(
    pid: int, net_namespace: int, besides: Container[bytes] = ()
) -> tuple[int, ...]:
    """Return the TCP ports that are listened on in a process' network namespace.

    Listeners at `besides`, as the kernel writes them (`0100007F:0016`), are left out.
    `net_namespace` is its inode number: a pid that now names another process is found out.
    Raises ProcessLookupError if the process has ended.
    """
    ports: set[int] = set()
    for table in ("tcp", "tcp6"):
        try:
            with Path(f"/proc/{pid}/net/{table}").open("rb") as file:
                content = file.read(_TABLE_BYTES)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise ProcessLookupError(pid) from error
        ports.update(_listening(content, besides))
    if namespace_of(pid, "net") != net_namespace:
        raise ProcessLookupError(pid)
    return tuple(sorted(ports))


def namespace_of(pid: int, kind: str) -> int | None:
    """Return the inode number of a process' namespace, None if it has ended."""
    try:
        target = str(Path(f"/proc/{pid}/ns/{kind}").readlink())
    except OSError:
        return None
    return int(target.partition("[")[2].rstrip("]"))


def _listening(table: bytes, besides: Container[bytes]) -> Iterator[int]:
    for line in table.splitlines()[1:]:
        fields = line.split()
        if len(fields) > 3 and fields[3] == _LISTEN and fields[1] not in besides:
            yield int(fields[1].rpartition(b":")[2], 16)
