"""Remove directory trees that may be hostile, without ever following a link.

The trees are at rest: their sandbox has ended.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

from coldframe.host import removal

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


def remove_tree(path: Path) -> None:
    """Remove a file or tree, however deep; a missing one is fine.

    A removal that was killed can be taken up again, and two may run at once.

    Raises:
        FileError: somebody fills or moves it meanwhile.
        OSError: something in it cannot be removed.
    """
    with suppress(FileNotFoundError):
        if not stat.S_ISDIR(path.lstat().st_mode):
            path.unlink()
            return
        parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            removal.remove_tree(parent, os.fsencode(path.name))
        finally:
            os.close(parent)
