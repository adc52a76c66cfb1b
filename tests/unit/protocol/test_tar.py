"""Archives that nobody vouches for: what is read of them does not depend on the Python below."""

from __future__ import annotations

import contextlib
import io
import os
import random
import subprocess
import tarfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldframe.protocol.sparse_maps import MAX_EXTENTS, DamagedArchiveError
from coldframe.protocol.tar import MAX_HEADERS, TarReader

END = bytes(1024)


def header(
    name: str, kind: bytes = tarfile.REGTYPE, size: int | bytes = 0, **fields: bytes
) -> bytes:
    """A fixed header with what tarfile would not write: bytes go in as they are."""
    info = tarfile.TarInfo(name)
    info.type = kind
    raw = bytearray(info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape"))
    places = {"size": 124, "mtime": 136, "uid": 108, "sparse": 386}
    fields["size"] = size if isinstance(size, bytes) else b"%011o\0" % size
    for field, value in fields.items():
        at = places[field]
        raw[at : at + len(value)] = value
    raw[148:156] = b" " * 8
    raw[148:156] = b"%06o\0 " % sum(raw)
    return bytes(raw)


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 512)


def record(keyword: str, value: str) -> bytes:
    rest = f" {keyword}={value}\n".encode()
    length = len(rest)
    while len(str(length)) + len(rest) != length:
        length = len(str(length)) + len(rest)
    return str(length).encode() + rest


def extended(payload: bytes, kind: bytes = tarfile.XHDTYPE) -> bytes:
    return header("x", kind, len(payload)) + padded(payload)


def pax(**values: str) -> bytes:
    return extended(b"".join(record(key.replace("_", "."), one) for key, one in values.items()))


def read(data: bytes) -> dict[str, bytes]:
    """Every member's name and content, holes filled."""
    found = {}
    reader = TarReader(io.BytesIO(data).read)
    for member in reader:
        content = bytearray()
        if member.isreg():
            for at, piece in reader.content(member):
                content += bytes(at - len(content)) + piece
            content += bytes(member.size - len(content))
        found[member.name] = bytes(content)
    return found


def test_plain_members_and_comments_are_read() -> None:
    """The control: a global comment as git writes it, an owner and a time for all."""
    comment = extended(record("comment", "x") + record("uid", "7"), tarfile.XGLTYPE)
    data = comment + header("f", size=3) + padded(b"abc") + pax(uid="8") + header("g") + END

    owners = {member.name: member.uid for member in TarReader(io.BytesIO(data).read)}

    assert read(data) == {"f": b"abc", "g": b""}
    assert owners == {"f": 7, "g": 8}


@pytest.mark.parametrize(
    "options",
    [
        ["--format=v7"],
        ["--format=ustar"],
        ["--format=gnu"],
        ["--format=pax"],
        ["--format=gnu", "--sparse"],
        *(["--format=pax", "--sparse", f"--sparse-version={one}"] for one in ("0.0", "0.1", "1.0")),
    ],
    ids=" ".join,
)
def test_what_gnu_tar_writes_is_read(tmp_path: Path, options: list[str]) -> None:
    """Long names, and sparse files of more parts than one header holds."""
    long = "n" * (120 if options[0] in {"--format=gnu", "--format=pax"} else 90)
    (tmp_path / long).write_bytes(os.urandom(2000))
    (tmp_path / "caf\udce9").write_bytes(b"name that is not text")
    with (tmp_path / "holes").open("wb") as file:
        for part in range(60):
            file.seek(part << 16)
            file.write(os.urandom(4096))
        file.truncate(70 << 16)
    (tmp_path / "hole").touch()
    os.truncate(tmp_path / "hole", 1 << 20)
    wanted = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    made = subprocess.run(
        ["tar", *options, "-C", tmp_path, "-cf", "-", *sorted(wanted)],
        check=True,
        capture_output=True,
    ).stdout

    assert read(made) == wanted
    assert ("--sparse" in options) == (len(made) < 1 << 20)


