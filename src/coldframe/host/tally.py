"""Count how sandboxes began and ended, in a file that outlives a killed node.

A node counts in `nodes/<id>/counts`, mapped into memory: a count costs no system call, and the
kernel keeps it when the process is killed. When the node ends, or is reaped, its counts are
added to `<home>/ledger.json`. Losing power may lose counts, never more.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import struct
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path

NAMES = ("created", "deleted", "expired", "failed", "lost")
FILE = "counts"
TOTALS = "ledger.json"
_FORM = struct.Struct(f"<{len(NAMES)}Q")
_COUNT = struct.Struct("<Q")


class Tally(MutableMapping[str, int]):
    """A node's counts by name, kept in a file. Belongs to one thread."""

    def __init__(self, path: Path) -> None:
        """Make the file with zeros, or go on with what it holds. Raises OSError."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.truncate(fd, _FORM.size)
            # Else the first count on a full disk would be a SIGBUS of the whole process.
            os.posix_fallocate(fd, 0, _FORM.size)
            self._memory = mmap.mmap(fd, _FORM.size)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Unmap the file."""
        self._memory.close()

    def __getitem__(self, name: str) -> int:
        return int(_COUNT.unpack_from(self._memory, self._offset(name))[0])

    def __setitem__(self, name: str, value: int) -> None:
        _COUNT.pack_into(self._memory, self._offset(name), value)

    def __delitem__(self, name: str) -> None:
        raise TypeError("counts are never removed")

    def __iter__(self) -> Iterator[str]:
        return iter(NAMES)

    def __len__(self) -> int:
        return len(NAMES)

    @staticmethod
    def _offset(name: str) -> int:
        try:
            return NAMES.index(name) * _COUNT.size
        except ValueError:
            raise KeyError(name) from None


def read_counts(path: Path) -> dict[str, int]:
    """Return a node's counts; zeros if there is no such file."""
    try:
        data = path.read_bytes()
    except OSError:
        data = b""
    if len(data) != _FORM.size:
        return dict.fromkeys(NAMES, 0)
    return dict(zip(NAMES, _FORM.unpack(data), strict=True))


def live_of(counts: Mapping[str, int]) -> int:
    """How many of those that were created have not ended."""
    return max(0, counts["created"] - sum(counts[name] for name in NAMES[1:]))


def settled(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the counts of a node that is no more: what it had alive is lost."""
    return {**counts, "lost": counts["lost"] + live_of(counts)}


def read_totals(home: Path) -> dict[str, int]:
    """Return the counts of all nodes of a home that have ended."""
    try:
        stored = json.loads((home / TOTALS).read_bytes())
        return {name: int(stored[name]) for name in NAMES}
    except (OSError, ValueError, KeyError, TypeError):
        return dict.fromkeys(NAMES, 0)


def hand_in(home: Path, directory: Path) -> None:
    """Add the counts of a node that has ended to its home's totals, once. Raises OSError."""
    with _locked(home):
        counts = directory / FILE
        if not counts.exists():
            return
        ended = settled(read_counts(counts))
        totals = read_totals(home)
        fresh = home / f"{TOTALS}.new"
        fresh.write_text(json.dumps({name: totals[name] + ended[name] for name in NAMES}))
        fresh.replace(home / TOTALS)
        counts.unlink()


@contextlib.contextmanager
def _locked(home: Path) -> Iterator[None]:
    fd = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
