"""Imports of archives and directories that nobody vouches for."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import random
import shutil
import socket
import stat
import subprocess
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from coldframe.images.archives import open_archive
from coldframe.images.store import ImageStore
from coldframe.images.unpack import import_image, unpack_tar
from coldframe.protocol.errors import ImageError

Member = tuple[tarfile.TarInfo, bytes]


def _member(name: str, content: bytes = b"", **fields: object) -> Member:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    info.mode = 0o644
    for key, value in fields.items():
        setattr(info, key, value)
    return info, content


def _link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> Member:
    return _member(name, type=kind, linkname=target)


def _archive(path: Path, members: Iterable[Member]) -> Path:
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for info, content in members:
            archive.addfile(info, io.BytesIO(content))
    return path


@pytest.fixture
def bring(store: ImageStore, tmp_path: Path) -> Callable[..., Path]:
    """Import members, or a path, and return where the tree lies."""

    def bring(*given: Member | Path) -> Path:
        source = given[0]
        if not isinstance(source, Path):
            source = _archive(tmp_path / "rootfs.tar", given)  # type: ignore[arg-type]
        return store.layer_root(import_image(store, "x", source).layers[0])

    return bring


def test_import_keeps_what_an_image_is_made_of(bring: Callable[..., Path]) -> None:
    """Owners by number, set-user-id, links, hard links, times and names that are not UTF-8."""
    root = bring(
        _member("./", type=tarfile.DIRTYPE, mode=0o711),
        _member("bin/su", b"x", mode=0o4755, uid=5, gid=65535, mtime=1000),
        _link("bin/hard", "./bin/su", tarfile.LNKTYPE),
        _link("etc/absolute", "/etc/passwd"),
        _link("etc/up", "../../../etc/passwd"),
        _member("fifo", type=tarfile.FIFOTYPE, mode=0o600),
        _member("\udcff\n", b"odd"),
    )

    status = (root / "bin/su").stat()
    assert stat.S_IMODE(root.stat().st_mode) == 0o711
    assert (stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid) == (0o4755, 5, 65535)
    assert (status.st_mtime, status.st_nlink) == (1000, 2)
    assert (root / "etc/absolute").readlink() == Path("/etc/passwd")
    assert (root / "etc/up").readlink() == Path("../../../etc/passwd")
    assert (root / "fifo").is_fifo()
    assert (root / "\udcff\n").read_bytes() == b"odd"


def test_import_keeps_capabilities_and_user_attributes_only(bring: Callable[..., Path]) -> None:
    """ping needs its capability; an archive's overlay attributes would hide other layers."""
    capability = b"\x01\x00\x00\x02\x00\x20\x00\x00" + bytes(12)
    text = capability.decode("utf-8", "surrogateescape")
    headers = {
        "SCHILY.xattr.security.capability": text,
        "SCHILY.xattr.user.note": "1",
        "SCHILY.xattr.user.overlay.opaque": "y",
        "SCHILY.xattr.trusted.overlay.opaque": "y",
        "SCHILY.xattr.security.selinux": "label",
    }
    root = bring(_member("ping", b"x", pax_headers=headers))

    assert sorted(os.listxattr(root / "ping")) == ["security.capability", "user.note"]
    assert os.getxattr(root / "ping", "security.capability") == capability


def test_import_leaves_out_devices_under_dev(bring: Callable[..., Path]) -> None:
    """Every exported root file system has them; a sandbox brings its own /dev."""
    root = bring(
        _member("dev", type=tarfile.DIRTYPE, mode=0o755),
        _member("dev/null", type=tarfile.CHRTYPE, devmajor=1, devminor=3),
        _member("./dev/sda", type=tarfile.BLKTYPE, devmajor=8, devminor=0),
    )

    assert list((root / "dev").iterdir()) == []


