"""What the image has in the directory where a walk over an upper stands.

Follows the walk level by level instead of resolving each path from the root, so that depth costs
nothing: below what the image has there is nothing to hold open.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from coldframe.host.treewalk import names_of
from coldframe.images.digest import is_whiteout
from coldframe.images.view import MergedView

_OPEN_LEVELS = 64
"""An image's own directories may be deep; the shallower ones are opened again on the way up."""


@dataclass
class _Level:
    directories: list[int]
    """Those of the layers that make it up; empty: the image has none, or this one is closed."""
    stack: ExitStack = field(default_factory=ExitStack)
    closed: bool = False


class ImageBelow(MergedView):
    """The image's side of a walk. To be closed; every name is one component."""

    def __init__(self, layers: Sequence[Path]) -> None:
        super().__init__(layers)
        root = _Level([])
        root.directories = self._directories((), root.stack)
        self._levels = [root]
        self.names: list[bytes] = []
        """The way from the root to where it stands."""

    def close(self) -> None:
        """Give every descriptor back."""
        while self._levels:
            self._levels.pop().stack.close()

    @property
    def depth(self) -> int:
        """How many names lead from the root to where it stands."""
        return len(self.names)

    def enter(self, name: bytes) -> None:
        """Go one level down."""
        level = _Level([])
        above = self._levels[-1].directories
        if above:
            level.directories = self._step(above, name, level.stack)
        self._levels.append(level)
        self.names.append(name)
        if level.directories and len(self._levels) > _OPEN_LEVELS:
            shallow = self._levels[-_OPEN_LEVELS]
            if shallow.directories:
                shallow.stack.close()
                shallow.directories, shallow.closed = [], True

    def leave_to(self, depth: int) -> None:
        """Go up until `depth` names lead from the root."""
        while len(self.names) > depth:
            self._levels.pop().stack.close()
            self.names.pop()
        if self._levels[-1].closed:
            self._reopen()

    def _reopen(self) -> None:
        """Open the deepest levels again, half of what may be open: the way up goes on."""
        first = max(1, len(self._levels) - _OPEN_LEVELS // 2)
        with ExitStack() as way:
            merged = self._directories(tuple(self.names[: first - 1]), way)
            for at in range(first, len(self._levels)):
                level = self._levels[at]
                level.stack, level.closed = ExitStack(), False
                level.directories = self._step(merged, self.names[at - 1], level.stack)
                merged = level.directories

    def root_stat(self) -> os.stat_result | None:
        """The state of the root; None: there are no layers."""
        root = self._levels[0].directories
        return os.fstat(root[0]) if root else None

    def look_at(self, name: bytes) -> tuple[os.stat_result | None, bytes | None]:
        """The state of a name where it stands, and a link's target; None: there is none."""
        return self.look_in(self._levels[-1].directories, name)

    def names_in(self, name: bytes) -> set[bytes]:
        """Names in one of the directories where it stands; empty if there is none."""
        found: set[bytes] = set()
        hidden: set[bytes] = set()
        with ExitStack() as stack:
            for directory in self._step(self._levels[-1].directories, name, stack):
                here = set(names_of(directory)) - found - hidden
                for one in here:
                    status = os.stat(one, dir_fd=directory, follow_symlinks=False)
                    (hidden if is_whiteout(status) else found).add(one)
        return found

    def open(self, name: bytes) -> int:
        """Open a regular file where it stands. Raises FileNotFoundError."""
        for directory in self._levels[-1].directories:
            with suppress(FileNotFoundError):
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                return os.open(name, flags, dir_fd=directory)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
