"""Bring what a sandbox holds onto this machine, where nothing of it may lead out of its place.

Unpacked is into an empty directory beside the target, by the SDK's own rules; members that must
not be unpacked are left out and told. Then each entry takes the place of what was there.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import stat
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from coldframe.protocol.errors import PathRefusedError
from coldframe.protocol.models import FileKind
from coldframe.protocol.text import excerpt
from coldframe.rollouts.scratch import scratch

if TYPE_CHECKING:
    from coldframe.client import AsyncSandbox

LeftOut = Callable[[str, bool], bool]
"""Whether an entry is left out: its path below the directory, and whether it is a directory."""


def keep_all(_path: str, _directory: bool) -> bool:
    """Leave nothing out."""
    return False


def excluded(patterns: Iterable[str]) -> LeftOut:
    """Leave out what `tar --exclude` would: patterns match at any directory's beginning."""
    clean = [pattern.removeprefix("./").rstrip("/") for pattern in patterns]

    def left_out(path: str, _directory: bool) -> bool:
        parts = path.split("/")
        tails = ["/".join(parts[start:]) for start in range(len(parts))]
        return any(fnmatch(tail, pattern) for tail in tails for pattern in clean)

    return left_out


def selected(
    include: Iterable[str] | None, exclude: Iterable[str] | None, protect: Iterable[str] | None
) -> LeftOut:
    """Leave out files by Harbor's globs: `exclude` wins over `include`, `protect` over both."""
    wanted, unwanted, kept = tuple(include or ()), tuple(exclude or ()), frozenset(protect or ())

    def left_out(path: str, directory: bool) -> bool:
        if directory or path in kept:
            return False
        if any(fnmatch(path, pattern) for pattern in unwanted):
            return True
        return bool(wanted) and not any(fnmatch(path, pattern) for pattern in wanted)

    return left_out


async def download(
    sandbox: AsyncSandbox,
    source: str,
    target: Path,
    logger: logging.Logger,
    left_out: LeftOut = keep_all,
) -> None:
    """Copy the tree below `source` over a local directory, which is made if it is missing.

    Raises:
        PathNotFoundError and other FileErrors: `source` cannot be read.
        FileTooLargeError: it holds more than the SDK unpacks.
    """
    await asyncio.to_thread(target.mkdir, parents=True, exist_ok=True)
    async with _fetched(sandbox, source, target.parent, logger) as fresh:
        await asyncio.to_thread(_merge, fresh, target, "", left_out)


async def download_file(
    sandbox: AsyncSandbox, source: str, target: Path, logger: logging.Logger
) -> None:
    """Copy one regular file over a local one, whose directory is made if it is missing.

    Raises:
        PathRefusedError: `source` is no regular file.
        PathNotFoundError and other FileErrors: it cannot be read.
    """
    refused = PathRefusedError(f"{excerpt(source)} is no regular file")
    if (await sandbox.files.stat(source)).kind is not FileKind.FILE:
        raise refused
    await asyncio.to_thread(target.parent.mkdir, parents=True, exist_ok=True)
    async with _fetched(sandbox, source, target.parent, logger) as fresh:
        found = fresh / source.rpartition("/")[2]
        # It may have become a directory since, with a link of that name in it.
        if found.is_symlink() or not found.is_file():
            raise refused
        found.replace(target)


@asynccontextmanager
async def _fetched(
    sandbox: AsyncSandbox, source: str, beside: Path, logger: logging.Logger
) -> AsyncIterator[Path]:
    """Give a directory with what is below `source`, on the file system of `beside`."""
    with scratch(beside) as spool:
        fresh = spool / "tree"
        await sandbox.files.download_tree(
            source, fresh, on_refused=lambda why: logger.warning("%s: left out: %s", source, why)
        )
        yield fresh


def _merge(fresh: Path, target: Path, below: str, left_out: LeftOut) -> None:
    """Move what is in one directory into another; neither's links are followed."""
    with os.scandir(fresh) as entries:
        found = list(entries)
    for entry in found:
        path, directory = below + entry.name, entry.is_dir(follow_symlinks=False)
        if left_out(path, directory):
            continue
        place = target / entry.name
        if directory:
            if not _is_directory(place):
                place.unlink(missing_ok=True)
                place.mkdir()
            _merge(Path(entry.path), place, f"{path}/", left_out)
            shutil.copystat(entry.path, place)
        else:
            if _is_directory(place):
                shutil.rmtree(place)
            Path(entry.path).replace(place)


def _is_directory(path: Path) -> bool:
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except FileNotFoundError:
        return False
