"""What a process is run as, so that it can be judged by that after it has ended."""

from __future__ import annotations

import os
from dataclasses import dataclass

from coldframe.host.roottree import closing

_PIECE = 1 << 16
_START_TIME, _IMAGE = 19, slice(45, 49)
"""Where they stand in /proc/PID/stat, from the state on."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Of one process, from one execution to the next."""

    started: str
    """What tells it from later ones with its pid."""
    image: tuple[str, ...]
    """Where its arguments and its environment lie: chosen anew whenever it executes something."""
    program: str
    """Path of what it runs."""
    arguments: tuple[bytes, ...]
    environ: bytes
    user: int
    """On the host."""
    stdin: bytes
    """What its standard input is; empty: nothing."""


def facts_of(pid: int) -> Facts | None:
    """Look at a process; None: it has ended, or is executing something just now."""
    try:
        before = _stat(pid)
        facts = Facts(
            before[_START_TIME],
            tuple(before[_IMAGE]),
            os.readlink(f"/proc/{pid}/exe"),  # noqa: PTH115
            tuple(_read(f"/proc/{pid}/cmdline").split(b"\0")),
            _read(f"/proc/{pid}/environ"),
            os.stat(f"/proc/{pid}").st_uid,  # noqa: PTH116
            _stdin(pid),
        )
        after = _stat(pid)
    except OSError:
        return None
    # While it is executing something they are not its own yet, or 0.
    whole = "0" not in facts.image and facts.image == tuple(after[_IMAGE])
    return facts if whole and facts.started == after[_START_TIME] else None


def started_of(pid: int) -> str | None:
    """Return `Facts.started` of a process; None: it has ended, and does nothing any more."""
    try:
        state, *_ = fields = _stat(pid)
    except OSError:
        return None
    return None if state in {"Z", "X"} else fields[_START_TIME]


def parent_of(pid: int) -> int:
    """Return a process' parent. Raises OSError: it has ended."""
    return int(_stat(pid)[1])


def _stat(pid: int) -> list[str]:
    return _read(f"/proc/{pid}/stat").decode("ascii", "replace").rpartition(")")[2].split()


def _read(path: str) -> bytes:
    """Read a file of /proc; a `Path` costs several times as much, for each open that is judged."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    with closing(fd):
        content = b""
        while piece := os.read(fd, _PIECE):
            content += piece
        return content


def _stdin(pid: int) -> bytes:
    try:
        return os.readlink(b"/proc/%d/fd/0" % pid)  # noqa: PTH115 - bytes
    except FileNotFoundError:
        return b""
