"""Read tar archives that nobody vouches for, member by member, within bounds of our own.

Only the fixed header is left to `tarfile`, by its documented `TarInfo.frombuf`. What its reader
makes of the rest differs between patch releases of Python: loops without an end, searches in
quadratic time under the interpreter's lock, maps without a bound, damage that counts as the end.
Why not by subclassing it: docs/adr/0069-tar-headers-are-read-here.md
"""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Callable, Iterator

from coldframe.protocol import sparse_maps
from coldframe.protocol.pieces import PIECE_BYTES
from coldframe.protocol.sparse import Extents
from coldframe.protocol.sparse_maps import BLOCK, DamagedArchiveError, number
from coldframe.protocol.text import excerpt

MAX_HEADERS = 1 << 20
"""Bytes of extended headers, long names and links before one member."""
_MAX_TIME = 1 << 33
_PAX = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
_LONG = {tarfile.GNUTYPE_LONGNAME: "path", tarfile.GNUTYPE_LONGLINK: "linkpath"}
_GLOBAL = ("uid", "gid", "mtime")
_NEVER_GLOBAL = ("path", "linkpath", "size", "GNU.sparse.", "SCHILY.xattr.")
_TIME = re.compile(rb"-?[0-9]{1,19}(\.[0-9]{0,19})?")


class TarReader:
    """The members of an archive that is read once, front to back.

    Every method raises DamagedArchiveError, and whatever `read` raises.
    """

    def __init__(self, read: Callable[[int], bytes]) -> None:
        """`read` gives bytes, about so many; none at the end."""
        self._read = read
        self._held, self._at = b"", 0
        self._global: dict[str, bytes] = {}
        self._left = 0  # stored bytes of the member that nobody has taken yet, padding included
        self._offset = 0
        self.start = 0
        """Where the first header of the member begins, in bytes from the archive's begin."""
        self.extents: Extents | None = None
        """(offset, length) of what is data in the member's file; None: all of it."""

    def __iter__(self) -> Iterator[tarfile.TarInfo]:
        """Yield each member: `size` is the file's, and names have surrogates for odd bytes."""
        while (member := self._next()) is not None:
            yield member

    @property
    def end(self) -> int:
        """Where what is stored of the member ends."""
        return self._offset + self._left

    def content(self, member: tarfile.TarInfo) -> Iterator[tuple[int, bytes]]:
        """Yield (offset in its file, data) of the member that was yielded last, without holes."""
        for start, length in [(0, member.size)] if self.extents is None else self.extents:
            at, end = start, start + length
            while at < end:
                data = self._take(min(PIECE_BYTES, end - at))
                self._left -= len(data)
                yield at, data
                at += len(data)

    def write(self, member: tarfile.TarInfo, fd: int) -> None:
        """Write the content of the member that was yielded last to an empty file, with its holes.

        Raises OSError, too.
        """
        for at, data in self.content(member):
            done = 0
            while done < len(data):
                done += os.pwrite(fd, memoryview(data)[done:], at + done)
        os.ftruncate(fd, member.size)

    def _next(self) -> tarfile.TarInfo | None:
        while self._left:
            self._left -= len(self._take(self._left))
        self.start = self._offset
        stated: list[tuple[str, bytes]] = []
        spent = 0
        while True:
            block = self._exactly(BLOCK)
            if block.count(0) == BLOCK:
                if spent:
                    raise DamagedArchiveError("damaged: a header without its member")
                while self._read(PIECE_BYTES):
                    pass  # who sends it, or unpacks it and checks sums, goes on to its end
                return None
            member = _fixed_header(block)
            kind = member.type
            if kind not in (*_PAX, *_LONG, tarfile.XGLTYPE):
                break
            spent += BLOCK + _padded(member.size)
            if spent > MAX_HEADERS:
                raise DamagedArchiveError(
                    f"a header of {spent} bytes; at most {MAX_HEADERS} are read"
                )
            payload = self._exactly(_padded(member.size))[: member.size]
            if kind in _LONG:
                stated.append((_LONG[kind], payload.partition(b"\0")[0]))
            elif kind in _PAX:
                stated += _records(payload)
            else:
                self._global |= _global(payload)
        self._complete(member, block, stated)
        return member

    def _complete(
        self, member: tarfile.TarInfo, block: bytes, stated: list[tuple[str, bytes]]
    ) -> None:
        """Give a member what its extended headers state, and find its content."""
        values = {
            keyword: value for keyword, value in (self._global | dict(stated)).items() if value
        }
        _name(member, values, is_old=block[156:157] == tarfile.AREGTYPE)
        member.uid = number(values.get("uid", member.uid), "uid")
        member.gid = number(values.get("gid", member.gid), "gid")
        member.mtime = _time(values.get("mtime", member.mtime))
        member.size = number(values.get("size", member.size), "size")
        member.pax_headers = {keyword: _text(value) for keyword, value in values.items()}
        self.extents = None
        self._left = 0
        if member.isreg():
            self._find_content(member, block, stated, values)
        elif member.type not in tarfile.SUPPORTED_TYPES:
            self._left = _padded(member.size)

    def _find_content(
        self,
        member: tarfile.TarInfo,
        block: bytes,
        stated: list[tuple[str, bytes]],
        values: dict[str, bytes],
    ) -> None:
        stored = member.size
        if member.type == tarfile.GNUTYPE_SPARSE:
            self.extents, member.size = sparse_maps.old(block, lambda: self._exactly(BLOCK))
        elif sparse_maps.is_leading(values):
            begun = self._offset
            self.extents = sparse_maps.leading(lambda: self._exactly(BLOCK), stored)
            stored -= self._offset - begun
            member.size = number(values.get("GNU.sparse.realsize", stored), "GNU.sparse.realsize")
        elif "GNU.sparse.size" in values:
            self.extents = sparse_maps.stated(stated)
            member.size = number(values["GNU.sparse.size"], "GNU.sparse.size")
        self._left = _padded(stored)
        if self.extents is not None:
            sparse_maps.require_fit(self.extents, member.size, stored)

    def _take(self, most: int) -> bytes:
        """Return up to so many bytes, one at least."""
        if self._at == len(self._held):
            self._held, self._at = self._read(PIECE_BYTES), 0
            if not self._held:
                raise DamagedArchiveError("the archive is cut short")
        data = self._held[self._at : self._at + most]
        self._at += len(data)
        self._offset += len(data)
        return data

    def _exactly(self, size: int) -> bytes:
        parts = []
        while size:
            parts.append(self._take(size))
            size -= len(parts[-1])
        return b"".join(parts)


