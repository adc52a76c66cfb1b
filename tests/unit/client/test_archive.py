"""An archive from a sandbox is the agent's: unpacking must stay in the directory it was given."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from coldframe.client._archive import pack, unpack
from coldframe.protocol.errors import (
    ColdframeError,
    FileError,
    FileTooLargeError,
    PathExistsError,
    PathRefusedError,
)


def member(
    name: str, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644
) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, link, mode
    return info


def archive(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for info, data in members:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def unpack_bytes(data: bytes, target: Path, max_bytes: int = 1 << 30) -> int:
    return unpack(io.BytesIO(data).read1, target, max_bytes)


def test_unpack_pack_roundtrip_keeps_tree(tmp_path: Path) -> None:
    """What goes up and comes down is the same tree: contents, modes, links, hard links, holes."""
    source = tmp_path / "source"
    (source / "d/e").mkdir(parents=True)
    (source / "d/tool").write_bytes(b"#!/bin/sh\n")
    (source / "d/tool").chmod(0o755)
    (source / "d/e/up").symlink_to("../tool")
    (source / "twin").hardlink_to(source / "d/tool")
    with (source / "hole").open("wb") as file:
        file.truncate(64 << 20)
        file.seek(0, os.SEEK_END)
        file.write(b"end")
    (source / "caf\udce9").write_bytes(b"name that is not text")
    pieces: list[bytes] = []
    pack(source, pieces.append, (0, 0))

    target = tmp_path / "target"
    count = unpack_bytes(b"".join(pieces), target)

    assert count == 7
    assert (target / "d/tool").stat().st_mode & 0o777 == 0o755
    assert (target / "d/e/up").readlink() == Path("../tool")
    assert (target / "twin").stat().st_ino == (target / "d/tool").stat().st_ino
    assert (target / "hole").stat().st_size == (64 << 20) + 3
    assert (target / "hole").stat().st_blocks * 512 < 4 << 20
    assert (target / "caf\udce9").read_bytes() == b"name that is not text"


@pytest.mark.parametrize(
    "evil",
    [
        [member("../out")],
        [member("/out")],
        [member("d/../../out")],
        [member("l", tarfile.SYMTYPE, "/etc")],
        [member("l", tarfile.SYMTYPE, "..")],
        [member("d", tarfile.DIRTYPE, mode=0o755), member("d/l", tarfile.SYMTYPE, "../..")],
        # Each `..` after a name may climb out once that name is a link.
        [member("d/e/l", tarfile.SYMTYPE, "."), member("x", tarfile.SYMTYPE, "d/e/l/l/../..")],
        [member("in", tarfile.SYMTYPE, "d"), member("in/f")],
        [member("h", tarfile.LNKTYPE, "../../etc/passwd")],
        [member("h", tarfile.LNKTYPE, "/etc/passwd")],
        [member("null", tarfile.CHRTYPE)],
        [member("fifo", tarfile.FIFOTYPE)],
        [member("f"), member("f/below")],
        [member(".")],
    ],
)
def test_unpack_member_that_may_escape_is_refused(
    evil: list[tarfile.TarInfo], tmp_path: Path
) -> None:
    """One accepted escape writes into the host."""
    target = tmp_path / "a/b/target"
    before = {path for path in tmp_path.rglob("*") if path != target}
    with pytest.raises(PathRefusedError):
        unpack_bytes(archive(*((info, b"") for info in evil)), target)

    outside = {p for p in tmp_path.rglob("*") if target not in p.parents and p != target}
    assert outside - before <= {tmp_path / "a", tmp_path / "a/b"}


def test_unpack_onto_existing_link_does_not_follow_it(tmp_path: Path) -> None:
    """A link that is there already must not carry a member elsewhere."""
    target, elsewhere = tmp_path / "target", tmp_path / "elsewhere"
    target.mkdir()
    elsewhere.mkdir()
    (target / "d").symlink_to(elsewhere)

    with pytest.raises(PathRefusedError):
        unpack_bytes(archive((member("d/f"), b"x")), target)
    assert list(elsewhere.iterdir()) == []


def test_unpack_twice_the_same_name_is_refused(tmp_path: Path) -> None:
    """A second member of a name could be written through what the first one made."""
    with pytest.raises(PathExistsError, match="exists"):
        unpack_bytes(archive((member("f"), b"1"), (member("f"), b"2")), tmp_path / "t")


def test_unpack_drops_setuid_and_sticky(tmp_path: Path) -> None:
    """A setuid program of the agent's, owned by the caller, would be a way up."""
    unpack_bytes(archive((member("f", mode=0o7755), b"x")), tmp_path)
    assert (tmp_path / "f").stat().st_mode & 0o7777 == 0o755


def test_unpack_more_than_allowed_is_refused(tmp_path: Path) -> None:
    """A sandbox must not fill the host."""
    data = archive((member("f"), b"x" * 5000))
    with pytest.raises(FileTooLargeError, match="4096"):
        unpack_bytes(data, tmp_path, max_bytes=4096)


def test_unpack_of_more_members_than_allowed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Empty files cost no bytes, and inodes all the same."""
    monkeypatch.setattr("coldframe.client._archive.MAX_MEMBERS", 2)
    data = archive(*((member(name), b"") for name in "abc"))
    with pytest.raises(FileTooLargeError, match="more than 2 members"):
        unpack_bytes(data, tmp_path)


@pytest.mark.parametrize("cut", [100, 700, 5632])
def test_unpack_damaged_archive_is_a_typed_failure(cut: int, tmp_path: Path) -> None:
    """A connection that breaks must not look like a small tree."""
    with pytest.raises(ColdframeError) as caught:
        unpack_bytes(archive((member("f"), b"x" * 5000))[:cut], tmp_path)
    assert isinstance(caught.value, FileError)


def test_unpack_leaves_out_what_it_is_told_to(tmp_path: Path) -> None:
    """One link that leads away must not cost a whole directory of logs."""
    told: list[str] = []
    data = archive(
        (member("out", tarfile.SYMTYPE, "/etc/passwd"), b""),
        (member("log"), b"x"),
        (member("pipe", tarfile.FIFOTYPE), b""),
        (member("twin", tarfile.LNKTYPE, "out"), b""),
        (member("../up"), b"x"),
    )
    count = unpack(io.BytesIO(data).read1, tmp_path, 1 << 20, told.append)

    assert (count, [one.name for one in tmp_path.iterdir()]) == (1, ["log"])
    assert len(told) == 4


def test_pack_of_a_hole_sends_no_zeros(tmp_path: Path) -> None:
    """A disk image of terabytes is a few kilobytes on the way."""
    with (tmp_path / "disk").open("wb") as file:
        file.truncate(1 << 40)
    pieces: list[bytes] = []
    pack(tmp_path, pieces.append, (0, 0))

    assert sum(map(len, pieces)) < 64 << 10


def test_pack_refuses_devices(tmp_path: Path) -> None:
    """What cannot be written on the other side is said before anything is sent."""
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(PathRefusedError, match="fifo"):
        pack(tmp_path, lambda _: None, (0, 0))
