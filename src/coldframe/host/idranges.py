"""Hand out ranges of host ids, one per sandbox, that no other node of this machine uses.

Ranges are multiples of 65536 from 0x80000000 up, so that our user namespaces are known by
their /proc/PID/uid_map alone. A node holds blocks of them by flock in one directory of the
machine: homes may be many, the ids of the kernel are the same.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

from coldframe.host import forks
from coldframe.host.roottree import IDS_PER_SANDBOX
from coldframe.protocol.errors import CapacityError

FIRST_ID = 0x8000_0000
MACHINE_DIRECTORY = Path("/run/coldframe/ids")
_BLOCK_RANGES = 256
_BLOCKS = 127  # the last one would reach the id that stands for none
_DIRECTORY_MODE = 0o700


def is_sandbox_base(host_id: int) -> bool:
    """Whether a user namespace that maps 0 to this id is one of ours."""
    return FIRST_ID <= host_id < 1 << 32 and host_id % IDS_PER_SANDBOX == 0


class IdRanges:
    """The ranges of one node; belongs to one event loop."""

    def __init__(self, directory: Path) -> None:
        """Coordinate with others through `directory`, made if missing."""
        self._directory = directory
        self.blocks: dict[int, int] = {}
        """Descriptors of the locks of those that are held, by number."""
        self.on_block: Callable[[int, int], None] = lambda number, lock: None
        """Told of each more: its number and its lock."""
        self._free: deque[int] = deque()
        forks.own(self)

    def take(self) -> int:
        """Return the first host id of a free range.

        Raises:
            CapacityError: every range of the machine is in use.
        """
        if not self._free:
            self._take_block()
        # The one that has rested longest: nothing of its last owner should be around.
        return self._free.popleft()

    def adopt(self, blocks: Mapping[int, int], used: Collection[int]) -> None:
        """Go on with the locks of a process that is no more, whose sandboxes have these ranges."""
        self.blocks.update(blocks)
        free = [first for block in blocks for first in _ranges(block)]
        self._free.extend(first for first in free if first not in used)

    def give_back(self, first_id: int) -> None:
        """Let the range be used again."""
        self._free.append(first_id)

    @property
    def all(self) -> frozenset[int]:
        """First host ids of every range that is held, given out or not."""
        return frozenset(first for block in self.blocks for first in _ranges(block))

    def close(self) -> None:
        """Let others have the ranges. Twice is fine."""
        while self.blocks:
            os.close(self.blocks.popitem()[1])
        self._free.clear()

    abandon = close
    """See `forks.Owner`."""

    def _take_block(self) -> None:
        self._directory.mkdir(mode=_DIRECTORY_MODE, parents=True, exist_ok=True)
        for block in range(_BLOCKS):
            if block in self.blocks:
                continue
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            fd = os.open(self._directory / f"{block:03}", flags, 0o600)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.blocks[block] = fd
                self._free.extend(_ranges(block))
                self.on_block(block, fd)
                return
            os.close(fd)
        raise CapacityError("every range of user ids of this machine is in use")


def _ranges(block: int) -> Iterator[int]:
    """First host ids of a block's ranges."""
    start = FIRST_ID + block * _BLOCK_RANGES * IDS_PER_SANDBOX
    return (start + at * IDS_PER_SANDBOX for at in range(_BLOCK_RANGES))
