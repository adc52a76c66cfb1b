"""A node's directory: `nodes/<id>/`, whose lock says whether its owner lives."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

from coldframe.node.settings import NodeSettings
from coldframe.protocol.errors import CapabilityError


class NodeHome:
    """The directory of one node, held by flock from `acquire` to `release` or to our death."""

    def __init__(self, settings: NodeSettings, node_id: str) -> None:
        self._settings = settings
        self.directory: Path = settings.home / "nodes" / node_id
        self._lock = -1

    def acquire(self) -> None:
        """Make the directory and take its lock.

        Raises:
            CapabilityError: the home cannot be written.
        """
        try:
            self.directory.mkdir(parents=True, mode=0o700)
            path = self.directory / "lock"
            self._lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.release()
            raise CapabilityError(
                f"cannot keep a node's state in {self.directory}: {error.strerror}; "
                "set COLDFRAME_HOME to a directory that can be written"
            ) from error

    def release(self) -> None:
        """Remove the directory and let the lock go. Twice is fine."""
        if self._lock >= 0:
            shutil.rmtree(self.directory, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1
