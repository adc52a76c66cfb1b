"""Users of a sandbox: its own files, read leniently and trusted in nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from coldframe.host import users
from coldframe.host.users import User, Users
from coldframe.protocol.errors import UserNotFoundError
from tests.fixtures.runtime import Tree

PASSWD = """\
root:x:0:0:root:/root:/bin/sh
agent:x:1000:1001:,,,:/home/agent:/bin/sh
1234:x:7:7::/seven:
"""
GROUP = "root:x:0:\nagents:x:1001:\ndocker:x:55:agent,root\nvideo:x:44:agent\n"


@pytest.fixture
def etc(tree: Tree) -> Tree:
    """A tree with the usual two files."""
    (tree.path / "etc").mkdir()
    (tree.path / "etc/passwd").write_text(PASSWD)
    (tree.path / "etc/group").write_text(GROUP)
    return tree


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("agent", User(1000, 1001, (55, 44), "agent", "/home/agent")),
        ("1000", User(1000, 1001, (55, 44), "agent", "/home/agent")),
        (1000, User(1000, 1001, (55, 44), "agent", "/home/agent")),
        ("root", User(0, 0, (55,), "root", "/root")),
        ("agent:video", User(1000, 44, (), "agent", "/home/agent")),
        ("agent:9", User(1000, 9, (), "agent", "/home/agent")),
        ("4000", User(4000, 0, (), None, "/")),
        ("65535:65535", User(65535, 65535, (), None, "/")),
        ("1234", User(7, 7, (), "1234", "/seven")),
    ],
)
def test_resolve_known_user_gives_ids_groups_and_home(
    etc: Tree, wanted: str | int, expected: User
) -> None:
    """A name wins over a number, as everywhere."""
    assert Users().resolve(etc.files.tree, wanted) == expected


@pytest.mark.parametrize(
    "wanted", ["nobody-here", "agent:no-group", "65536", "-1", "0x0", "", "１", 4294967295]
)
def test_resolve_unknown_user_is_typed(etc: Tree, wanted: str | int) -> None:
    """65536 would be the neighbour's root; 4294967295 is no id at all."""
    with pytest.raises(UserNotFoundError):
        Users().resolve(etc.files.tree, wanted)


def test_resolve_without_files_takes_numbers_only(tree: Tree) -> None:
    """Images of one program have no /etc."""
    known = Users()

    assert known.resolve(tree.files.tree, "0") == User(0, 0, (), None, "/")
    with pytest.raises(UserNotFoundError):
        known.resolve(tree.files.tree, "root")


def test_resolve_sees_every_change_of_the_files(etc: Tree) -> None:
    """`useradd` followed by a command as that user."""
    known = Users()
    with pytest.raises(UserNotFoundError):
        known.resolve(etc.files.tree, "late")

    with (etc.path / "etc/passwd").open("a") as file:
        file.write("late:x:5:6::/late:/bin/sh\n")
    assert known.resolve(etc.files.tree, "late").home == "/late"

    replaced = etc.path / "etc/new"
    replaced.write_text((etc.path / "etc/passwd").read_text().replace("/late", "/latf"))
    replaced.rename(etc.path / "etc/passwd")
    assert known.resolve(etc.files.tree, "late").home == "/latf"
    (etc.path / "etc/passwd").unlink()
    with pytest.raises(UserNotFoundError):
        known.resolve(etc.files.tree, "late")


def test_resolve_sees_that_etc_itself_is_another_directory(etc: Tree) -> None:
    """The files are looked at by their directory, which may be swapped, or become a link."""
    known = Users()
    assert known.resolve(etc.files.tree, "agent").uid == 1000
    other = etc.path / "other"
    other.mkdir()
    for name in ("passwd", "group"):
        (other / name).write_text((etc.path / "etc" / name).read_text().replace("1000", "2000"))

    (etc.path / "etc").rename(etc.path / "before")
    (etc.path / "etc").symlink_to("/other")
    assert known.resolve(etc.files.tree, "agent").uid == 2000
    (etc.path / "etc").unlink()
    (etc.path / "before").rename(etc.path / "etc")
    assert known.resolve(etc.files.tree, "agent").uid == 1000


def test_resolve_sees_changes_behind_a_link(etc: Tree) -> None:
    """Some images keep their passwd elsewhere; the link stays the same whatever it leads to."""
    known = Users()
    path, kept = etc.path / "etc/passwd", etc.path / "kept"
    path.rename(kept)
    path.symlink_to("/kept")
    assert known.resolve(etc.files.tree, "agent").uid == 1000

    kept.write_text(PASSWD.replace("1000", "2000"))
    assert known.resolve(etc.files.tree, "agent").uid == 2000


