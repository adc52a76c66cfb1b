"""A node's directory: `nodes/<id>/`, whose locks say whether anything of it lives.

`lock` says that the node lives: its process holds it, and so do spawners that outlive that process.
`daemon` says, of such a node, that a process serves it. Where only the first is held, another
process may go on with the node.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from coldframe.host import census, forks, gc, tally
from coldframe.node import effects, expired
from coldframe.node.expired import ExpiredIds
from coldframe.protocol.errors import CapabilityError, StorageFullError


class NodeHome:
    """The directory of one node, held from `acquire` or `take_over` to `release` or our death.

    A directory whose lock nobody holds belongs to a dead node: the native runtime reaps those
    of its home when it starts, and `coldframe gc` does at any time.
    """

    def __init__(self, home: Path, node_id: str, *, daemon: bool = False) -> None:
        """With `daemon` another process may go on with the node after this one."""
        self._home = home
        self.node_id = node_id
        self.directory = home / "nodes" / node_id
        self._daemon_wanted = daemon
        self._daemon: int | None = None
        self._lock: int | None = None
        self.counts: tally.Tally
        forks.own(self)

    @classmethod
    def left(cls, home: Path, daemon: int | None = None) -> Iterator[NodeHome]:
        """Yield each node of a home that lives and that no process serves, taken over.

        `daemon` is what `leave` returned: that one comes first.
        """
        if daemon is not None:
            file = Path(f"/proc/self/fd/{daemon}").readlink()
            first = cls(home, file.parent.name, daemon=True)
            first._daemon = daemon
            yield first
        for node_id in gc.node_ids(home):
            one = cls(home, node_id, daemon=True)
            with contextlib.suppress(OSError):  # reaped by somebody else meanwhile
                if one._take_over():
                    yield one

    @property
    def lock(self) -> int:
        """The descriptor that holds the lock."""
        assert self._lock is not None
        return self._lock

    def acquire(self) -> None:
        """Make the directory and take its lock.

        Raises:
            CapabilityError: the home cannot be written.
            StorageFullError: no space is left.
        """
        try:
            if self._daemon_wanted:
                # First: who sees the other one held alone would take this node over.
                self._daemon = gc.hold_node(self.directory, gc.DAEMON)
            lock = gc.hold_node(self.directory)
            if lock is not None:
                self.go_on(lock)
        except OSError as error:
            self.release()
            if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                raise StorageFullError(
                    f"no space is left for a node's state in {self.directory}; make room there, "
                    "or set COLDFRAME_HOME to another file system"
                ) from error
            root = "run it as root, or " if isinstance(error, PermissionError) else ""
            raise CapabilityError(
                f"cannot keep a node's state in {self.directory}: {error.strerror}; {root}"
                "set COLDFRAME_HOME to a directory that can be written"
            ) from error
        if self._lock is None:
            raise CapabilityError(f"{self.directory} belongs to another node that is alive")

    def _take_over(self) -> bool:
        if not (self.directory / gc.DAEMON).exists() or not gc.is_held(self.directory / gc.LOCK):
            return False
        self._daemon = gc.hold_node(self.directory, gc.DAEMON)
        return self._daemon is not None

    def go_on(self, lock: int) -> None:
        """Have the lock, which others may have kept meanwhile. Raises OSError."""
        try:
            self.counts = tally.Tally(self.directory / tally.FILE)
        except BaseException:
            os.close(lock)
            raise
        self._lock = lock
        self.expired_ids: Path | None = None
        self.effects: Path | None = None
        if self._daemon is not None:
            self.expired_ids = self.directory / expired.FILE
            self.effects = self.directory / effects.FILE
            os.pwrite(self._daemon, b"%d\n" % (starts_of(self.directory) + 1), 0)

    def open_expired(self, most: int) -> ExpiredIds:
        """Return the ids that are to be refused, as many as are remembered."""
        return ExpiredIds(most, self.expired_ids)

    def abandon(self) -> None:
        """See `forks.Owner`: the directory is the parent's."""
        self.let_go()

    def let_go(self) -> None:
        """Leave everything as it is to others. Twice is fine."""
        lock, self._lock = self._lock, None
        if lock is not None:
            self.counts.close()
            os.close(lock)
        daemon, self._daemon = self._daemon, None
        if daemon is not None:
            os.close(daemon)

    def leave(self) -> int | None:
        """As `let_go`, but for the lock that says that a process serves the node: return that."""
        daemon, self._daemon = self._daemon, None
        self.let_go()
        return daemon

    def release(self) -> None:
        """Remove the directory and let the locks go. Twice is fine."""
        if self._lock is not None:
            with contextlib.suppress(OSError):  # a full disk: the sandboxes are gone all the same
                tally.hand_in(self._home, self.directory)
            # By its directory alone does `coldframe gc` find what is still in cgroups of the node.
            if not census.node_cgroups(self.directory.name):
                shutil.rmtree(self.directory, ignore_errors=True)
        self.let_go()


def starts_of(directory: Path) -> int:
    """Return how many processes have served a node, one after the other."""
    try:
        return int((directory / gc.DAEMON).read_bytes() or b"0")
    except (OSError, ValueError):
        return 0