FILE = header("f", size=3) + padded(b"abc")
SPARSE_1 = {"GNU_sparse_major": "1", "GNU_sparse_minor": "0"}
HOSTILE: dict[str, bytes] = {
    "nothing": b"",
    "noise": os.urandom(2048),
    "no end mark": FILE,
    "negative size": header("f", size=b"\xff" * 12) + END,
    "absurd size": header("f", size=b"\x80" + b"\xff" * 11) + END,
    "size that is stated negative": pax(size="-1") + FILE + END,
    "size that is stated absurd": pax(size="9" * 30) + FILE + END,
    "size of more digits than Python turns into a number": pax(size="9" * 5000) + FILE + END,
    "size beyond the end": header("f", size=1 << 40) + END,
    "negative owner": header("f", uid=b"\xff" * 8) + END,
    "owner that is none": pax(uid="root") + FILE + END,
    "time that is none": pax(mtime="nan") + FILE + END,
    "NUL in a name": pax(path="a\0b") + FILE + END,
    "header without a member": pax(comment="x") + END,
    "header of a negative size": header("x", tarfile.XHDTYPE, size=b"\xff" * 12) + FILE,
    "header too large": pax(comment="c" * MAX_HEADERS) + FILE + END,
    "name too large": extended(b"n" * MAX_HEADERS, tarfile.GNUTYPE_LONGNAME) + FILE + END,
    "link too large": extended(b"n" * MAX_HEADERS, tarfile.GNUTYPE_LONGLINK) + FILE + END,
    "global header too large": extended(record("comment", "c" * MAX_HEADERS), b"g") + FILE + END,
    "headers upon headers": pax(comment="x") * (MAX_HEADERS // 1024 + 1) + FILE + END,
    "names upon names": extended(b"n", tarfile.GNUTYPE_LONGNAME) * 2000 + FILE + END,
    "record longer than its header": extended(b"99 path=x\n") + FILE + END,
    "record of no length": extended(b"0 path=x\n") + FILE + END,
    "record without a length": extended(b" path=x\n") + FILE + END,
    "record without a keyword": extended(b"5 =x\n") + FILE + END,
    "record without an end": extended(b"9 path=xy") + FILE + END,
    "digits without an end": extended(b"1" * (MAX_HEADERS - 1024)) + FILE + END,
    "global name": extended(record("path", "g"), tarfile.XGLTYPE) + FILE + END,
    "global size": extended(record("size", "1"), tarfile.XGLTYPE) + FILE + END,
    "global attribute": extended(record("SCHILY.xattr.user.x", "1"), b"g") + FILE + END,
    "map out of order": pax(GNU_sparse_size="9", GNU_sparse_map="5,1,0,1") + FILE + END,
    "map over itself": pax(GNU_sparse_size="9", GNU_sparse_map="0,2,1,1") + FILE + END,
    "map beyond the file": pax(GNU_sparse_size="9", GNU_sparse_map="9,3") + FILE + END,
    "map of more than is stored": pax(GNU_sparse_size="9", GNU_sparse_map="0,4") + FILE + END,
    "half a map": pax(GNU_sparse_size="9", GNU_sparse_map="0,1,2") + FILE + END,
    "negative map": pax(GNU_sparse_size="9", GNU_sparse_map="-1,1") + FILE + END,
    "map of words": pax(GNU_sparse_size="9", GNU_sparse_map="a,b") + FILE + END,
    "leading map of too many parts": pax(**SPARSE_1)
    + header("f", size=512)
    + padded(b"%d\n" % (MAX_EXTENTS + 1))
    + END,
    "leading map of more than is stored": pax(**SPARSE_1)
    + header("f", size=512)
    + padded(b"300\n")
    + END * 100,
    "leading map without lines": pax(**SPARSE_1)
    + header("f", size=1 << 20)
    + b"1" * (1 << 20)
    + END,
    "old map that is none": header("f", tarfile.GNUTYPE_SPARSE, sparse=b"words" * 5) + END,
    "old map beyond the file": header(
        "f", tarfile.GNUTYPE_SPARSE, size=3, sparse=b"%011o\0%011o\0" % (0, 3)
    )
    + padded(b"abc")
    + END,
    "old map without an end": header("f", tarfile.GNUTYPE_SPARSE, sparse=bytes(96) + b"\1")
    + (b"%011o\0" % 1 * 42 + b"\1").ljust(512, b"\0") * (MAX_EXTENTS // 21 + 1),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_archive_is_refused_soon(case: str) -> None:
    """Each of these hung, or filled the memory of, some release of Python's own reader, or passed.

    One header of digits held every thread of a process for hours: a search in quadratic time.
    """
    begun = time.process_time()

    with pytest.raises(DamagedArchiveError):
        read(HOSTILE[case])

    assert time.process_time() - begun < 5  # 0.3 s at most


@pytest.mark.parametrize("kept", [512, 1024, 1536, 2048])
def test_archive_that_is_cut_between_members_is_refused(kept: int) -> None:
    """Half of a tree must not look like all of it."""
    data = FILE + header("g", size=3) + padded(b"abc") + END

    with pytest.raises(DamagedArchiveError, match="cut short"):
        read(data[:kept])


def test_damage_in_the_middle_is_not_the_end() -> None:
    """tarfile takes it for that and says nothing."""
    with pytest.raises(DamagedArchiveError, match="damaged"):
        read(FILE + b"\xaa" * 512 + FILE + END)


@pytest.mark.parametrize(("name", "is_directory"), [("n" * 150 + "/", True), ("n" * 150, False)])
def test_old_directory_is_told_by_its_whole_name(name: str, is_directory: bool) -> None:
    """By the part of a long name that fits a header, content passed for headers, or the reverse."""
    cut = header(name[:99] + "/", tarfile.AREGTYPE, size=512)
    data = extended(name.encode(), tarfile.GNUTYPE_LONGNAME) + cut
    data += b"" if is_directory else header("smuggled")

    found = read(data + END)

    assert list(found) == [name.rstrip("/")]


def test_times_beyond_every_file_system_are_kept_within() -> None:
    """They are set with calls that refuse them, each in another way."""
    data = header("f", mtime=b"\x80" + b"\xff" * 11) + pax(mtime="-1.5") + header("g") + END

    assert [member.mtime for member in TarReader(io.BytesIO(data).read)] == [1 << 33, -1.5]


@pytest.mark.parametrize("size", [1, 100, 511, 513])
def test_archive_may_come_in_pieces_of_any_size(size: int) -> None:
    """Whoever sends it chooses them."""
    pieces = io.BytesIO(pax(path="long" * 50) + FILE + END)
    reader = TarReader(lambda _: pieces.read(size))

    found = [
        (member.name, b"".join(data for _, data in reader.content(member))) for member in reader
    ]

    assert found == [("long" * 50, b"abc")]


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=4096))
def test_any_bytes_are_an_archive_or_damaged(content: bytes) -> None:
    """No other error comes out."""
    with contextlib.suppress(DamagedArchiveError):
        read(content)


def test_changed_headers_are_an_archive_or_damaged() -> None:
    """Fields with numbers that mean something, checksums mended, so that all of it is read."""
    chance = random.Random(7)
    whole = (
        pax(path="p", size="3", mtime="1.5", GNU_sparse_size="9", GNU_sparse_map="0,1,4,2")
        + FILE
        + extended(b"name\0", tarfile.GNUTYPE_LONGNAME)
        + header("f", tarfile.GNUTYPE_SPARSE, size=3, sparse=b"%011o\0%011o\0" % (0, 3))
        + padded(b"abc")
        + END
    )
    refused = 0
    for _ in range(2000):
        raw = bytearray(whole)
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(len(raw) - 8)
            raw[at : at + 8] = chance.choice(
                [b"99999999", b"\x80" + b"\xff" * 7, b"-1      ", chance.randbytes(8)]
            )
            start = at // 512 * 512
            raw[start + 148 : start + 156] = b" " * 8
            raw[start + 148 : start + 156] = b"%06o\0 " % sum(raw[start : start + 512])
        try:
            for member in (reader := TarReader(io.BytesIO(raw).read)):
                if member.isreg():
                    for _ in reader.content(member):
                        pass
        except DamagedArchiveError:
            refused += 1
    assert 0 < refused < 2000
