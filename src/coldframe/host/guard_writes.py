"""Which files of a guarded directory were written by processes that ran no foreign code alone."""

from __future__ import annotations


class Writes:
    """What is known of each file. Used by one thread at a time."""

    def __init__(self) -> None:
        self._opened: dict[int, bytes] = {}
        """Inode → name under which a good process opened it last. Whoever may not open a file has
        made it all the same, empty: to open it says nothing of who made it."""
        self._good: dict[bytes, int] = {}
        """Name → inode of what a good process wrote under it last."""
        self._written: set[int] = set()
        """Inodes that a good process wrote, having opened them by name."""
        self._spoiled: set[int] = set()
        self._struck: set[int] = set()
        """Those of them that an outsider changed."""

    def opened(self, inode: int, name: bytes) -> None:
        """A good process has opened it."""
        self._opened[inode] = name

    def written(self, inode: int) -> None:
        """A good process has changed it; one that it never opened it only cut short."""
        if inode in self._opened:
            self._written.add(inode)
            self._good[self._opened[inode]] = inode

    def spoiled(self, inode: int, *, by_outsider: bool) -> None:
        """Another process has changed it."""
        self._spoiled.add(inode)
        if by_outsider:
            self._struck.add(inode)

    def vouched(self, inode: int) -> bool:
        """Whether it was written, and by good processes alone."""
        return inode in self._written and inode not in self._spoiled

    def displaced(self, there: dict[bytes, int]) -> list[bytes]:
        """Return the names under which a good process wrote what is not there any more, or not so.

        `there`: inodes by name. Whoever is not of the command can cut a file short by its name.
        """
        intact = {name: inode for name, inode in there.items() if inode not in self._struck}
        good = list(self._good.items())  # at once: whoever has it open may write meanwhile
        return [name for name, inode in good if intact.get(name) != inode]
