"""Build contexts that come as archives from elsewhere: unpacked as hostile, and gone afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from coldframe.images.store import ImageStore
from coldframe.images.unpack import unpack_tar
from coldframe.protocol.errors import FileTooLargeError, InvalidRequestError

MOST_BYTES = 4 << 30
"""Of an archive."""


@asynccontextmanager
async def unpacked(store: ImageStore, archive: AsyncIterator[bytes]) -> AsyncIterator[Path]:
    """Unpack a tar archive into a directory that is there for a block.

    Raises:
        ImageError: it is none, is damaged, or has members that would leave the directory.
        FileTooLargeError: it has more than 4 GiB.
        StorageFullError: no space is left.
    """
    with store.workspace() as work:
        spooled, tree = work / "context.tar", work / "context"
        size = 0
        with await asyncio.to_thread(spooled.open, "wb") as file:
            async for piece in archive:
                size += len(piece)
                if size > MOST_BYTES:
                    raise FileTooLargeError(f"a build context has at most {MOST_BYTES} bytes")
                await asyncio.to_thread(file.write, piece)
        tree.mkdir()
        tree = tree.resolve()
        await asyncio.to_thread(_unpack, spooled, tree)
        yield tree


def within(context: Path, name: str) -> Path:
    """Return a file of a context by its name, whatever links it is reached by.

    Raises:
        InvalidRequestError: it is not in the context.
    """
    if "\0" in name:
        raise InvalidRequestError("dockerfile: a name has no NUL")
    path = (context / name).resolve()
    if not path.is_relative_to(context):
        raise InvalidRequestError(f"dockerfile {name[:200]!r} leads out of the build context")
    return path


def _unpack(spooled: Path, tree: Path) -> None:
    with spooled.open("rb") as file:
        unpack_tar(file, tree, "the build context")
    spooled.unlink()
