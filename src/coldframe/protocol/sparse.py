"""GNU's sparse format 1.0 of tar, as both sides write it: what is data, without the holes."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence

_PIECE = 1 << 20
_BLOCK = 512
_EXTENT_LIMIT = 100_000

Extents = Sequence[tuple[int, int]]
"""(offset, length) of what is data, in order, in bytes."""


def data_extents(fd: int, status: os.stat_result) -> Extents | None:
    """Return what of an open file is data, or None if there is no hole to speak of."""
    if status.st_blocks * _BLOCK >= status.st_size:
        return None
    extents: list[tuple[int, int]] = []
    at = 0
    while at < status.st_size:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole is left
                break
            raise
        at = min(os.lseek(fd, start, os.SEEK_HOLE), status.st_size)
        if start < at:
            extents.append((start, at - start))
        if len(extents) > _EXTENT_LIMIT:
            return None
    return extents


def content(fd: int, extents: Extents) -> Iterator[bytes]:
    """Yield the data of each extent, padded with zeros where the file has shrunk."""
    written = 0
    for start, length in extents:
        at, end = start, start + length
        while at < end:
            wanted = min(_PIECE, end - at)
            data = os.pread(fd, wanted, at)
            yield data if data else bytes(wanted)
            at += len(data) or wanted
        written += length
    yield bytes(-written % _BLOCK)


def sparse_map(size: int, extents: Extents) -> bytes:
    """Return the map that goes before the data of a sparse member.

    Args:
        size: of the file, holes included, in bytes.
        extents: what of it is data.
    """
    # A map ends with the file's end, as an empty extent if a hole is last.
    listed = [*extents, (size, 0)]
    lines = [len(listed), *(number for extent in listed for number in extent)]
    table = b"".join(b"%d\n" % number for number in lines)
    return table + bytes(-len(table) % _BLOCK)


def sparse_headers(name: str, size: int) -> dict[str, str]:
    """Return the pax headers of a sparse member; its own size is that of map and data."""
    return {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": name,
        "GNU.sparse.realsize": str(size),
    }
