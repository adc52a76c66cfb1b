"""What a sandbox has changed of its image, by comparing its upper with the layers below it.

State, not history: a file that was written back as it was is no change. Costs what was written,
not what the image holds, and no more for what lies deep. The upper is hostile and may change
meanwhile: it is walked by descriptors, no link is followed, and only regular files are opened.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from coldframe.host.patience import Patience
from coldframe.host.treewalk import DIRECTORY, Entry, names_of, open_file, walk
from coldframe.images.digest import is_whiteout
from coldframe.protocol.errors import FileError, FileTooLargeError, ImageError
from coldframe.protocol.text import excerpt
from coldframe.runtimes.image_below import ImageBelow

T = TypeVar("T")

MOST_BYTES = 64 << 30
"""Content that is read for one look; holes are not read."""
MOST_NAMES = 1_000_000
"""Names that are held at once: those of a directory, and of the ones above that wait."""

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

State = tuple[bytes, ...]
"""Kind, mode and owner, then a digest of the content or a link's target."""


def digest_changes(upper: int, layers: Sequence[Path], patience: Patience, seed: bytes) -> str:
    """Return a digest of the seed and of all that differs from the layers (top first).

    Memory does not grow with depth, nor with the number of changes. Blocks; run it in a thread.

    Raises:
        NotKnownError: it took longer than there was patience.
        FileTooLargeError: more than MOST_BYTES of content, or than MOST_NAMES.
        FileError: it kept changing, or cannot be read.
    """

    def look(image: ImageBelow) -> str:
        one = Look(upper, image, patience)
        whole = hashlib.sha256(seed)
        told = 0  # how many names of the way to here have been fed
        for name, state in one.changes():
            way = image.names
            told = min(told, one.lowest)
            one.lowest = len(way)
            for depth in range(told, len(way)):
                _feed(whole, (b"in", b"%d" % depth, way[depth]))
            told = len(way)
            _feed(whole, (b"at", b"%d" % told, name, *(state or (b"removed",))))
        return whole.hexdigest()

    return at_rest(layers, look)


def at_rest(layers: Sequence[Path], look: Callable[[ImageBelow], T]) -> T:
    """Look until nothing has changed under the look.

    Raises FileError: it kept changing, or something cannot be read.
    """
    failure: Exception | None = None
    for _ in range(_TRIES):
        with contextlib.closing(ImageBelow(layers)) as image:
            try:
                return look(image)
            except (ImageError, OSError) as error:
                if isinstance(error, OSError) and error.errno == errno.EIO:
                    raise FileError(
                        "something in the sandbox cannot be read, so its state is not known: the "
                        f"disk below it was full, or is damaged ({error})"
                    ) from error
                failure = error
    raise FileError(f"the sandbox's files kept changing: {failure}") from failure


def _feed(whole: hashlib._Hash, fields: tuple[bytes, ...]) -> None:
    whole.update(b"".join(b"%d:%s" % (len(field), field) for field in fields) + b"\n")


class Look:
    """One pass over an upper."""

    def __init__(self, upper: int, image: ImageBelow, patience: Patience) -> None:
        """`upper` is a descriptor of its directory, not taken over; `image` lies below it."""
        self._upper, self.image, self._patience = upper, image, patience
        self._left = MOST_BYTES
        self.lowest = 0
        """The least depth at which it has stood since somebody set this."""

    def changes(self) -> Iterator[tuple[bytes, State | None]]:
        """Yield name and state of what differs where `image` stands; the root has no name."""
        last = b""
        for entry in walk(self._upper, MOST_NAMES):
            self._patience.check()
            if entry.depth == 0:
                yield from self._compare(b"", entry, self.image.root_stat(), None)
                continue
            if entry.depth - 1 > self.image.depth:
                self.image.enter(last)
            else:
                self.image.leave_to(entry.depth - 1)
                self.lowest = min(self.lowest, entry.depth - 1)
            last = entry.name
            below, target = self.image.look_at(entry.name)
            if is_whiteout(entry.stat):
                if below is not None:
                    yield entry.name, None
                continue
            if stat.S_ISDIR(entry.stat.st_mode):
                yield from self._hidden(entry, below)
            yield from self._compare(entry.name, entry, below, target)

    def _compare(
        self, name: bytes, entry: Entry, below: os.stat_result | None, target: bytes | None
    ) -> Iterator[tuple[bytes, State | None]]:
        state = self._state(entry)
        if below is None or not self._same(entry, state, below, target):
            yield name, state

    def _hidden(
        self, entry: Entry, below: os.stat_result | None
    ) -> Iterator[tuple[bytes, State | None]]:
        """What the image has in a directory that was removed and made anew."""
        if below is None or not stat.S_ISDIR(below.st_mode):
            return
        with opened(entry) as directory:
            if not is_opaque(directory):
                return
            kept = set(names_of(directory))
        for name in sorted(self.image.names_in(entry.name) - kept):
            yield entry.name + b"/" + name, None

    def _state(self, entry: Entry) -> State:
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
        state: State,
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
        fd = self.image.open(entry.name)
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
                raise FileTooLargeError(
                    f"more than {MOST_BYTES} bytes to read, up to {excerpt(path)}"
                )
            for at in range(start, end, _PIECE):
                self._patience.check()
                _feed_blocks(content, at, os.pread(fd, min(_PIECE, end - at), at))
        return content.digest()


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
def opened(entry: Entry) -> Iterator[int]:
    """Open a directory of a walk until the end of the block."""
    fd = os.open(entry.name, DIRECTORY, dir_fd=entry.parent)
    try:
        yield fd
    finally:
        os.close(fd)


def is_opaque(directory: int) -> bool:
    """Whether a directory of an upper hides what the image has there."""
    try:
        return os.getxattr(directory, "trusted.overlay.opaque") == b"y"
    except OSError as error:
        if error.errno in (errno.ENODATA, errno.ENOTSUP):
            return False
        raise
