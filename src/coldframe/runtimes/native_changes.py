"""What a sandbox has changed of its image, by comparing its upper with the layers below it.

State, not history: a file that was written back as it was is no change. Costs what was written,
not what the image holds. The upper is hostile and may change meanwhile: it is walked by
descriptors, no link is followed, and only regular files are opened.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from coldframe.images.digest import is_whiteout
from coldframe.images.trees import DIRECTORY, Entry, open_file, walk
from coldframe.images.view import MergedView
from coldframe.protocol.errors import FileError, FileTooLargeError, ImageError
from coldframe.runtimes.base import Change

MOST_BYTES = 64 << 30
"""Content that is read for one look; holes are not read."""

_BLOCK = 4096
_PIECE = 1 << 20
_ZEROS = bytes(_BLOCK)
_TRIES = 3
_KINDS = {
    stat.S_IFREG: b"file",
    stat.S_IFDIR: b"directory",
    stat.S_IFLNK: b"link",
    stat.S_IFIFO: b"fifo",
    stat.S_IFSOCK: b"socket",
}


def changes_of(upper: int, layers: Sequence[Path]) -> tuple[Change, ...]:
    """Return what differs from the layers (top first), in order of the paths' bytes.

    `upper` is a descriptor of the upper directory, not taken over. Blocks; run it in a thread.

    Raises:
        FileTooLargeError: more than MOST_BYTES of content.
        FileError: it kept changing, or cannot be read.
    """
    failure: Exception | None = None
    for _ in range(_TRIES):
        try:
            return tuple(sorted(_Look(upper, layers).changes(), key=lambda change: change.path))
        except (ImageError, OSError) as error:
            failure = error
    raise FileError(f"the sandbox's files kept changing: {failure}") from failure


class _Image(MergedView):
    """The layers below an upper."""

    def names(self, parts: tuple[bytes, ...]) -> set[bytes]:
        """Names in a merged directory; empty if there is none."""
        found: set[bytes] = set()
        hidden: set[bytes] = set()
        with ExitStack() as stack:
            for directory in self._directories(parts, stack):
                here = _names(directory) - found - hidden
                for name in here:
                    status = os.stat(name, dir_fd=directory, follow_symlinks=False)
                    (hidden if is_whiteout(status) else found).add(name)
        return found

    def open(self, parts: tuple[bytes, ...]) -> int:
        """Open a regular file. Raises FileNotFoundError."""
        with ExitStack() as stack:
            for directory in self._directories(parts[:-1], stack):
                with contextlib.suppress(FileNotFoundError):
                    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                    return os.open(parts[-1], flags, dir_fd=directory)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), b"/".join(parts))


class _Look:
    """One pass over an upper."""

    def __init__(self, upper: int, layers: Sequence[Path]) -> None:
        self._upper = upper
        self._image = _Image(layers)
        self._left = MOST_BYTES

    def changes(self) -> Iterator[Change]:
        for entry in walk(self._upper):
            parts = () if entry.path == b"." else tuple(entry.path.split(b"/"))
            below, target = self._image.look(parts)
            if parts and is_whiteout(entry.stat):
                if below is not None:
                    yield Change(b"/" + entry.path, None)
                continue
            if stat.S_ISDIR(entry.stat.st_mode):
                yield from self._hidden(entry, parts, below)
            state = self._state(entry)
            if below is None or not self._same(entry, state, parts, below, target):
                yield Change(b"/" + b"/".join(parts), state)

    def _hidden(
        self, entry: Entry, parts: tuple[bytes, ...], below: os.stat_result | None
    ) -> Iterator[Change]:
        """What the image has in a directory that was removed and made anew."""
        if below is None or not stat.S_ISDIR(below.st_mode) or not parts:
            return
        with _opened(entry) as directory:
            if not _is_opaque(directory):
                return
            kept = _names(directory)
        for name in self._image.names(parts) - kept:
            yield Change(b"/" + entry.path + b"/" + name, None)

    def _state(self, entry: Entry) -> tuple[bytes, ...]:
        """Kind, mode and owner, and what there is of content."""
        status = entry.stat
        kind, fields = _fields(status)
        if kind == b"file":
            fd = open_file(entry)
            try:
                return (*fields, self._content(fd, entry.path))
            finally:
                os.close(fd)
        if kind == b"link":
            return (*fields, os.readlink(entry.name, dir_fd=entry.parent))
        return fields

    def _same(
        self,
        entry: Entry,
        state: tuple[bytes, ...],
        parts: tuple[bytes, ...],
        below: os.stat_result,
        target: bytes | None,
    ) -> bool:
        kind, fields = _fields(below)
        if fields != state[: len(fields)]:
            return False
        if kind == b"link":
            return target == state[-1]
        if kind != b"file":
            return True
        if below.st_size != entry.stat.st_size:
            return False
        fd = self._image.open(parts)
        try:
            return self._content(fd, entry.path) == state[-1]
        finally:
            os.close(fd)

    def _content(self, fd: int, path: bytes) -> bytes:
        """Digest of a file's content; zeros count the same whether they are stored or a hole."""
        size = os.fstat(fd).st_size
        content = hashlib.sha256(b"%d" % size)
        for start, end in _extents(fd, size):
            self._left -= end - start
            if self._left < 0:
                raise FileTooLargeError(f"more than {MOST_BYTES} bytes to read, up to {path!r}")
            for at in range(start, end, _PIECE):
                _feed_blocks(content, at, os.pread(fd, min(_PIECE, end - at), at))
        return content.digest()


def _names(directory: int) -> set[bytes]:
    return {os.fsencode(name) for name in os.listdir(directory)}


def _fields(status: os.stat_result) -> tuple[bytes, tuple[bytes, ...]]:
    kind = _KINDS.get(stat.S_IFMT(status.st_mode), b"device %d" % status.st_rdev)
    owner = b"%o %d %d" % (stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid)
    return kind, (kind, owner)


def _feed_blocks(content: hashlib._Hash, at: int, data: bytes) -> None:
    for offset in range(0, len(data), _BLOCK):
        block = data[offset : offset + _BLOCK]
        if block != _ZEROS[: len(block)]:
            content.update(b"@%d:" % (at + offset))
            content.update(block)


def _extents(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """Where a file has data: whole blocks, so that equal content is cut at the same places."""
    at = 0
    while at < size:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole is left
                return
            raise
        end = min(os.lseek(fd, start, os.SEEK_HOLE), size)
        start -= start % _BLOCK
        at = min(end + -end % _BLOCK, size)
        yield start, at


@contextlib.contextmanager
def _opened(entry: Entry) -> Iterator[int]:
    fd = os.open(entry.name, DIRECTORY, dir_fd=entry.parent)
    try:
        yield fd
    finally:
        os.close(fd)


def _is_opaque(directory: int) -> bool:
    try:
        return os.getxattr(directory, "trusted.overlay.opaque") == b"y"
    except OSError as error:
        if error.errno in (errno.ENODATA, errno.ENOTSUP):
            return False
        raise
