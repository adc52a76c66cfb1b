"""Hold processes back in the file systems around a guarded directory, while that is needed."""

from __future__ import annotations

import os
from collections.abc import Sequence

from coldframe.host.fanotify import OPEN_EXEC_PERM, OPEN_PERM, Listener


class Holds:
    """Of one listener. Used by one thread at a time. What it does may raise OSError."""

    def __init__(self, listener: Listener, places: Sequence[int]) -> None:
        """`places` are descriptors of one directory of each file system; taken over."""
        self._listener, self._places = listener, list(places)
        self._executions = self._opens = False

    def executions(self) -> None:
        """From now on no process becomes something else unseen."""
        if not self._executions:
            for place in self._places:
                self._listener.watch(place, OPEN_EXEC_PERM)
            self._executions = True

    def opens(self, wanted: bool) -> None:
        """Hold back every open, or none: the first that a new program does is to open files."""
        if self._opens != wanted:
            change = self._listener.watch if wanted else self._listener.watch_less
            for place in self._places:
                change(place, OPEN_PERM)
            self._opens = wanted

    def close(self) -> None:
        """Twice is fine."""
        while self._places:
            os.close(self._places.pop())
