"""Stream a sandbox's tree as a pax archive, piece by piece, with bounded memory.

A generator without threads of its own: whoever wants the next piece runs it. Names, ids, modes,
links, hard links and holes are kept; sockets, devices and FIFOs are left out.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
import tarfile
from collections.abc import Generator, Iterator

from coldframe.host import syscalls
from coldframe.host.roottree import RootTree, closing, reopen, require_regular, typed_errors
from coldframe.protocol.errors import FileError, FileTooLargeError
from coldframe.protocol.sparse import Extents, content, data_extents, sparse_headers, sparse_map

_PIECE = 1 << 20
_BLOCK = 512
_HARD_LINK_LIMIT = 1_000_000
_DEPTH_LIMIT = 512
_NAMES_LIMIT = 1_000_000
_STAY = syscalls.RESOLVE_NO_XDEV | syscalls.RESOLVE_NO_SYMLINKS | syscalls.RESOLVE_NO_MAGICLINKS
_LOOK = os.O_PATH | os.O_NOFOLLOW


def tar_pieces(tree: RootTree, path: bytes) -> Generator[bytes, None, None]:
    """Yield the archive of what is below `path` (or of that one file).

    Raises typed file errors; a file that vanishes meanwhile is left out, one that shrinks is
    filled up with zeros, so that the archive stays whole.
    """
    with typed_errors(path), closing(tree.open(path)) as handle:
        archive = _Archive(tree)
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            with closing(reopen(handle, os.O_RDONLY | os.O_DIRECTORY)) as fd:
                yield from _joined(archive.directory(fd))
        else:
            require_regular(os.fstat(handle), path)
            name = path.rstrip(b"/").rpartition(b"/")[2]
            yield from _joined(archive.file(handle, name, os.fstat(handle)))
        yield bytes(2 * _BLOCK)


def _joined(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Gather small blocks into pieces of up to 1 MiB."""
    gathered = bytearray()
    for block in blocks:
        if len(gathered) + len(block) > _PIECE:
            yield bytes(gathered)
            gathered.clear()
        gathered += block
    if gathered:
        yield bytes(gathered)


class _Archive:
    """Knows which inodes it has written, for hard links."""

    def __init__(self, tree: RootTree) -> None:
        self._tree = tree
        self._seen: dict[tuple[int, int], bytes] = {}

    def directory(self, top: int) -> Iterator[bytes]:
        """Yield everything below an open directory, depth first."""
        levels: list[tuple[bytes, int, list[bytes]]] = [(b"", os.dup(top), _names(top))]
        try:
            while levels:
                prefix, fd, names = levels[-1]
                if not names:
                    os.close(fd)
                    levels.pop()
                    continue
                name = names.pop()
                try:
                    handle = syscalls.openat2(fd, name, _LOOK, resolve=_STAY)
                except OSError as error:
                    # Gone meanwhile, or a mount of the sandbox's own (/proc, /dev).
                    if error.errno in {errno.ENOENT, errno.EXDEV}:
                        continue
                    raise
                with closing(handle):
                    status = os.fstat(handle)
                    yield from self._entry(handle, prefix + name, status)
                    if stat.S_ISDIR(status.st_mode):
                        if len(levels) >= _DEPTH_LIMIT:
                            raise FileError(f"the tree is deeper than {_DEPTH_LIMIT} levels")
                        below = reopen(handle, os.O_RDONLY | os.O_DIRECTORY)
                        levels.append((prefix + name + b"/", below, _names(below)))
        finally:
            for _, fd, _ in levels:
                os.close(fd)

    def _entry(self, handle: int, name: bytes, status: os.stat_result) -> Iterator[bytes]:
        if stat.S_ISREG(status.st_mode):
            yield from self.file(handle, name, status)
        elif stat.S_ISDIR(status.st_mode):
            yield self._header(name, status, tarfile.DIRTYPE)
        elif stat.S_ISLNK(status.st_mode):
            target = os.readlink(b"", dir_fd=handle)
            yield self._header(name, status, tarfile.SYMTYPE, link=target)

    def file(self, handle: int, name: bytes, status: os.stat_result) -> Iterator[bytes]:
        """Yield one regular file, or a hard link to where it was written before."""
        if status.st_nlink > 1:
            identity = (status.st_dev, status.st_ino)
            first = self._seen.get(identity)
            if first is not None:
                yield self._header(name, status, tarfile.LNKTYPE, link=first)
                return
            if len(self._seen) >= _HARD_LINK_LIMIT:
                raise FileTooLargeError(f"more than {_HARD_LINK_LIMIT} files with hard links")
            self._seen[identity] = name
        with closing(reopen(handle, os.O_RDONLY)) as fd:
            extents = data_extents(fd, status)
            if extents is None:
                yield self._header(name, status, tarfile.REGTYPE, size=status.st_size)
                yield from content(fd, [(0, status.st_size)])
            else:
                yield from self._sparse(fd, name, status, extents)

    def _sparse(
        self, fd: int, name: bytes, status: os.stat_result, extents: Extents
    ) -> Iterator[bytes]:
        table = sparse_map(status.st_size, extents)
        size = len(table) + sum(length for _, length in extents)
        headers = sparse_headers(os.fsdecode(name), status.st_size)
        yield self._header(name, status, tarfile.REGTYPE, size=size, pax=headers)
        yield table
        yield from content(fd, extents)

    def _header(
        self,
        name: bytes,
        status: os.stat_result,
        kind: bytes,
        *,
        size: int = 0,
        link: bytes = b"",
        pax: dict[str, str] | None = None,
    ) -> bytes:
        member = tarfile.TarInfo(os.fsdecode(name))
        member.type, member.size = kind, size
        member.mode = stat.S_IMODE(status.st_mode)
        member.uid, member.gid = self._tree.own_id(status.st_uid), self._tree.own_id(status.st_gid)
        member.mtime = status.st_mtime_ns // 10**9
        member.linkname = os.fsdecode(link)
        member.pax_headers = pax or {}
        return member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _names(fd: int) -> list[bytes]:
    """Names in a directory, last first, so that popping them sorts."""
    with os.scandir(fd) as entries:
        names = [os.fsencode(entry.name) for entry in itertools.islice(entries, _NAMES_LIMIT + 1)]
    if len(names) > _NAMES_LIMIT:
        raise FileTooLargeError(f"a directory has more than {_NAMES_LIMIT} entries")
    return sorted(names, reverse=True)
