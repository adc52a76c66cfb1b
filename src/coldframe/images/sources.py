"""Where COPY and ADD read: a build context on the host, or an image. No link leads out of either.

In a context links are not followed at all; in an image they are resolved inside it.
"""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from coldframe.host.treewalk import DIRECTORY, Entry, walk
from coldframe.images.ignore import Ignore
from coldframe.images.patterns import is_pattern, name_pattern
from coldframe.images.view import MergedView
from coldframe.protocol.errors import ImageError
from coldframe.protocol.text import excerpt

_MOST_RULES = 1 << 20


class Source(Protocol):
    """A tree that is read by paths relative to its root. Each method raises ImageError."""

    def expand(self, source: str) -> tuple[str, ...]:
        """Return the paths that a source or pattern names; only a pattern may name none."""

    @contextmanager
    def entry(self, path: str) -> Iterator[Entry]:
        """Stand on a file or directory."""
        raise NotImplementedError
        yield

    def walk(self, path: str) -> Iterator[Entry]:
        """Yield what lies below a directory, each directory before its content.

        Paths are relative to it.
        """


class Context:
    """A build context, without what its .dockerignore leaves out."""

    def __init__(self, root: Path, ignore: Ignore | None = None) -> None:
        self._root = root
        self._ignore = ignore or Ignore()

    def expand(self, source: str) -> tuple[str, ...]:
        """See `Source`. A source that would leave the context is refused."""
        parts = [part for part in source.split("/") if part not in ("", ".")]
        if ".." in parts:
            raise ImageError(f"{excerpt(source)} would leave the build context")
        found = [""]
        for part in parts:
            found = [path for parent in found for path in self._match(parent, part)]
        kept = [path for path in found if not self._left_out(path)]
        if not kept and is_pattern(source):
            return ()
        if found and not kept:
            raise ImageError(
                f"{excerpt(source)} is left out of the build context by "
                f"{self._ignore.leaves_out(found[0])}"
            )
        if not kept:
            raise ImageError(f"{excerpt(source)} is not in the build context {self._root}")
        for path in kept:
            with self.entry(path):
                pass
        return tuple(kept)

    @contextmanager
    def entry(self, path: str) -> Iterator[Entry]:
        """See `Source`."""
        parent, _, name = path.rpartition("/")
        with self._directory(parent) as fd:
            if fd is None:
                raise ImageError(f"{excerpt(path)} is not in the build context {self._root}")
            raw = os.fsencode(name or ".")
            try:
                status = os.stat(raw, dir_fd=fd, follow_symlinks=False)
            except FileNotFoundError:
                raise ImageError(
                    f"{excerpt(path)} is not in the build context {self._root}"
                ) from None
            if stat.S_ISLNK(status.st_mode):
                raise ImageError(f"{excerpt(path)} is or lies below a link; COPY follows none")
            if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
                raise ImageError(f"{excerpt(path)} is neither a file nor a directory")
            yield Entry(fd, raw, b"", status)

    def walk(self, path: str) -> Iterator[Entry]:
        """See `Source`. A directory that is left out comes with the first entry that is not."""
        prefix = f"{path}/" if path else ""
        held: list[bytes] = []

        def wanted(entry: Entry) -> bool:
            return not self._ignore.hides_all_below(prefix + os.fsdecode(entry.path))

        with self._directory(path) as fd:
            if fd is None:
                raise ImageError(
                    f"{excerpt(path)} is not a directory of the build context {self._root}"
                )
            for entry in walk(fd, enter=wanted):
                if entry.path == b".":
                    continue
                held = [one for one in held if entry.path.startswith(one + b"/")]
                if self._ignore.leaves_out(prefix + os.fsdecode(entry.path)) is None:
                    for one in held:  # the walk has left them: they are looked up anew
                        with self.entry(prefix + os.fsdecode(one)) as above:
                            yield replace(above, above=one[: len(one) - len(above.name)])
                    held = []
                    yield entry
                elif stat.S_ISDIR(entry.stat.st_mode):
                    held.append(entry.path)

    def _left_out(self, path: str) -> bool:
        if not path or self._ignore.leaves_out(path) is None:
            return False
        if self._ignore.hides_all_below(path):
            return True
        with self.entry(path) as entry:
            if not stat.S_ISDIR(entry.stat.st_mode):
                return True
        return next(self.walk(path), None) is None

    def _match(self, parent: str, part: str) -> Iterator[str]:
        with self._directory(parent) as fd:
            if fd is None:
                return
            names = _names(fd) if is_pattern(part) else [part]
            for name in _matching(names, part):
                try:
                    os.stat(name, dir_fd=fd, follow_symlinks=False)
                except FileNotFoundError:
                    continue
                yield f"{parent}/{name}" if parent else name

    @contextmanager
    def _directory(self, path: str) -> Iterator[int | None]:
        """Open a directory; None if it is none. Raises ImageError on the way through a link."""
        fd = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for part in path.split("/") if path else ():
                if stat.S_ISLNK(os.stat(part, dir_fd=fd, follow_symlinks=False).st_mode):
                    raise ImageError(f"{excerpt(path)} is or lies below a link; COPY follows none")
                try:
                    below = os.open(part, DIRECTORY, dir_fd=fd)
                except NotADirectoryError:
                    yield None
                    return
                os.close(fd)
                fd = below
            yield fd
        finally:
            os.close(fd)


