"""Walking and removing trees that were written by others."""

from __future__ import annotations

import gc
import os
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from coldframe.host.treewalk import walk
from coldframe.images.trees import remove_tree


def _dig(root: Path, depth: int, name: str = "d" * 50) -> None:
    """Make a chain of directories far deeper than any path may be long."""
    fd = os.open(root, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=fd)
        below = os.open(name, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(os.open("leaf", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
    os.close(fd)


@pytest.fixture
def deep_tree(tmp_path: Path) -> Iterator[Path]:
    """A tree of 3,000 levels, removed by our own means: pytest's dies on it."""
    tree = tmp_path / "tree"
    tree.mkdir()
    try:
        _dig(tree, 3000)
        yield tree
    finally:
        remove_tree(tree)


def test_remove_tree_deeper_than_paths_and_stacks_leaves_nothing(deep_tree: Path) -> None:
    """Agents make such trees; a recursive removal dies on them and leaks the disk."""
    remove_tree(deep_tree)

    assert not deep_tree.exists()


def test_remove_tree_with_links_out_leaves_their_targets(tmp_path: Path) -> None:
    """Following one link would delete files of the host."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("x")
    tree = tmp_path / "tree"
    (tree / "a").mkdir(parents=True)
    (tree / "a" / "out").symlink_to(outside)
    (tree / "out").symlink_to(outside)

    remove_tree(tree)

    assert (outside / "kept").read_text() == "x"
    assert not tree.exists()


def test_remove_tree_of_more_directories_than_one_look_notes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a million directories side by side were taken for a tree that somebody fills."""
    monkeypatch.setattr("coldframe.host.removal._PASSES", 8)
    tree = tmp_path / "tree"
    for number in range(6000):
        (tree / str(number)).mkdir(parents=True)

    remove_tree(tree)

    assert not tree.exists()


def test_remove_tree_of_nothing_is_fine(tmp_path: Path) -> None:
    """Two processes may collect the same garbage."""
    remove_tree(tmp_path / "nothing")


def test_walk_of_a_deep_tree_holds_its_names_only(deep_tree: Path) -> None:
    """The path of every level at once is quadratic: 225 MB for 3,000 levels."""
    tracemalloc.start()
    try:
        entries = sum(1 for entry in walk(deep_tree) if entry.path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert entries == 3002
    assert peak < 8 << 20


def test_walk_yields_every_entry_once_in_order_of_bytes(tmp_path: Path) -> None:
    """The digest depends on the order; names that are not UTF-8 are names too."""
    for name in (b"b", b"a", b"\xff", b"new\nline"):
        (Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))).mkdir()
    (tmp_path / "a" / "z").write_text("")
    (tmp_path / "link").symlink_to("a")

    paths = [entry.path for entry in walk(tmp_path)]

    assert paths == [b".", b"a", b"a/z", b"b", b"link", b"new\nline", b"\xff"]


def test_walk_needs_one_descriptor_at_any_depth(deep_tree: Path) -> None:
    """A tree of 3,000 levels must not use up the node's descriptors."""
    gc.collect()  # else garbage of other tests is closed while we count
    before = _open_descriptors()

    most = max(_open_descriptors() for _ in walk(deep_tree))

    assert most <= before + 2
    assert _open_descriptors() == before


def _open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_remove_tree_twice_at_once_is_fine(tmp_path: Path) -> None:
    """Two processes may collect the same garbage at the same time."""
    for turn in range(20):
        tree = tmp_path / f"tree-{turn}"
        for index in range(20):
            (tree / f"{index}" / "a" / "b").mkdir(parents=True)
            (tree / f"{index}" / "a" / "f").touch()
        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(remove_tree, tree) for _ in range(2)]:
                done.result()
        assert not tree.exists()
