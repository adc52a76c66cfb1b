"""The seam behind which the writable directories of sandboxes live. Its kinds: `storage`."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Collection
from typing import Protocol

RemoveTree = Callable[[int, str], Awaitable[int]]
"""Removes a name below an open directory with all that it holds (`Spawner.remove_tree`)."""

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Storage(Protocol):
    """Makes and removes the directory that holds a sandbox's upper and work directories."""

    name: str
    enforces_disk: bool
    """Whether `disk_bytes` is a limit that holds."""
    fallback_from: str = ""
    """Why `auto` took this kind and not a better one; empty otherwise."""

    def require_disk(self) -> None:
        """Raise StorageFullError while the disk below has no room for another. Takes no time."""

    def require_space(self) -> None:
        """As `require_disk`, and raise it too if what is dropped is to be swept first."""
        self.require_disk()

    def make(self, sandbox_id: str, disk_bytes: int | None) -> int:
        """Make the directory; the descriptor belongs to the receiver. May take a moment.

        Raises CapabilityError (a limit that cannot be held), StorageFullError.
        """

    def open(self, sandbox_id: str) -> int:
        """Open it again. Raises FileNotFoundError."""

    def widen(self, sandbox_id: str, disk_bytes: int) -> None:
        """Change the limit of one that was made with a limit. Raises OSError."""

    async def remove(self, sandbox_id: str, remove_tree: RemoveTree) -> None:
        """Remove it with all it holds; one that is not there is fine."""

    def names(self) -> tuple[str, ...]:
        """What is there, by sandbox id."""

    def look(self) -> float | None:
        """Do what the room on the disk asks for; return after how many seconds to look again.

        None: never, since the kernel refuses each write that there is no room for. Blocks.
        Raises OSError.
        """
        return None

    def settle(self, used: Collection[str]) -> bool:
        """Put in force what `look` did, and let go of what none of the uppers in use is in.

        Returns whether `why_read_only` of some upper, or `kept`, has changed.
        """
        del used
        return False

    def why_read_only(self, sandbox_id: str) -> str:
        """Why nothing can be written to an upper now; empty if it can."""
        del sandbox_id
        return ""

    def kept(self, sandbox_id: str | None = None) -> tuple[int, ...]:
        """Descriptors by which another process goes on with it, or with one upper: `adopt`."""
        del sandbox_id
        return ()

    def close(self) -> None:
        """Give everything back. Twice is fine."""
