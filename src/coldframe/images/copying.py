"""Build the layer of one COPY line on the host, without following a link on either side.

Sources come from the build context only; the target's links are resolved inside the image.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from coldframe.host.treewalk import DIRECTORY, Entry, walk
from coldframe.images.unpack import copy_entry, entry_metadata
from coldframe.images.view import MergedView, Place
from coldframe.images.writer import Metadata, TreeWriter
from coldframe.protocol.errors import ImageError


@dataclass(frozen=True)
class Copy:
    """A COPY line with its variables filled in."""

    sources: tuple[str, ...]
    target: str
    """Absolute; a trailing slash says that it is a directory."""
    uid: int = 0
    gid: int = 0
    mode: int | None = None
    """For every file and directory that is copied; None: their own."""


class Context:
    """A build context: the only place that COPY reads."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def expand(self, source: str) -> tuple[str, ...]:
        """Return the paths, relative to the context, that a source or pattern names.

        Raises:
            ImageError: there are none, or it would leave the context.
        """
        parts = [part for part in source.split("/") if part not in ("", ".")]
        if ".." in parts:
            raise ImageError(f"{source!r} would leave the build context")
        found = [""]
        for part in parts:
            found = [path for parent in found for path in self._match(parent, part)]
        if not found:
            raise ImageError(f"{source!r} is not in the build context {self._root}")
        for path in found:
            with self.entry(path):
                pass
        return tuple(found)

    @contextmanager
    def entry(self, path: str) -> Iterator[Entry]:
        """Stand on a file or directory of the context.

        Raises:
            ImageError: it is neither, or no longer there.
        """
        parent, _, name = path.rpartition("/")
        with self.directory(parent) as fd:
            if fd is None:
                raise ImageError(f"{path!r} is not in the build context {self._root}")
            raw = os.fsencode(name or ".")
            entry = Entry(fd, raw, b"", os.stat(raw, dir_fd=fd, follow_symlinks=False))
            if stat.S_ISLNK(entry.stat.st_mode):
                raise ImageError(f"{path!r} is or lies below a link; COPY follows none")
            if not stat.S_ISREG(entry.stat.st_mode) and not stat.S_ISDIR(entry.stat.st_mode):
                raise ImageError(f"{path!r} is neither a file nor a directory")
            yield entry

    def _match(self, parent: str, part: str) -> Iterator[str]:
        with self.directory(parent) as fd:
            if fd is None:
                return
            names = [part] if not re.search(r"[*?\[\\]", part) else _names(fd)
            pattern = _pattern(part)
            for name in names:
                try:
                    os.stat(name, dir_fd=fd, follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if name == part or pattern.fullmatch(name):
                    yield f"{parent}/{name}" if parent else name

    @contextmanager
    def directory(self, path: str) -> Iterator[int | None]:
        """Open a directory of the context; None if it is none.

        Raises:
            ImageError: the way there leads through a link.
        """
        fd = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for part in path.split("/") if path else ():
                if stat.S_ISLNK(os.stat(part, dir_fd=fd, follow_symlinks=False).st_mode):
                    raise ImageError(f"{path!r} is or lies below a link; COPY follows none")
                below = os.open(part, DIRECTORY, dir_fd=fd)
                os.close(fd)
                fd = below
            yield fd
        except NotADirectoryError:
            yield None
        finally:
            os.close(fd)


def _names(fd: int) -> list[str]:
    with os.scandir(fd) as entries:
        return sorted(entry.name for entry in entries)


def _pattern(part: str) -> re.Pattern[str]:
    """Return the expression of one component: `*`, `?`, `[a-z]`, `[^a-z]`, `\\x`."""
    result, i = "", 0
    while i < len(part):
        char = part[i]
        closing = part.find("]", i + 2) if char == "[" else -1
        if char == "\\" and i + 1 < len(part):
            i += 1
            result += re.escape(part[i])
        elif closing > 0:
            inside = part[i + 1 : closing].replace("\\", "\\\\").replace("[", "\\[")
            result += f"[{inside}]"
            i = closing
        else:
            result += {"*": ".*", "?": "."}.get(char, re.escape(char))
        i += 1
    try:
        return re.compile(result, re.S)
    except re.error as error:
        raise ImageError(f"{part!r} is not a pattern ({error})") from error


class LayerCopy:
    """Copies into a layer that lies on top of others."""

    def __init__(self, tree: Path, below: Sequence[Path]) -> None:
        # The tree under construction is the topmost layer of the view: what one source made
        # is there for the next.
        self._view = MergedView([tree, *below])
        self._below = MergedView(below) if below else None
        self._tree = tree
        self._entered: dict[bytes, Place] = {}

    def copy(self, context: Context, request: Copy) -> int:
        """Copy every source; return how many entries were written.

        Raises:
            ImageError: a source or the target is not what COPY can use; the message names it.
        """
        sources = [path for source in request.sources for path in context.expand(source)]
        target = os.fsencode(request.target)
        if len(sources) > 1 and not target.endswith(b"/"):
            raise ImageError(f"several sources need a target that ends in / ({request.target})")
        self.inherit_root()
        with TreeWriter(self._tree) as writer:
            return sum(
                self._copy_one(context, source, target, request, writer) for source in sources
            )

    def make_directories(self, path: bytes, uid: int, gid: int) -> None:
        """Make a directory and the missing ones above it."""
        self.inherit_root()
        with TreeWriter(self._tree) as writer:
            self._enter(path, Metadata(0o755, uid, gid), writer)

    def inherit_root(self) -> None:
        """Give the layer's root what the root below has: overlay shows the topmost one's."""
        if self._below is not None and (status := self._below.resolve(b"").stat) is not None:
            with TreeWriter(self._tree) as writer:
                writer.directory(
                    b"", Metadata(stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid)
                )

    def _copy_one(
        self, context: Context, source: str, target: bytes, request: Copy, writer: TreeWriter
    ) -> int:
        with context.entry(source) as entry:
            if stat.S_ISDIR(entry.stat.st_mode):
                with context.directory(source) as directory:
                    assert directory is not None
                    return self._copy_tree(directory, target, request, writer)
            if target.endswith(b"/") or self._view.resolve(target).is_directory:
                target = target.rstrip(b"/") + b"/" + entry.name
            self._put(entry, target, request, writer)
            return 1

    def _copy_tree(self, source: int, target: bytes, request: Copy, writer: TreeWriter) -> int:
        """Copy a directory's content, not the directory itself, as Docker does."""
        count = 0
        self._enter(target, Metadata(0o755, request.uid, request.gid), writer)
        for entry in walk(source):
            if entry.path == b"." or stat.S_ISSOCK(entry.stat.st_mode):
                continue
            if stat.S_ISCHR(entry.stat.st_mode) or stat.S_ISBLK(entry.stat.st_mode):
                raise ImageError(f"{os.fsdecode(entry.path)!r} is a device; COPY takes none")
            self._put(entry, target.rstrip(b"/") + b"/" + entry.path, request, writer)
            count += 1
        return count

    def _put(self, entry: Entry, target: bytes, request: Copy, writer: TreeWriter) -> None:
        mode = stat.S_IMODE(entry.stat.st_mode) if request.mode is None else request.mode
        metadata = replace(entry_metadata(entry), mode=mode, uid=request.uid, gid=request.gid)
        if stat.S_ISDIR(entry.stat.st_mode):
            self._enter(target, metadata, writer)
            return
        parent, _, name = target.rpartition(b"/")
        place = self._enter(parent, Metadata(0o755, request.uid, request.gid), writer)
        path = b"/".join((*place.parts, name))
        status, _ = self._view.look((*place.parts, name))
        if status is not None and stat.S_ISDIR(status.st_mode):
            raise ImageError(f"'/{os.fsdecode(path)}' is a directory in the image")
        copy_entry(entry, writer, path, metadata)

    def _enter(self, path: bytes, metadata: Metadata, writer: TreeWriter) -> Place:
        """Make sure of a directory in the layer; one that the image has keeps its own metadata."""
        if (known := self._entered.get(path)) is not None:
            return known
        place = self._view.resolve(path)
        if place.stat is not None and not place.is_directory:
            raise ImageError(f"'/{os.fsdecode(place.path)}' is not a directory")
        for depth in range(1, len(place.parts) + 1):
            upto = place.parts[:depth]
            status, _ = self._view.look(upto)
            if status is not None:
                kept = Metadata(stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid)
            elif upto == place.parts:
                kept = metadata
            else:
                kept = Metadata(0o755, metadata.uid, metadata.gid)
            writer.directory(b"/".join(upto), kept)
        self._entered[path] = place
        return place
