"""Read a stream that the spawner keeps in a spool file: head, then a ring (docs/protocol.md)."""

from __future__ import annotations

import os

from coldframe.host import wire


def read_spool(fd: int, spool_bytes: int, start: int, end: int) -> bytes:
    """Return the stream's bytes [start, end) as the file has them now.

    Shorter if the file is. Whether the ring has been overwritten is for the caller to see.
    """
    pieces = []
    for offset, size in wire.spool_pieces(spool_bytes, start, end):
        data = os.pread(fd, size, offset)
        pieces.append(data)
        if len(data) < size:
            break
    return b"".join(pieces)


def first_kept(spool_bytes: int, total: int, cursor: int) -> int:
    """The first offset from `cursor` on that is still in the spool of a stream of `total`."""
    if cursor < spool_bytes // 2:
        return cursor
    return max(cursor, wire.spool_oldest(spool_bytes, total))


def window_ends(total: int, window: int, spool_bytes: int) -> tuple[int, int]:
    """Return where the head ends and where the tail begins in a window of a stream.

    Half each, as far as the spool has them; equal if nothing is left out.
    """
    if total <= window and total <= spool_bytes:
        return total, total
    head = min(window // 2, spool_bytes // 2)
    tail = min(window - window // 2, spool_bytes - spool_bytes // 2)
    return head, max(head, total - tail)
