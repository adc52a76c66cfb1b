"""Take out of a step's layer what the builder put there: the image keeps none of it."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from secrets import token_hex

from coldframe.host.treewalk import DIRECTORY, Entry
from coldframe.images.digest import layer_xattrs
from coldframe.images.trees import remove_tree
from coldframe.images.view import MergedView

RESOLV = "/etc/resolv.conf"
_RESOLV_PARTS = (b"etc", b"resolv.conf")
_MOST_RESOLV = 1 << 16


def drop(tree: Path, parts: tuple[bytes, ...], below: MergedView) -> None:
    """Remove one path from a layer, and the directories above it that then say nothing.

    A path that the step has put out of reach (by a link, say) is left: it is its own.
    """
    trash = tree.with_name(f"dropped-{token_hex(6)}")
    with ExitStack() as stack:
        levels = [os.open(tree, DIRECTORY)]
        stack.callback(os.close, levels[0])
        try:
            for part in parts[:-1]:
                levels.append(os.open(part, DIRECTORY, dir_fd=levels[-1]))
                stack.callback(os.close, levels[-1])
            os.rename(parts[-1], trash, src_dir_fd=levels[-1])
        except (FileNotFoundError, NotADirectoryError):
            return
        remove_tree(trash)
        for depth in range(len(parts) - 1, 0, -1):
            if not _says_nothing(levels[depth], parts[:depth], levels[depth - 1], below):
                return
            os.rmdir(parts[depth - 1], dir_fd=levels[depth - 1])


def has_resolver(roots: Sequence[Path]) -> bool:
    """Whether there is a file that a network policy can write; a link may lead nowhere."""
    status, _ = MergedView(roots).look(_RESOLV_PARTS)
    return status is not None and stat.S_ISREG(status.st_mode)


def drop_unchanged_resolver(tree: Path, seen: Sequence[Path], below: Sequence[Path]) -> None:
    """Remove the resolver's file if it holds what it did before the step.

    A network policy writes it for the time that it is in force and puts it back.

    Args:
        seen: what the step had below its own layer, top first.
        below: the same without what the image does not keep.
    """
    if not has_resolver([tree]) or not has_resolver(seen):
        return
    written, before = MergedView([tree]), MergedView(seen)
    status, _ = written.look(_RESOLV_PARTS)
    if status is None or status.st_size > _MOST_RESOLV:
        return
    if written.read(b"/".join(_RESOLV_PARTS)) == before.read(b"/".join(_RESOLV_PARTS)):
        drop(tree, _RESOLV_PARTS, MergedView(below))


def _says_nothing(fd: int, parts: tuple[bytes, ...], parent: int, below: MergedView) -> bool:
    """Whether an empty directory of a layer is as the image below has it, or has it not."""
    if os.listdir(fd):
        return False
    status = os.fstat(fd)
    known, _ = below.look(parts)
    if known is None:
        return True
    if any(layer_xattrs(Entry(parent, parts[-1], b"", status))):
        return False
    return stat.S_ISDIR(known.st_mode) and _own(known) == _own(status)


def _own(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_mode, status.st_uid, status.st_gid
