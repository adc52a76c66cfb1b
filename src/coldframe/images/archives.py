"""Tell whether a file of a build context is an archive, and unpack it: what ADD does.

By content alone, as Docker does: tar, plain or compressed with gzip, bzip2, xz or zstd.
"""

from __future__ import annotations

import lzma
import os
import tarfile
import zlib
from pathlib import Path

from coldframe.host.treewalk import Entry, open_file
from coldframe.images.unpack import decompressed, unpack_tar
from coldframe.protocol.errors import CapabilityError, ImageError

_BLOCK = 512


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


def open_unpacked(entry: Entry, tree: Path, shown: str) -> None:
    """Unpack an archive into an empty directory. Raises ImageError, StorageFullError."""
    with (
        os.fdopen(open_file(entry), "rb", buffering=0) as file,
        decompressed(file, shown) as stream,
    ):
        unpack_tar(stream, tree, shown)
