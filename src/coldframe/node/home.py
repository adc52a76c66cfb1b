"""A node's directory: `nodes/<id>/`, whose lock says whether its owner lives."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from pathlib import Path

from coldframe.host import forks, gc, tally
from coldframe.protocol.errors import CapabilityError, StorageFullError


class NodeHome:
    """The directory of one node, held by flock from `acquire` to `release` or to our death.

    A directory whose lock nobody holds belongs to a dead node: the native runtime reaps those
    of its home when it starts, and `coldframe gc` does at any time.
    """

    def __init__(self, home: Path, node_id: str) -> None:
        self._home = home
        self.directory = home / "nodes" / node_id
        self._lock: int | None = None
        forks.own(self)

    def acquire(self) -> None:
        """Make the directory and take its lock.

        Raises:
            CapabilityError: the home cannot be written.
            StorageFullError: no space is left.
        """
        try:
            self._lock = gc.hold_node(self.directory)
            if self._lock is not None:
                self.counts = tally.Tally(self.directory / tally.FILE)
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

    def abandon(self) -> None:
        """See `forks.Owner`: the directory is the parent's."""
        lock, self._lock = self._lock, None
        if lock is not None:
            self.counts.close()
            os.close(lock)

    def release(self) -> None:
        """Remove the directory and let the lock go. Twice is fine."""
        lock, self._lock = self._lock, None
        if lock is not None:
            with contextlib.suppress(OSError):  # a full disk: the sandboxes are gone all the same
                tally.hand_in(self._home, self.directory)
            shutil.rmtree(self.directory, ignore_errors=True)
            os.close(lock)
