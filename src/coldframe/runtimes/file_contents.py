"""Digests of what files hold, of as much content as one look may read."""

from __future__ import annotations

import hashlib
import os
import stat
from contextlib import suppress

from coldframe.host.patience import Patience
from coldframe.host.roottree import closing
from coldframe.host.treewalk import Entry, open_file
from coldframe.protocol.models import HASHED_FILE_BYTES
from coldframe.runtimes.image_below import ImageBelow

MOST_HASHED_BYTES = 256 << 20
"""Content that one look reads."""
_PIECE = 1 << 20


class Contents:
    """Digests of files and targets of links, in an upper and below it; empty: not known."""

    def __init__(self, image: ImageBelow, patience: Patience) -> None:
        self._image, self._patience = image, patience
        self._left = MOST_HASHED_BYTES

    def of(self, entry: Entry) -> bytes:
        """Digest what an entry of the upper holds. Raises NotKnownError: it took too long."""
        with suppress(OSError):  # changed meanwhile: not known, and different at the next look
            if stat.S_ISLNK(entry.stat.st_mode):
                return hashlib.sha256(os.readlink(entry.name, dir_fd=entry.parent)).digest()
            if stat.S_ISREG(entry.stat.st_mode) and self._may_read(entry.stat.st_size):
                with closing(open_file(entry)) as fd:
                    return self._digest(fd)
        return b""

    def below(self, name: bytes, status: os.stat_result | None) -> bytes:
        """As `of`, of what the image has at a name where it stands."""
        assert status is not None
        if stat.S_ISLNK(status.st_mode):
            return hashlib.sha256(self._image.look_at(name)[1] or b"").digest()
        if not self._may_read(status.st_size):
            return b""
        with closing(self._image.open(name)) as fd:
            return self._digest(fd)

    def _may_read(self, size: int) -> bool:
        return size <= min(HASHED_FILE_BYTES, self._left)

    def _digest(self, fd: int) -> bytes:
        content, at = hashlib.sha256(), 0
        while at <= HASHED_FILE_BYTES:
            self._patience.check()
            piece = os.pread(fd, _PIECE, at)
            if not piece:
                self._left -= at
                return content.digest()
            content.update(piece)
            at += len(piece)
        return b""  # it grew meanwhile
