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
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from coldframe.host.roottree import closing

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
        self._places = 0
        """How many places of the file are, or were, taken."""
        # No ordered dicts: to find the first key of one takes the longer the more were taken out.
        self._shares: dict[int, deque[int]] = {}
        """By owner, oldest first."""
        self._added = 0
        self._memory: mmap.mmap | None = None
        if path is not None and not self._go_on(path):
            self._begin(path)

    def _go_on(self, path: Path) -> bool:
        """Go on in a file of this size, if there is one: so a full disk stops no node's start."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return False
        with closing(fd):
            if os.fstat(fd).st_size != self._size or os.pread(fd, len(_FORM), 0) != _FORM:
                return False
            self._memory = mmap.mmap(fd, self._size)
        for number, whose, digest, place in sorted(_records(self._memory[:])):
            self._slots[digest] = place
            self._shares.setdefault(whose, deque()).append(digest)
            self._places, self._added = max(self._places, place + 1), number
        return True

    def _begin(self, path: Path) -> None:
        """Make the file, with what one of another size holds."""
        fresh = path.with_name(f"{path.name}.new")  # a kill, or a full disk, costs no id
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        with closing(os.open(fresh, flags, 0o600)) as fd:
            # Else a full disk would be a SIGBUS of the whole process.
            os.posix_fallocate(fd, 0, self._size)
            self._memory = mmap.mmap(fd, self._size)
        self._memory[: len(_FORM)] = _FORM
        with suppress(FileNotFoundError):
            for _, whose, digest, _ in sorted(_records(path.read_bytes())):
                self._add(digest, whose)
        fresh.replace(path)

    @property
    def _size(self) -> int:
        return len(_FORM) + self._most * _RECORD.size

    def __contains__(self, operation_id: str) -> bool:
        return _digest(operation_id) in self._slots

    def add(self, operation_id: str, owner: str | None) -> None:
        """Remember an id. For it, the oldest of the owner that has most may be forgotten."""
        digest = _digest(operation_id)
        if digest not in self._slots:
            self._add(digest, 0 if owner is None else _digest(owner))

    def _add(self, digest: int, whose: int) -> None:
        if self._places < self._most:
            slot, self._places = self._places, self._places + 1
        else:
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


def _records(data: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Yield what a file holds, with the place of each; whatever size it was made for."""
    if not data.startswith(_FORM):
        return
    whole = (len(data) - len(_FORM)) // _RECORD.size * _RECORD.size
    found = _RECORD.iter_unpack(data[len(_FORM) : len(_FORM) + whole])
    for place, (number, whose, digest) in enumerate(found):
        if number:
            yield number, whose, digest, place