def test_resolve_ignores_lines_that_make_no_sense(etc: Tree) -> None:
    """The agent may write anything into these files."""
    (etc.path / "etc/passwd").write_bytes(
        b"\xff\xfe\n:::::\nbig:x:99999999:0::/:\nneg:x:-1:0::/:\nshort:x:1\n+::::::\nok:x:3:4::/ok:/x\n"
    )
    known = Users()

    assert known.resolve(etc.files.tree, "ok") == User(3, 4, (), "ok", "/ok")
    for name in ("big", "neg", "short"):
        with pytest.raises(UserNotFoundError):
            known.resolve(etc.files.tree, name)


def test_resolve_through_link_never_reads_the_hosts_files(tree: Tree) -> None:
    """/etc -> the host's /etc would tell who lives there."""
    (tree.path.parent / "passwd").write_text("secret:x:1:1::/:\n")
    (tree.path / "etc").symlink_to(tree.path.parent)

    with pytest.raises(UserNotFoundError):
        Users().resolve(tree.files.tree, "secret")


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _directory(path: Path) -> None:
    path.mkdir()


def _huge(path: Path) -> None:
    path.write_bytes(b"agent:x:1000:1001::/:\n")
    os.truncate(path, 1 << 40)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("breaks", [_fifo, _directory, _huge, _device])
@pytest.mark.parametrize("name", ["passwd", "group"])
def test_resolve_number_works_whatever_the_files_are(
    etc: Tree, breaks: Callable[[Path], None], name: str
) -> None:
    """It happens before every command: the agent must not lock the verifier out."""
    (etc.path / "etc" / name).unlink()
    breaks(etc.path / "etc" / name)
    known = Users()

    for wanted, ids in ((0, (0, 0)), ("4000", (4000, 0)), ("5:6", (5, 6)), ("65535:0", (65535, 0))):
        user = known.resolve(etc.files.tree, wanted)
        assert (user.uid, user.gid) == ids


@pytest.mark.parametrize("breaks", [_fifo, _directory, _huge])
def test_resolve_name_in_a_broken_file_is_typed_and_says_why(
    etc: Tree, breaks: Callable[[Path], None]
) -> None:
    """`no such user` would send people looking for a typo; lost groups would be found too late."""
    for name, wanted in (("group", "agent"), ("group", "0:video"), ("passwd", "agent")):
        (etc.path / "etc" / name).unlink()
        breaks(etc.path / "etc" / name)
        with pytest.raises(UserNotFoundError, match=f"cannot be read.*/etc/{name}"):
            Users().resolve(etc.files.tree, wanted)
        broken = etc.path / "etc" / name
        broken.rmdir() if broken.is_dir() else broken.unlink()
        broken.write_text(PASSWD if name == "passwd" else GROUP)


def test_resolve_follows_a_file_that_breaks_and_heals(etc: Tree) -> None:
    """What was known of the file before must not answer for the one that is there now."""
    known = Users()
    assert known.resolve(etc.files.tree, "1000").home == "/home/agent"

    (etc.path / "etc/passwd").unlink()
    os.mkfifo(etc.path / "etc/passwd")
    assert known.resolve(etc.files.tree, "1000") == User(1000, 0, (), None, "/")

    (etc.path / "etc/passwd").unlink()
    (etc.path / "etc/passwd").write_text(PASSWD)
    assert known.resolve(etc.files.tree, "1000").home == "/home/agent"


def test_users_of_an_image_are_read_once_for_all_its_sandboxes(
    etc: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each lookup is a part of the time to a sandbox's first command."""
    monkeypatch.setattr(users, "_SURELY_BEFORE_S", -60.0)  # as if the files were old
    tree = etc.files.tree
    agent = Users("image").resolve(tree, "agent")
    reads = _count_reads(monkeypatch)

    assert Users("image").resolve(tree, "agent") == agent
    assert reads == []
    assert Users("another").resolve(tree, "agent") == agent
    assert reads == [b"passwd", b"group"]

    (etc.path / "etc/passwd").write_text(PASSWD.replace("1000", "1007"))
    assert Users("image").resolve(tree, "agent").uid == 1007


def test_users_that_a_sandbox_wrote_are_its_own(etc: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inode numbers of two sandboxes are often the same; one must not name the other's users."""
    Users("image").resolve(etc.files.tree, "agent")
    reads = _count_reads(monkeypatch)

    Users("image").resolve(etc.files.tree, "agent")

    assert reads == [b"passwd", b"group"]


def _count_reads(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    reads: list[bytes] = []
    real = users._Cached._content

    def content(self: users._Cached[object], handle: int, status: os.stat_result) -> str:
        reads.append(self._name)
        return real(self, handle, status)

    monkeypatch.setattr(users._Cached, "_content", content)
    return reads