def leads_out(target: str, depth: int) -> bool:
    """Whether a link that lies `depth` directories deep may lead out of its tree.

    It stays inside only if its `..` parts come first: each one after a name may climb out once
    that name is a link.
    """
    parts = [part for part in target.split("/") if part not in {"", "."}]
    ups = 0
    while ups < len(parts) and parts[ups] == "..":
        ups += 1
    return target.startswith("/") or ups > depth or ".." in parts[ups:]


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _fixed_header(block: bytes) -> tarfile.TarInfo:
    try:
        member = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.TarError as error:
        raise DamagedArchiveError(f"no tar archive, or damaged: {error}") from error
    number(member.size, "size")
    return member


def _records(payload: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield what a pax header states: `LENGTH KEYWORD=VALUE`, a newline after each."""
    at = 0
    while at < len(payload) and payload[at]:
        space = payload.find(b" ", at, at + 20)
        end = at + number(payload[at : max(space, at)], "header")
        keyword, equals, value = payload[space + 1 : end - 1].partition(b"=")
        if not (keyword and equals) or payload[end - 1 : end] != b"\n":
            raise DamagedArchiveError("damaged: an extended header out of form")
        yield _text(keyword), value
        at = end


def _global(payload: bytes) -> dict[str, bytes]:
    """Return what a global header states and may; comments and the like mean nothing here."""
    stated = dict(_records(payload))
    for keyword in stated:
        if keyword.startswith(_NEVER_GLOBAL):
            raise DamagedArchiveError(f"a global header states {excerpt(keyword)}")
    return {keyword: value for keyword, value in stated.items() if keyword in _GLOBAL}


def _name(member: tarfile.TarInfo, values: dict[str, bytes], *, is_old: bool) -> None:
    path = values.get("GNU.sparse.name", values.get("path"))
    if path is not None:
        member.name = _text(path.rstrip(b"/") or b"/")
        if is_old:  # before there was a kind of its own, the slash told a directory
            member.type = tarfile.DIRTYPE if path.endswith(b"/") else tarfile.AREGTYPE
    if "linkpath" in values:
        member.linkname = _text(values["linkpath"])
    if "\0" in member.name or "\0" in member.linkname:
        raise DamagedArchiveError(f"damaged: a NUL in the name {excerpt(member.name)}")


def _time(value: bytes | float) -> float:
    if isinstance(value, bytes):
        if not _TIME.fullmatch(value):
            raise DamagedArchiveError("damaged: a time that is none")
        value = float(value)
    return max(-_MAX_TIME, min(value, _MAX_TIME))
