"""Comparing an upper with the layers below it, both as deep as somebody likes."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from coldframe.host.patience import Patience
from coldframe.host.treewalk import DIRECTORY
from coldframe.protocol.errors import FileError, FileTooLargeError, NotKnownError
from coldframe.runtimes import image_changes
from coldframe.runtimes.image_below import ImageBelow
from coldframe.runtimes.image_changes import State, at_rest, digest_changes
from tests.fixtures.runtime import changes_of


def chain(root: Path, depth: int, content: dict[int, str], others: str = "same") -> None:
    """Directories `d` in each other, each with a file that is walked on the way up."""
    root.mkdir()
    at = root
    for level in range(depth):
        (at / "e").write_text(content.get(level, others))
        at /= "d"
        at.mkdir()


def changes(upper: Path, *layers: Path) -> dict[bytes, State | None]:
    fd = os.open(upper, DIRECTORY)
    try:
        return changes_of(fd, layers, 60)
    finally:
        os.close(fd)


def digest(upper: Path, *layers: Path, limit_s: float = 60) -> str:
    fd = os.open(upper, DIRECTORY)
    try:
        return digest_changes(fd, layers, Patience(limit_s), b"")
    finally:
        os.close(fd)


def test_deep_image_is_compared_on_the_way_down_and_up(tmp_path: Path) -> None:
    """Only some levels of the image stay open; the others are opened again."""
    depth = 300
    chain(tmp_path / "top", depth // 3, {5: "top"})
    chain(tmp_path / "base", depth, {})
    chain(tmp_path / "upper", depth + 50, {5: "top", 7: "x", 180: "x", 290: "x"})
    before = len(list(Path("/proc/self/fd").iterdir()))

    found = changes(tmp_path / "upper", tmp_path / "top", tmp_path / "base")

    def at(level: int) -> bytes:
        return b"/" + b"d/" * level

    assert found.keys() == {
        *(at(level) + b"e" for level in (7, 180, 290, *range(300, 350))),
        *(at(level) + b"d" for level in range(300, 350)),
    }
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_digest_tells_where_a_change_is(tmp_path: Path) -> None:
    """The same change elsewhere is another state; so is one name more on the way."""
    (tmp_path / "base").mkdir()
    digests = set()
    for number, places in enumerate(
        (("a/x",), ("b/x",), ("a/b/x",), ("a/x", "b"), ("a/x", "a/b"), ("a/b/x", "a/c/x"), ())
    ):
        upper = tmp_path / str(number)
        upper.mkdir()
        for place in places:
            (upper / place).parent.mkdir(parents=True, exist_ok=True)
            (upper / place).touch()
        digests.add(digest(upper, tmp_path / "base"))

    assert len(digests) == 7
    again = tmp_path / "again"
    (again / "a").mkdir(parents=True)
    (again / "a/x").touch()
    assert digest(again, tmp_path / "base") == digest(tmp_path / "0", tmp_path / "base")


def test_look_has_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of time and of names; whoever asks is told, and the host keeps its memory."""
    (tmp_path / "base").mkdir()
    chain(tmp_path / "upper", 20, {})
    with pytest.raises(NotKnownError, match="within 0 s"):
        digest(tmp_path / "upper", tmp_path / "base", limit_s=0)
    monkeypatch.setattr(image_changes, "MOST_NAMES", 15)
    with pytest.raises(FileTooLargeError, match="too many names"):
        digest(tmp_path / "upper", tmp_path / "base")


def test_what_cannot_be_read_is_not_called_changing(tmp_path: Path) -> None:
    """Who reads that files kept changing looks for a program that does it, not at the disk."""
    looks = 0

    def look(_: ImageBelow) -> None:
        nonlocal looks
        looks += 1
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(FileError, match="cannot be read"):
        at_rest([tmp_path], look)
    assert looks == 1
