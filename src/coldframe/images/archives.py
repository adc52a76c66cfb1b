"""Open archives: tar, plain or compressed with gzip, bzip2, xz or zstd, as the content says."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import shutil
import subprocess
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Protocol

from coldframe.host.treewalk import Entry, open_file
from coldframe.protocol.errors import CapabilityError, ImageError

_BLOCK = 512
_PIECE = 1 << 16
_XZ_MEMORY = 160 << 20
"""Bytes. `xz -9` needs 65 MiB; zstd holds itself to 128 MiB."""


class Readable(Protocol):
    """A stream of bytes, read once."""

    def read(self, size: int, /) -> bytes:
        """Return up to `size` bytes; none at the end."""


@contextmanager
def open_archive(path: Path) -> Iterator[Readable]:
    """Open an archive, decompressing as its first bytes say.

    Raises:
        ImageError: it cannot be opened, or the decompressor reports damage.
        CapabilityError: it is zstd and there is no zstd program.
    """
    try:
        file = path.open("rb", buffering=0)  # zstd reads the descriptor itself
    except OSError as error:
        raise ImageError(f"{path}: {error.strerror}") from error
    with file, decompressed(file, str(path)) as stream:
        yield stream


@contextmanager
def decompressed(file: IO[bytes], shown: str) -> Iterator[Readable]:
    """Read an open, unbuffered file, decompressing as its first bytes say.

    Raises:
        ImageError: the decompressor reports damage.
        CapabilityError: it is zstd and there is no zstd program.
    """
    magic = file.read(6)
    file.seek(0)
    if magic.startswith(b"\x28\xb5\x2f\xfd"):
        with _zstd(file, shown) as stream:
            yield stream
    elif magic.startswith(b"\x1f\x8b"):
        with gzip.GzipFile(fileobj=file) as stream:
            yield stream
    elif magic.startswith(b"\xfd7zXZ\x00"):
        yield _Xz(file)
    elif magic.startswith(b"BZh"):
        with bz2.BZ2File(file) as stream:
            yield stream
    else:
        yield file


class _Xz:
    """Decompresses xz, of which the first bytes may ask for 4 GiB of memory."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._begin()

    def read(self, size: int, /) -> bytes:
        """Return up to `size` bytes; none at the end.

        Raises:
            EOFError: it is cut short.
            lzma.LZMAError: it is damaged, or needs over `_XZ_MEMORY`.
        """
        while True:
            given = b""
            if self._inner.eof:
                given = self._following()
                if not given:
                    return b""
                self._begin()
            elif self._inner.needs_input:
                given = self._file.read(_PIECE)
                if not given:
                    raise EOFError("cut short")
            found = self._inner.decompress(given, size)
            if found:
                return found

    def _begin(self) -> None:
        self._inner = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY)

    def _following(self) -> bytes:
        """Return the beginning of what follows a stream: another, behind padding, or nothing."""
        found = self._inner.unused_data.lstrip(b"\0")
        while not found and (more := self._file.read(_PIECE)):
            found = more.lstrip(b"\0")
        return found


@contextmanager
def _zstd(file: IO[bytes], shown: str) -> Iterator[IO[bytes]]:
    if shutil.which("zstd") is None:
        raise CapabilityError(f"{shown} is compressed with zstd; run: apt-get install zstd")
    with subprocess.Popen(["zstd", "-dcq"], stdin=file, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield process.stdout
        except BaseException:
            process.kill()
            raise
        if process.wait() != 0:
            raise ImageError(f"{shown}: zstd reports that it is damaged")


class _SeenEnough(Exception):
    """Ends a decompressor that still has something to say."""


def is_archive(entry: Entry) -> bool:
    """Whether a regular file is a tar archive, compressed or not; damage later on is not seen.

    Raises:
        CapabilityError: it is compressed with zstd and there is no zstd program.
    """
    with os.fdopen(open_file(entry), "rb", buffering=0) as file:
        try:
            with decompressed(file, os.fsdecode(entry.path)) as stream:
                head = b""
                while len(head) < _BLOCK and (more := stream.read(_BLOCK - len(head))):
                    head += more
                tarfile.TarInfo.frombuf(head, "utf-8", "surrogateescape")
                raise _SeenEnough
        except _SeenEnough:
            return True
        except CapabilityError:
            raise
        except (ImageError, tarfile.TarError, OSError, EOFError, lzma.LZMAError, zlib.error):
            return False
