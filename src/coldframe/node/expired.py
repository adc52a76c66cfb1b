"""Operation ids whose result is kept no longer: remembered to be refused, the newest so many."""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from collections import deque
from pathlib import Path

FILE = "expired"
_NUMBER = struct.Struct("<Q")
_HEADER = struct.Struct("<QQ")


class ExpiredIds:
    """A bounded set of ids, by digest. In a file it outlives a kill, as `tally.Tally` does."""

    def __init__(self, most: int, path: Path | None = None) -> None:
        """Go on with what the file holds, if there is one. Raises OSError."""
        self._most = most
        self._known: set[int] = set()
        # Not one ordered dict: to find its first key takes the longer the more were taken out.
        self._order: deque[int] = deque()
        self._written = 0
        self._memory: mmap.mmap | None = None
        if path is None:
            return
        kept = _read(path)[-most:]
        size = _HEADER.size + most * _NUMBER.size
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.ftruncate(fd, size)
            # Else a full disk would be a SIGBUS of the whole process.
            os.posix_fallocate(fd, 0, size)
            self._memory = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        _HEADER.pack_into(self._memory, 0, most, 0)
        for digest in kept:
            self._add(digest)

    def __contains__(self, operation_id: str) -> bool:
        return _digest(operation_id) in self._known

    def add(self, operation_id: str) -> None:
        """Remember an id; the oldest is forgotten for it."""
        digest = _digest(operation_id)
        if digest not in self._known:
            self._add(digest)

    def _add(self, digest: int) -> None:
        self._known.add(digest)
        self._order.append(digest)
        if len(self._known) > self._most:
            self._known.discard(self._order.popleft())
        if self._memory is not None:
            at = _HEADER.size + self._written % self._most * _NUMBER.size
            _NUMBER.pack_into(self._memory, at, digest)
            self._written += 1
            _HEADER.pack_into(self._memory, 0, self._most, self._written)

    def close(self) -> None:
        """Unmap the file; the set stays. Twice is fine."""
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()


def _digest(operation_id: str) -> int:
    digest = hashlib.blake2b(operation_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int(_NUMBER.unpack(digest)[0])


def _read(path: Path) -> list[int]:
    """Return what a file holds, oldest first; whatever size it was made for."""
    try:
        data = path.read_bytes()
        most, written = _HEADER.unpack_from(data)
        (*numbers,) = struct.unpack_from(f"<{min(most, written)}Q", data, _HEADER.size)
    except (OSError, struct.error):
        return []
    turn = written % most if written > most else 0
    return [*numbers[turn:], *numbers[:turn]]
