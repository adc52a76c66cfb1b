"""Read GNU tar's maps of sparse files, in each of their forms: which parts of a file are data."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Callable, Iterator, Sequence

from coldframe.protocol.sparse import Extents

BLOCK = 512
MAX_EXTENTS = 1 << 18
"""Parts of one file that are read."""
_MAX_NUMBER = (1 << 63) - 1
_DECIMAL = re.compile(rb"[0-9]{1,19}")
_OCTAL = re.compile(rb"[0-7]{0,12}")
_ENTRY = 24


class DamagedArchiveError(tarfile.ReadError):
    """What is read is no archive, is cut short or damaged, or leaves the bounds."""


def number(value: bytes | int, what: str) -> int:
    """Return a number that is stated in decimal digits, or was read: from 0 to 2^63 - 1.

    Raises DamagedArchiveError.
    """
    if isinstance(value, bytes):
        value = int(value) if _DECIMAL.fullmatch(value) else -1
    if not 0 <= value <= _MAX_NUMBER:
        raise DamagedArchiveError(f"damaged: a {what} that is none")
    return value


def is_leading(values: dict[str, bytes]) -> bool:
    """Whether the map stands before the data (version 1.0)."""
    return (values.get("GNU.sparse.major"), values.get("GNU.sparse.minor")) == (b"1", b"0")


def old(block: bytes, next_block: Callable[[], bytes]) -> tuple[Extents, int]:
    """Return map and file size in GNU's first form: in the header, and in blocks behind it.

    Raises DamagedArchiveError, as all here do.
    """
    size = _field(block[483:495])
    parts = list(_entries(block[386:482]))
    more = block[482]
    while more:
        block = next_block()
        parts += _entries(block[:504])
        _require_few(len(parts))
        more = block[504]
    return parts, size


def leading(next_block: Callable[[], bytes], stored: int) -> Extents:
    """Return a map of version 1.0: decimal numbers, a line each, in blocks before the data."""
    lines: list[bytes] = []
    begun = b""
    wanted = 1
    while len(lines) < wanted:
        stored -= BLOCK
        if stored < 0 or len(begun) > BLOCK:
            raise DamagedArchiveError("damaged: a sparse map without an end")
        *whole, begun = (begun + next_block()).split(b"\n")
        if whole and not lines:
            wanted = 1 + 2 * _require_few(number(whole[0], "sparse map"))
        lines += whole
    return _pairs(lines[1:wanted])


def stated(records: Sequence[tuple[str, bytes]]) -> Extents:
    """Return a map that pax headers state: version 0.1, in one list, or 0.0, a record each."""
    listed = dict(records).get("GNU.sparse.map")
    if listed is not None:
        return _pairs(listed.split(b",")) if listed else []
    halves = ("GNU.sparse.offset", "GNU.sparse.numbytes")
    return _pairs([value for keyword, value in records if keyword in halves])


def require_fit(extents: Extents, size: int, stored: int) -> None:
    """Refuse a map that is out of order, or says more than there is."""
    end = 0
    for offset, length in extents:
        if offset < end:
            raise DamagedArchiveError("damaged: a sparse map out of order")
        end = offset + length
    if end > size or sum(length for _, length in extents) > stored:
        raise DamagedArchiveError("damaged: a sparse map that does not fit its size")


def _pairs(values: Sequence[bytes]) -> list[tuple[int, int]]:
    _require_few(len(values) // 2)
    if len(values) % 2:
        raise DamagedArchiveError("damaged: a sparse map with half a part")
    numbers = [number(value, "sparse map") for value in values]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def _entries(raw: bytes) -> Iterator[tuple[int, int]]:
    for at in range(0, len(raw), _ENTRY):
        offset, length = raw[at : at + 12], raw[at + 12 : at + _ENTRY]
        if not length[0]:
            break
        yield _field(offset), _field(length)


def _field(raw: bytes) -> int:
    """Return a number of a fixed header: octal digits, or binary where they do not suffice."""
    if raw[0] == 0x80:
        return number(int.from_bytes(raw[1:], "big"), "sparse map")
    digits = raw.partition(b"\0")[0].strip(b" ")
    if not _OCTAL.fullmatch(digits):
        raise DamagedArchiveError("damaged: a sparse map that is none")
    return int(digits or b"0", 8)


def _require_few(count: int) -> int:
    if count > MAX_EXTENTS:
        raise DamagedArchiveError(f"a sparse file of {count} parts; at most {MAX_EXTENTS} are read")
    return count
