"""Files of lines that are only ever appended to: whole lines, whatever is killed or full."""

from __future__ import annotations

import os
from pathlib import Path


def append(fd: int, content: bytes, size: int) -> None:
    """Write whole lines at the end of a file of `size` bytes, all of them or none.

    Raises:
        OSError: they cannot be written; the file is as it was.
    """
    written = 0
    try:
        while written < len(content):
            written += os.write(fd, content[written:])
    except OSError:
        os.ftruncate(fd, size)  # else the next line would go on in this one
        raise


def cut_torn_line(path: Path) -> int:
    """Take away what a killed process left after the last whole line, so that lines stay lines.

    Returns the bytes that are left.
    """
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole != len(content):
        os.truncate(path, whole)
    return whole