class ImageSource:
    """What an image holds, as a sandbox would see it."""

    def __init__(self, roots: Sequence[Path], name: str) -> None:
        """`roots` are the trees of its layers, top first; `name` names it in messages."""
        self._view, self._name = MergedView(roots), name

    def expand(self, source: str) -> tuple[str, ...]:
        """See `Source`."""
        found = [""]
        for part in posixpath.normpath("/" + source).split("/"):
            if part:
                found = [path for parent in found for path in self._match(parent, part)]
        if not found and not is_pattern(source):
            raise ImageError(f"{excerpt(source)} is not in {self._name}")
        return tuple(found)

    @contextmanager
    def entry(self, path: str) -> Iterator[Entry]:
        """See `Source`."""
        with self._view.entry(self._view.resolve(os.fsencode(path))) as entry:
            mode = entry.stat.st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                raise ImageError(
                    f"{excerpt(path)} in {self._name} is neither a file nor a directory"
                )
            yield entry

    def walk(self, path: str) -> Iterator[Entry]:
        """See `Source`."""
        yield from self._view.walk(self._view.resolve(os.fsencode(path)).parts)

    def _match(self, parent: str, part: str) -> Iterator[str]:
        place = self._view.resolve(os.fsencode(parent))
        if not place.is_directory:
            return
        if is_pattern(part):
            names = [os.fsdecode(name) for name in self._view.names_at(place.parts)]
            found = list(_matching(names, part))
        else:
            status, _ = self._view.look((*place.parts, os.fsencode(part)))
            found = [] if status is None else [part]
        yield from (f"{parent}/{name}" if parent else name for name in found)


def _names(fd: int) -> list[str]:
    with os.scandir(fd) as entries:
        return sorted(entry.name for entry in entries)


def _matching(names: Sequence[str], part: str) -> Iterator[str]:
    if not is_pattern(part):
        yield from (name for name in names if name == part)
        return
    try:
        pattern = name_pattern(part)
    except ValueError as error:
        raise ImageError(str(error)) from None
    yield from (name for name in names if name == part or pattern.fullmatch(name))


def read_ignore(context: Path, dockerfile: Path) -> Ignore:
    """Return the rules of `<Dockerfile>.dockerignore`, or else of the context's .dockerignore.

    Raises:
        ImageError: it is no regular file, not UTF-8 or absurdly large.
        DockerfileError: a line is no pattern.
    """
    for path in (
        dockerfile.with_name(dockerfile.name + ".dockerignore"),
        context / ".dockerignore",
    ):
        raw = read_small(path, _MOST_RULES)
        if raw is not None:
            try:
                return Ignore(raw.decode(), str(path))
            except UnicodeDecodeError:
                raise ImageError(f"{path} is not UTF-8") from None
    return Ignore()


def read_small(path: Path, most: int) -> bytes | None:
    """Return a regular file's content; None if it is not there. Blocks on nothing.

    Raises:
        ImageError: it is something else, larger than `most` bytes, or cannot be read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ImageError(f"{path}: {error.strerror}") from error
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ImageError(f"{path} is no regular file")
        raw = file.read(most + 1)
    if len(raw) > most:
        raise ImageError(f"{path}: more than {most} bytes are too many")
    return raw
