"""Operation ids whose result is kept no longer: remembered to be refused, up to a bound.

Fairly by owner, as results are (`pool`): where there are too many, who has most of them loses its
oldest. So nobody's operation runs again because of what others do.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from collections import deque
from pathlib import Path

FILE = "expired"
_FORM = b"expired\2"
_DIGEST = struct.Struct("<Q")
_RECORD = struct.Struct("<QQQ")
"""Its number in order of arrival, whose it is, and the id; the last two as digests."""


class ExpiredIds:
    """A bounded set of ids, by digest. In a file it outlives a kill, as `tally.Tally` does."""

    def __init__(self, most: int, path: Path | None = None) -> None:
        """Go on with what the file holds, if there is one. Raises OSError."""
        self._most = most
        self._slots: dict[int, int] = {}
        """Of each id, its place in the file."""
        # No ordered dicts: to find the first key of one takes the longer the more were taken out.
        self._shares: dict[int, deque[int]] = {}
        """By owner, oldest first."""
        self._added = 0
        self._memory: mmap.mmap | None = None
        if path is None:
            return
        size = len(_FORM) + most * _RECORD.size
        fresh = path.with_name(f"{path.name}.new")  # a kill, or a full disk, costs no id
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(fresh, flags, 0o600)
        try:
            # Else a full disk would be a SIGBUS of the whole process.
            os.posix_fallocate(fd, 0, size)
            self._memory = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        self._memory[: len(_FORM)] = _FORM
        for _, whose, digest in _read(path):
            self._add(digest, whose)
        fresh.replace(path)

    def __contains__(self, operation_id: str) -> bool:
        return _digest(operation_id) in self._slots

    def add(self, operation_id: str, owner: str | None) -> None:
        """Remember an id. For it, the oldest of the owner that has most may be forgotten."""
        digest = _digest(operation_id)
        if digest not in self._slots:
            self._add(digest, 0 if owner is None else _digest(owner))

    def _add(self, digest: int, whose: int) -> None:
        slot = len(self._slots)
        if slot == self._most:
            slot = self._forget_one()
        self._slots[digest] = slot
        self._shares.setdefault(whose, deque()).append(digest)
        self._added += 1
        if self._memory is not None:
            at = len(_FORM) + slot * _RECORD.size
            _RECORD.pack_into(self._memory, at, self._added, whose, digest)

    def _forget_one(self) -> int:
        """Return the place that became free."""
        whose, share = max(self._shares.items(), key=lambda item: len(item[1]))
        digest = share.popleft()
        if not share:
            del self._shares[whose]
        return self._slots.pop(digest)

    def close(self) -> None:
        """Unmap the file; the set stays. Twice is fine."""
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()


def _digest(text: str) -> int:
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int(_DIGEST.unpack(digest)[0])


def _read(path: Path) -> list[tuple[int, int, int]]:
    """Return the records of a file, oldest first; whatever size it was made for."""
    try:
        data = path.read_bytes()
    except OSError:
        return []
    if not data.startswith(_FORM):
        return []
    whole = (len(data) - len(_FORM)) // _RECORD.size * _RECORD.size
    records = _RECORD.iter_unpack(data[len(_FORM) : len(_FORM) + whole])
    return sorted(record for record in records if record[0])
