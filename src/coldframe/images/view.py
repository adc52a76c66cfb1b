"""Look into a stack of layers as a sandbox would see it, without mounting it.

Links are resolved inside the stack; whiteouts and opaque directories hide what is below.
Layers may have been written by hostile programs: nothing outside them is ever reached.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from coldframe.host.treewalk import DIRECTORY
from coldframe.images.digest import is_whiteout
from coldframe.protocol.errors import ImageError

_MAX_LINKS = 40


@dataclass(frozen=True)
class Place:
    """Where a path leads once links are resolved."""

    parts: tuple[bytes, ...]
    stat: os.stat_result | None
    """None: there is nothing."""

    @property
    def path(self) -> bytes:
        """Relative to the root, without a leading slash; empty for the root."""
        return b"/".join(self.parts)

    @property
    def is_directory(self) -> bool:
        """Whether a directory is there."""
        return self.stat is not None and stat.S_ISDIR(self.stat.st_mode)


class MergedView:
    """The union of layer trees, top first. Holds no descriptors between calls."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = tuple(roots)

    def resolve(self, path: bytes, *, follow: bool = True) -> Place:
        """Return where `path` leads; parts that do not exist are taken as they are.

        Args:
            follow: whether a link in the last place is followed.
        Raises:
            ImageError: too many links, or something lies below what is no directory.
        """
        rest = [part for part in path.split(b"/") if part not in (b"", b".")][::-1]
        done: list[bytes] = []
        links = 0
        while rest:
            part = rest.pop()
            if part == b"..":
                del done[-1:]
                continue
            done.append(part)
            status, target = self.look(tuple(done))
            if target is not None and (follow or rest):
                links += 1
                if links > _MAX_LINKS:
                    raise ImageError(f"{os.fsdecode(path)!r}: too many links")
                done = [] if target.startswith(b"/") else done[:-1]
                rest += [part for part in target.split(b"/") if part not in (b"", b".")][::-1]
            elif rest and status is not None and not stat.S_ISDIR(status.st_mode):
                shown = os.fsdecode(b"/".join(done))
                raise ImageError(f"'/{shown}' is not a directory")
        return Place(tuple(done), self.look(tuple(done))[0])

    def look(self, parts: tuple[bytes, ...]) -> tuple[os.stat_result | None, bytes | None]:
        """Return the state of a path whose parents are no links, and a link's target."""
        with ExitStack() as stack:
            if not parts:
                return os.fstat(self._directories((), stack)[0]), None
            return self.look_in(self._directories(parts[:-1], stack), parts[-1])

    @staticmethod
    def look_in(merged: Sequence[int], name: bytes) -> tuple[os.stat_result | None, bytes | None]:
        """As `look`, for a name in the directories that make up one."""
        for directory in merged:
            try:
                status = os.stat(name, dir_fd=directory, follow_symlinks=False)
            except FileNotFoundError:
                continue
            if is_whiteout(status):
                break
            if stat.S_ISLNK(status.st_mode):
                return status, os.readlink(name, dir_fd=directory)
            return status, None
        return None, None

    def read(self, path: bytes, max_bytes: int = 1 << 20) -> bytes | None:
        """Return a regular file's content; None if there is none.

        Raises:
            ImageError: it is larger than `max_bytes`.
        """
        place = self.resolve(path)
        if place.stat is None or not stat.S_ISREG(place.stat.st_mode):
            return None
        with ExitStack() as stack:
            for directory in self._directories(place.parts[:-1], stack):
                try:
                    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                    fd = os.open(place.parts[-1], flags, dir_fd=directory)
                except FileNotFoundError:
                    continue
                with os.fdopen(fd, "rb") as file:
                    content = file.read(max_bytes + 1)
                if len(content) > max_bytes:
                    raise ImageError(f"{os.fsdecode(path)!r} is larger than {max_bytes} bytes")
                return content
        return None

    def _directories(self, parts: tuple[bytes, ...], stack: ExitStack) -> list[int]:
        """Return the directories of all layers that make up one merged directory."""
        merged = []
        for root in self._roots:
            fd = os.open(root, DIRECTORY)
            stack.callback(os.close, fd)
            merged.append(fd)
        for part in parts:
            merged = self._step(merged, part, stack)
        return merged

    def _step(self, merged: list[int], name: bytes, stack: ExitStack) -> list[int]:
        below: list[int] = []
        for directory in merged:
            try:
                fd = os.open(name, DIRECTORY, dir_fd=directory)
            except FileNotFoundError:
                continue
            except OSError as error:
                # A whiteout, a file or a link: it hides whatever the layers below have.
                if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                    raise
                break
            stack.callback(os.close, fd)
            below.append(fd)
            if _overlay_xattr(fd, "redirect") is not None:
                raise ImageError(f"{os.fsdecode(name)!r}: redirected directories are not supported")
            if _overlay_xattr(fd, "opaque") == b"y":
                break
        return below


def _overlay_xattr(fd: int, name: str) -> bytes | None:
    try:
        return os.getxattr(fd, f"trusted.overlay.{name}")
    except OSError as error:
        if error.errno in (errno.ENODATA, errno.ENOTSUP):
            return None
        raise