HOSTILE: dict[str, tuple[list[Member], str]] = {
    "dot-dot": ([_member("../escaped", b"x")], "'../escaped'"),
    "dot-dot inside": ([_member("a/../../escaped", b"x")], "escaped"),
    "below a link": ([_link("a", "/tmp"), _member("a/escaped", b"x")], "'a'"),
    "below a relative link": ([_link("a/b", ".."), _member("a/b/escaped", b"x")], "'a/b'"),
    "below a file": ([_member("a", b"x"), _member("a/b", b"x")], "'a'"),
    "hard link to outside": (
        [_link("a", "../../../../etc/passwd", tarfile.LNKTYPE)],
        "../../etc/passwd",
    ),
    "hard link through a link": (
        [_link("a", "/etc"), _link("b", "a/passwd", tarfile.LNKTYPE)],
        "'a'",
    ),
    "hard link to nothing": ([_link("a", "b", tarfile.LNKTYPE)], "'b'"),
    "hard link to a directory": (
        [_member("b", type=tarfile.DIRTYPE), _link("a", "b", tarfile.LNKTYPE)],
        "'a'",
    ),
    "hard link to itself": ([_member("a", b"x"), _link("a", "a", tarfile.LNKTYPE)], "'a'"),
    "device elsewhere": (
        [_member("home/null", type=tarfile.CHRTYPE, devmajor=1, devminor=3)],
        "'home/null'",
    ),
    "whiteout": ([_member("gone", type=tarfile.CHRTYPE)], "'gone'"),
    "user id": ([_member("a", b"x", uid=65536)], "65536:0"),
    "group id": ([_member("a", b"x", gid=1 << 31)], "'a'"),
    "root that is a file": ([_member("./", b"x")], "root"),
    "file over a full directory": ([_member("a/b", b"x"), _member("a", b"x")], "'a'"),
    "attribute with a NUL": (
        [_member("a", b"x", pax_headers={"SCHILY.xattr.user.a\0b": "x"})],
        "'a' has an attribute",
    ),
    "path longer than any program can name": ([_member("d/" * 3000, type=tarfile.DIRTYPE)], "4095"),
    "name too long": ([_member("n" * 300, b"x")], "too long"),
    "header too large": (
        [_member("a", b"x", pax_headers={"comment": "c" * (2 << 20)})],
        "header",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_import_of_hostile_archive_is_refused_by_name(
    bring: Callable[..., Path], store: ImageStore, case: str
) -> None:
    """Each of these wrote to the host, or held it up, in some unpacker at some time."""
    members, said = HOSTILE[case]

    with pytest.raises(ImageError) as caught:
        bring(*members)

    assert said in str(caught.value)
    assert "rootfs.tar" in str(caught.value)
    assert store.list() == ()
    assert list((store.root / "tmp").iterdir()) == []
    assert not list(store.root.rglob("escaped"))
    assert not Path("/tmp/escaped").exists()


def test_import_of_repeated_names_keeps_the_last(bring: Callable[..., Path]) -> None:
    """As tar does. A link that is replaced must not be written through."""
    root = bring(
        _member("target", b"kept"),
        _link("a", "target"),
        _member("a", b"new"),
        _member("d", b"file"),
        _member("d", type=tarfile.DIRTYPE, mode=0o755),
        _link("e", "target", tarfile.LNKTYPE),
        _member("e", b"other"),
    )

    assert (root / "target").read_bytes() == b"kept"
    assert (root / "a").read_bytes() == b"new"
    assert (root / "e").read_bytes() == b"other"
    assert (root / "d").is_dir()


def test_import_of_sparse_file_keeps_its_holes(bring: Callable[..., Path], tmp_path: Path) -> None:
    """A disk image of 64 MiB with 8 KiB in it must not fill the store."""
    source = tmp_path / "source"
    source.mkdir()
    with (source / "disk").open("wb") as file:
        file.write(b"a" * 4096)
        file.seek(1 << 26)
        file.write(b"b" * 4096)
    subprocess.run(
        ["tar", "--sparse", "-cf", tmp_path / "sparse.tar", "-C", source, "."], check=True
    )

    for given in (tmp_path / "sparse.tar", source):
        disk = bring(given) / "disk"
        assert disk.stat().st_size == (1 << 26) + 4096
        assert disk.stat().st_blocks * 512 < 1 << 20
        with disk.open("rb") as file:
            assert file.read(4096) == b"a" * 4096
            file.seek(1 << 26)
            assert file.read() == b"b" * 4096


def _zstd(data: bytes) -> bytes:
    if shutil.which("zstd") is None:
        pytest.skip("no zstd on this machine")
    return subprocess.run(["zstd", "-q"], input=data, check=True, capture_output=True).stdout


@pytest.mark.parametrize("compress", [bytes, gzip.compress, lzma.compress, bz2.compress, _zstd])
def test_import_of_archive_cut_anywhere_is_refused(
    bring: Callable[..., Path],
    store: ImageStore,
    tmp_path: Path,
    compress: Callable[[bytes], bytes],
) -> None:
    """Half an image that looks whole costs somebody a week."""
    members = [_member(f"f{index}", os.urandom(700)) for index in range(20)]
    whole = compress(_archive(tmp_path / "plain.tar", members).read_bytes())
    archive = tmp_path / "archive"
    archive.write_bytes(whole)
    assert len(list(bring(archive).iterdir())) == 20
    store.remove("x")

    for part in (0, 1, 300, len(whole) // 3, 512 * 20, len(whole) // 2 // 512 * 512):
        archive.write_bytes(whole[: min(part, len(whole) * 9 // 10)])
        with pytest.raises(ImageError, match="archive"):
            bring(archive)
    assert store.list() == ()


def test_import_of_archive_damaged_in_the_middle_is_refused(
    bring: Callable[..., Path], tmp_path: Path
) -> None:
    """tarfile takes a bad header for the end and says nothing."""
    archive = _archive(tmp_path / "bad.tar", [_member(f"f{i}", b"x" * 512) for i in range(9)])
    raw = bytearray(archive.read_bytes())
    raw[512 * 8 : 512 * 8 + 100] = b"\xaa" * 100
    archive.write_bytes(raw)

    with pytest.raises(ImageError, match=r"bad\.tar"):
        bring(archive)


@pytest.mark.parametrize("compress", [gzip.compress, lzma.compress, bz2.compress, _zstd])
def test_import_of_archive_with_damaged_compression_is_refused(
    bring: Callable[..., Path], tmp_path: Path, compress: Callable[[bytes], bytes]
) -> None:
    """Each library has an error of its own for it."""
    members = [_member(f"f{index}", os.urandom(20_000)) for index in range(9)]
    raw = bytearray(compress(_archive(tmp_path / "plain.tar", members).read_bytes()))
    archive = tmp_path / "bad"
    for at in (600, len(raw) // 2):
        archive.write_bytes(
            raw[:at] + bytes(~byte & 255 for byte in raw[at : at + 20]) + raw[at + 20 :]
        )

        with pytest.raises(ImageError, match="bad"):
            bring(archive)


@pytest.fixture
def every_format(tmp_path: Path) -> list[bytes]:
    """One tree as each dialect of tar writes it."""
    source = tmp_path / "source"
    source.mkdir()
    (source / ("n" * 120)).write_text("x" * 100)
    (source / "link").symlink_to("y" * 150)
    (source / "hard").hardlink_to(source / ("n" * 120))
    with (source / "sparse").open("wb") as file:
        for block in range(8):
            file.seek(block << 16)
            file.write(b"z" * 10)
    os.setxattr(source / "sparse", "user.note", b"\0\xff")
    dialects = (
        ["--format=pax", "--xattrs"],
        ["--format=gnu"],
        ["--format=pax", "--sparse-version=0.1"],
        ["--format=pax", "--sparse-version=0.0"],
    )
    command = ["tar", "--sparse", "-C", source, "-cf", "-", "."]
    return [
        subprocess.run([*command, *options], check=True, capture_output=True).stdout
        for options in dialects
    ]


def test_unpack_of_mutated_headers_ends_in_a_tree_or_a_typed_error(
    tmp_path: Path, every_format: list[bytes]
) -> None:
    """Python's tarfile lets its own ValueErrors out, for one in a sparse map."""
    chance = random.Random(20)
    refused = 0
    for _ in range(200):
        raw = bytearray(chance.choice(every_format))
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(12 * 1024)
            raw[at : at + 8] = chance.choice(
                [b"99999999", b"\x80" + b"\xff" * 7, b"-1      ", chance.randbytes(8)]
            )
            _mend_checksum(raw, at // 512 * 512)
        tree = tmp_path / "tree"
        tree.mkdir()
        try:
            unpack_tar(io.BytesIO(raw), tree, "archive")
        except ImageError as error:
            refused += 1
            assert str(error).startswith("archive: ")
        shutil.rmtree(tree)
    assert 0 < refused < 200


def _mend_checksum(raw: bytearray, at: int) -> None:
    """Make a block pass for a header, so that what is in it gets read."""
    header = raw[at : at + 512]
    header[148:156] = b" " * 8
    raw[at + 148 : at + 156] = b"%06o\0 " % sum(header)


@pytest.mark.parametrize("content", [b"", b"hello", bytes(5000), os.urandom(5000)])
def test_import_of_what_is_no_archive_is_refused(
    bring: Callable[..., Path], tmp_path: Path, content: bytes
) -> None:
    """The wrong file on the command line gives a sentence, and no image."""
    (tmp_path / "file").write_bytes(content)
    if content == bytes(5000):
        assert list(bring(tmp_path / "file").iterdir()) == []  # an empty archive is one
        return
    with pytest.raises(ImageError, match=str(tmp_path / "file")):
        bring(tmp_path / "file")


def test_import_of_missing_file_is_refused(bring: Callable[..., Path], tmp_path: Path) -> None:
    """A typing error names the path."""
    with pytest.raises(ImageError, match="nothing: No such file"):
        bring(tmp_path / "nothing")


def test_import_of_directory_equals_import_of_its_archive(
    store: ImageStore, tmp_path: Path
) -> None:
    """The same files are the same layer, however they came."""
    source = tmp_path / "source"
    (source / "d").mkdir(parents=True)
    (source / "d" / "f").write_text("x")
    (source / "d" / "g").hardlink_to(source / "d" / "f")
    (source / "link").symlink_to("/etc")
    os.setxattr(source / "d" / "f", "user.note", b"\xff\0\n")
    (source / "d" / "f").chmod(0o6755)
    os.chown(source / "d", 7, 8)
    subprocess.run(
        ["tar", "--xattrs", "--format=pax", "-cf", tmp_path / "a.tar", "-C", source, "."],
        check=True,
    )

    from_directory = import_image(store, "a", source)
    from_archive = import_image(store, "b", tmp_path / "a.tar")

    assert from_directory.layers == from_archive.layers


def test_import_of_directory_passes_over_sockets_and_dev(
    bring: Callable[..., Path], tmp_path: Path
) -> None:
    """A tree that something ran in has them; they mean nothing in another one."""
    source = tmp_path / "source"
    (source / "dev").mkdir(parents=True)
    os.mknod(source / "dev" / "null", stat.S_IFCHR, os.makedev(1, 3))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(source / "socket"))

    assert [path.name for path in bring(source).rglob("*")] == ["dev"]


def test_import_reports_progress(
    store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Minutes without a line look like a hang."""
    monkeypatch.setattr("coldframe.images.unpack._REPORT_EVERY", 10)
    lines: list[str] = []
    archive = _archive(tmp_path / "a.tar", [_member(f"f{i}") for i in range(11)])

    import_image(store, "x", archive, progress=lines.append)

    assert lines == ["unpacked 10 entries", "unpacked 11 entries", "taking digests"]


def test_xz_that_asks_for_much_memory_is_refused(store: ImageStore, tmp_path: Path) -> None:
    """178 KB of it took a gigabyte of the process that builds for everybody."""
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 512 << 20}]
    (tmp_path / "rootfs.tar").write_bytes(lzma.compress(bytes(10240), filters=filters))

    with pytest.raises(ImageError, match=r"rootfs\.tar: .*[Mm]emory"):
        import_image(store, "demo", tmp_path / "rootfs.tar")


@pytest.mark.parametrize("padding", [0, 4, 1 << 17])
def test_xz_of_several_streams_is_read_to_its_end(tmp_path: Path, padding: int) -> None:
    """As `cat` makes one of two; a part that was passed over would be missed by nobody."""
    path = tmp_path / "both.xz"
    pieces = [os.urandom(200_000), b"end"]
    path.write_bytes(bytes(padding).join(map(lzma.compress, pieces)) + bytes(padding))

    with open_archive(path) as stream:
        found = b""
        while more := stream.read(1000):
            found += more

    assert found == b"".join(pieces)
    path.write_bytes(path.read_bytes()[:100_000])
    with pytest.raises(EOFError), open_archive(path) as stream:
        while stream.read(1 << 20):
            pass
