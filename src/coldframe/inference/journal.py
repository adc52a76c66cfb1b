"""The file of an attempt's calls while it is written: its name and its lines."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from coldframe.protocol.errors import InvalidRequestError
from coldframe.trajectories.calls import Line, encode
from coldframe.trajectories.lines import append

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


def digest_of(key: str) -> str:
    """Return what of a key is kept: enough to know it again, not to use it."""
    return hashlib.sha256(key.encode()).hexdigest()


def check_name(attempt_id: str) -> None:
    """Refuse what is no single path component.

    Raises:
        InvalidRequestError: it is none.
    """
    if not _NAME.fullmatch(attempt_id):
        raise InvalidRequestError(
            f"attempt id {attempt_id!r}: letters, digits, `.`, `_`, `-`, at most 200"
        )


class Journal:
    """One file, appended to a line at a time; what is written survives the process."""

    def __init__(self, path: Path, *, fresh: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_CREAT
        try:
            self._fd = os.open(path, flags | (os.O_EXCL if fresh else 0), 0o600)
        except FileExistsError:
            raise InvalidRequestError(f"{path}: this attempt has a journal already") from None
        self.bytes = os.fstat(self._fd).st_size

    def write(self, line: Line) -> None:
        """Append a line, whole or not at all; nothing once it is closed.

        Raises:
            OSError: it cannot be written.
        """
        if self._fd < 0:
            return
        content = encode(line)
        append(self._fd, content, self.bytes)
        self.bytes += len(content)

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
