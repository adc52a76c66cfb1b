"""The digest decides what is the same layer: it must see all that matters and nothing else."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from coldframe.images.digest import MAX_FILE, digest_tree, strip_foreign_xattrs
from coldframe.protocol.errors import ImageError


def _tree(path: Path) -> Path:
    path.mkdir()
    (path / "file").write_text("content")
    (path / "other").write_text("content")
    (path / "directory").mkdir()
    (path / "link").symlink_to("file")
    os.mkfifo(path / "fifo")
    return path


def _append(tree: Path) -> None:
    with (tree / "file").open("a") as file:
        file.write("!")


def _relink(tree: Path) -> None:
    (tree / "link").unlink()
    (tree / "link").symlink_to("other")


def _hard(tree: Path) -> None:
    (tree / "other").unlink()
    (tree / "other").hardlink_to(tree / "file")


def _whiteout(tree: Path) -> None:
    os.mknod(tree / "gone", stat.S_IFCHR, 0)


CHANGES: list[Callable[[Path], object]] = [
    _append,
    _relink,
    _hard,
    _whiteout,
    lambda tree: (tree / "file").chmod(0o4755),
    lambda tree: tree.chmod(0o700),
    lambda tree: os.chown(tree / "link", 1, 0, follow_symlinks=False),
    lambda tree: os.chown(tree / "directory", 0, 1),
    lambda tree: (tree / "file").rename(tree / "renamed"),
    lambda tree: os.setxattr(tree / "file", "user.note", b"1"),
    lambda tree: os.setxattr(tree / "directory", "trusted.overlay.opaque", b"y"),
]


@pytest.mark.parametrize("change", CHANGES)
def test_digest_sees_each_kind_of_change(tmp_path: Path, change: Callable[[Path], object]) -> None:
    """A change that it missed would hand out the old layer for the new one."""
    before = digest_tree(_tree(tmp_path / "a"))
    changed = _tree(tmp_path / "b")
    change(changed)

    assert digest_tree(changed).digest != before.digest


def test_digest_of_same_tree_made_later_elsewhere_is_equal(tmp_path: Path) -> None:
    """Layers are shared between images only if times and inode numbers do not count."""
    first, second = _tree(tmp_path / "a"), _tree(tmp_path / "b")
    for path in second.iterdir():
        os.utime(path, (1, 1), follow_symlinks=False)

    assert digest_tree(first) == digest_tree(second)


def test_digest_is_fixed_for_all_time() -> None:
    """Layers on disk are named by it: a changed form would orphan every store.

    The tree is the smallest there is; docs/images.md describes the form.
    """
    import hashlib
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory)
        tree.chmod(0o755)
        (tree / "a").write_bytes(b"hi")
        (tree / "a").chmod(0o644)
        content = hashlib.sha256(b"hi").digest()
        form = (
            b"16:coldframe-tree-1,\n"
            b"1:d,1:.,3:755,3:0:0,\n"
            b"1:f,1:a,3:644,3:0:0,1:2,32:" + content + b",\n"
        )

        assert digest_tree(tree).digest == hashlib.sha256(form).hexdigest()


def test_digest_of_hard_links_counts_their_content_once(tmp_path: Path) -> None:
    """Sizes are shown to people and counted against disks."""
    (tmp_path / "a").write_bytes(b"x" * 1000)
    (tmp_path / "b").hardlink_to(tmp_path / "a")

    found = digest_tree(tmp_path)

    assert (found.size_bytes, found.entries) == (1000, 3)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda tree: os.chown(tree / "x", 65536, 0), "65536:0"),
        (lambda tree: os.truncate(tree / "x", MAX_FILE + 1), str(MAX_FILE + 1)),
        (
            lambda tree: (
                (tree / "x").unlink(),
                os.mknod(tree / "x", stat.S_IFCHR, os.makedev(1, 3)),
            ),
            "device",
        ),
    ],
)
def test_digest_of_what_no_layer_may_hold_is_refused_by_name(
    tmp_path: Path, spoil: Callable[[Path], object], said: str
) -> None:
    """Such a file could not be seen in a sandbox, would be a way to the host, or never end."""
    (tmp_path / "x").touch()
    spoil(tmp_path)

    with pytest.raises(ImageError) as caught:
        digest_tree(tmp_path)
    assert "'x'" in str(caught.value)
    assert said in str(caught.value)


def test_strip_takes_overlay_bookkeeping_and_nothing_else(tmp_path: Path) -> None:
    """File handles of one disk mean nothing, or something else, on another."""
    os.setxattr(tmp_path, "trusted.overlay.origin", b"handle")
    os.setxattr(tmp_path, "trusted.overlay.impure", b"y")
    os.setxattr(tmp_path, "trusted.overlay.opaque", b"y")
    os.setxattr(tmp_path, "user.note", b"1")

    strip_foreign_xattrs(tmp_path)

    assert sorted(os.listxattr(tmp_path)) == ["trusted.overlay.opaque", "user.note"]


def test_tree_of_many_large_files_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of a build may leave ten thousand sparse files of 64 GiB: days of hashing nothing."""
    monkeypatch.setattr("coldframe.images.digest.MAX_TREE", 100)
    for name in "ab":
        with (tmp_path / name).open("wb") as file:
            file.truncate(60)
    os.link(tmp_path / "b", tmp_path / "c")
    with pytest.raises(ImageError, match="more than 100 bytes"):
        digest_tree(tmp_path)

    (tmp_path / "a").unlink()
    assert digest_tree(tmp_path).size_bytes == 60


def test_tree_deeper_than_paths_can_name_is_refused_at_once(tmp_path: Path) -> None:
    """A step may dig for as long as it may run; records of whole paths grow as its square."""
    fd = os.open(tmp_path, os.O_RDONLY)
    for _ in range(21):
        os.mkdir("d" * 200, dir_fd=fd)
        below = os.open("d" * 200, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)

    with pytest.raises(ImageError, match="is a path of over 4095 bytes"):
        digest_tree(tmp_path)


def test_tree_of_too_many_entries_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept of each entry is the host's memory."""
    monkeypatch.setattr("coldframe.images.digest.MAX_ENTRIES", 3)
    (tmp_path / "a").touch()
    (tmp_path / "b").touch()
    assert digest_tree(tmp_path).entries == 3

    (tmp_path / "c").touch()
    with pytest.raises(ImageError, match="more than 3 entries"):
        digest_tree(tmp_path)
