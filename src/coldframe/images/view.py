"""Look into a stack of layers as a sandbox would see it, without mounting it.

Links are resolved inside the stack; whiteouts and opaque directories hide what is below.
Layers may have been written by hostile programs: nothing outside them is ever reached.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from coldframe.host.treewalk import DIRECTORY, Entry
from coldframe.images.digest import is_whiteout
from coldframe.protocol.errors import ImageError
from coldframe.protocol.text import excerpt

_MAX_LINKS = 40
_DEEPEST = 1000
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


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
        absent: int | None = None
        """How many components lead to the first that is not there: below it is nothing."""
        links = 0
        while rest:
            part = rest.pop()
            if part == b"..":
                del done[-1:]
                if absent is not None and len(done) < absent:
                    absent = None
                continue
            done.append(part)
            if absent is not None:
                continue
            status, target = self.look(tuple(done))
            if status is None:
                absent = len(done)
            if target is not None and (follow or rest):
                links += 1
                if links > _MAX_LINKS:
                    raise ImageError(f"{excerpt(path)}: too many links")
                done = [] if target.startswith(b"/") else done[:-1]
                rest += [part for part in target.split(b"/") if part not in (b"", b".")][::-1]
            elif rest and status is not None and not stat.S_ISDIR(status.st_mode):
                shown = os.fsdecode(b"/".join(done))
                raise ImageError(f"'/{shown}' is not a directory")
        return Place(tuple(done), None if absent is not None else self.look(tuple(done))[0])

    def look(self, parts: tuple[bytes, ...]) -> tuple[os.stat_result | None, bytes | None]:
        """Return the state of a path whose parents are no links, and a link's target."""
        with ExitStack() as stack:
            if not parts:
                roots = self._directories((), stack)
                return (os.fstat(roots[0]) if roots else None), None
            return self.look_in(self._directories(parts[:-1], stack), parts[-1])

    @staticmethod
    def look_in(merged: Sequence[int], name: bytes) -> tuple[os.stat_result | None, bytes | None]:
        """As `look`, for a name in the directories that make up one."""
        found = _topmost(merged, name)
        if found is None:
            return None, None
        directory, status = found
        is_link = stat.S_ISLNK(status.st_mode)
        return status, os.readlink(name, dir_fd=directory) if is_link else None

    def read(self, path: bytes, max_bytes: int = 1 << 20) -> bytes | None:
        """Return a regular file's content; None if there is none.

        Raises:
            ImageError: it is larger than `max_bytes`.
        """
        place = self.resolve(path)
        if place.stat is None or not stat.S_ISREG(place.stat.st_mode):
            return None
        with suppress(FileNotFoundError), os.fdopen(self.open_at(place.parts), "rb") as file:
            content = file.read(max_bytes + 1)
            if len(content) > max_bytes:
                raise ImageError(f"{excerpt(path)} is larger than {max_bytes} bytes")
            return content
        return None

    def names_at(self, parts: tuple[bytes, ...]) -> list[bytes]:
        """Return the names in a merged directory, in order; none if there is no directory."""
        with ExitStack() as stack:
            return [name for name, _ in self._merged(self._directories(parts, stack))]

    def open_at(self, parts: tuple[bytes, ...]) -> int:
        """Open a regular file whose parents are no links. Raises FileNotFoundError."""
        with ExitStack() as stack:
            for directory in self._directories(parts[:-1], stack):
                with suppress(FileNotFoundError):
                    return os.open(parts[-1], _READ, dir_fd=directory)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), b"/".join(parts))

    @contextmanager
    def entry(self, place: Place) -> Iterator[Entry]:
        """Stand on what is at a place; the entry's path is relative to the root.

        Raises:
            ImageError: nothing is there.
        """
        with ExitStack() as stack:
            name = place.parts[-1] if place.parts else b"."
            found = _topmost(self._directories(place.parts[:-1], stack), name)
            if found is not None:
                directory, status = found
                above = place.path[: len(place.path) - len(name)]
                yield Entry(directory, name, above, status, len(place.parts))
                return
        raise ImageError(f"'/{os.fsdecode(place.path)}' is not in the image")

    def walk(self, top: tuple[bytes, ...]) -> Iterator[Entry]:
        """Yield every entry below a merged directory, without itself; paths are relative to it.

        A directory comes before its content. Raises ImageError where it is absurdly deep.
        """
        waiting = [top]
        while waiting:
            parts = waiting.pop()
            if len(parts) > _DEEPEST:
                raise ImageError(f"directories are nested deeper than {_DEEPEST} levels")
            above = b"".join(part + b"/" for part in parts[len(top) :])
            below = []
            with ExitStack() as stack:
                for name, directory in self._merged(self._directories(parts, stack)):
                    status = os.stat(name, dir_fd=directory, follow_symlinks=False)
                    yield Entry(directory, name, above, status, len(parts) - len(top) + 1)
                    if stat.S_ISDIR(status.st_mode):
                        below.append((*parts, name))
            waiting += reversed(below)

    def _merged(self, directories: list[int]) -> list[tuple[bytes, int]]:
        """Return the names of one merged directory and the layer's directory that has each."""
        found: dict[bytes, int | None] = {}
        for directory in directories:
            with os.scandir(directory) as entries:
                names = [os.fsencode(entry.name) for entry in entries]
            for name in names:
                if name not in found:
                    status = os.stat(name, dir_fd=directory, follow_symlinks=False)
                    found[name] = None if is_whiteout(status) else directory
        return [(name, fd) for name, fd in sorted(found.items()) if fd is not None]

    def _directories(self, parts: tuple[bytes, ...], stack: ExitStack) -> list[int]:
        """Return the directories of all layers that make up one merged directory.

        They are open until `stack` is closed; those on the way there are not.
        """
        here = ExitStack()
        merged = []
        try:
            for root in self._roots:
                merged.append(os.open(root, DIRECTORY))
                here.callback(os.close, merged[-1])
            for part in parts:
                with here:
                    here = ExitStack()
                    merged = self._step(merged, part, here)
        except BaseException:
            here.close()
            raise
        stack.push(here)
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
                raise ImageError(f"{excerpt(name)}: redirected directories are not supported")
            if _overlay_xattr(fd, "opaque") == b"y":
                break
        return below


def _topmost(merged: Sequence[int], name: bytes) -> tuple[int, os.stat_result] | None:
    """Return which of the directories that make up one has a name, and what; None: it is gone."""
    for directory in merged:
        with suppress(FileNotFoundError):
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
            return None if is_whiteout(status) else (directory, status)
    return None


def _overlay_xattr(fd: int, name: str) -> bytes | None:
    try:
        return os.getxattr(fd, f"trusted.overlay.{name}")
    except OSError as error:
        if error.errno in (errno.ENODATA, errno.ENOTSUP):
            return None
        raise
