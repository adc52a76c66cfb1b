"""Files through the SDK, on both runtimes."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from coldframe import FileKind, PathNotFoundError, PathRefusedError, Sandbox, SandboxClient
from coldframe.images.base import Image
from coldframe.protocol.errors import FileTooLargeError


def test_files_roundtrip_bytes_text_and_ranges(sandbox: Sandbox) -> None:
    """The everyday calls."""
    files = sandbox.files
    assert files.write("/d/e/f", b"0123456789\xff") == 11
    assert files.read("/d/e/f") == b"0123456789\xff"
    assert files.read("/d/e/f", offset=2, length=3) == b"234"
    assert files.read("/d/e/f", offset=50) == b""
    files.write("/t", "grün\n")
    assert files.read_text("/t") == "grün\n"
    assert sandbox.exec("cat t").text == "grün\n"


def test_files_write_takes_every_kind_of_content(sandbox: Sandbox) -> None:
    """Iterables and file objects are streamed; none of them may be cut."""
    big = bytes(range(256)) * 12_000
    for content in (big, bytearray(big), memoryview(big), io.BytesIO(big), iter([big, b""])):
        sandbox.files.write("/x", content)
        assert hashlib.sha256(sandbox.files.read("/x")).digest() == hashlib.sha256(big).digest()


def test_files_read_larger_than_allowed_is_refused(sandbox: Sandbox) -> None:
    """A sandbox's file must not fill the caller's memory."""
    sandbox.files.write("/x", b"12345")
    assert sandbox.files.read("/x", max_bytes=5) == b"12345"
    with pytest.raises(FileTooLargeError, match="/x"):
        sandbox.files.read("/x", max_bytes=4)


def test_files_iterate_stops_when_the_caller_does(sandbox: Sandbox) -> None:
    """Only what is asked for is read."""
    sandbox.exec("truncate -s 1T huge")
    first = next(iter(sandbox.files.iterate("/huge")))
    assert set(first) == {0}
    assert sandbox.files.stat("/huge").size == 1 << 40


def test_files_failed_write_leaves_the_old_content(sandbox: Sandbox) -> None:
    """Atomic: a reader sees the old file or the new one."""
    sandbox.files.write("/x", b"old")

    def content() -> Iterator[bytes]:
        yield b"new"
        raise OSError("the source failed")

    with pytest.raises(OSError, match="the source failed"):
        sandbox.files.write("/x", content())
    assert sandbox.files.read("/x") == b"old"
    assert [entry.name for entry in sandbox.files.list("/") if b"x" in entry.name] == [b"x"]


def test_files_names_and_metadata(sandbox: Sandbox) -> None:
    """stat, list, exists, mkdir, move, remove, chmod in one life of a tree."""
    files = sandbox.files
    files.mkdir("/d/e")
    files.write("/d/odd\nname\udcff", b"x", mode=0o600)
    assert files.stat("/d/odd\nname\udcff").mode == 0o600
    assert {entry.name for entry in files.list("/d")} == {b"e", b"odd\nname\xff"}
    files.move(b"/d/odd\nname\xff", "/d/plain")
    files.chmod("/d/plain", 0o4755)
    assert files.stat("/d/plain").mode == 0o4755
    assert files.exists("/d/plain")
    sandbox.exec("ln -s plain d/link")
    assert files.stat("/d/link", follow=False).kind is FileKind.LINK
    files.remove("/d", recursive=True)
    assert not files.exists("/d")
    with pytest.raises(PathNotFoundError, match="/d"):
        files.stat("/d")


def test_files_special_files_are_refused(sandbox: Sandbox) -> None:
    """A FIFO would block the host for ever."""
    sandbox.exec("mkfifo pipe")
    with pytest.raises(PathRefusedError):
        sandbox.files.read("/pipe")


def test_files_upload_and_download_keep_content_and_mode(sandbox: Sandbox, tmp_path: Path) -> None:
    """Local files in, local files out."""
    local = tmp_path / "tool.sh"
    local.write_bytes(b"#!/bin/sh\necho ran\n")
    local.chmod(0o755)
    assert sandbox.files.upload(local, "/bin/own/tool.sh") == 19
    assert sandbox.exec(["./bin/own/tool.sh"]).stdout == b"ran\n"

    sandbox.exec("seq 1 100000 > out")
    size = sandbox.files.download("/out", tmp_path / "got")
    assert (tmp_path / "got").stat().st_size == size
    assert (tmp_path / "got").read_bytes().endswith(b"\n100000\n")


def test_files_upload_of_what_is_no_regular_file_is_refused(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    """To open a FIFO waits for ever, in a thread that nobody can end."""
    os.mkfifo(tmp_path / "pipe")

    for each in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(PathRefusedError, match=each.name):
            sandbox.files.upload(each, "/pipe")


def test_files_failed_download_leaves_nothing(sandbox: Sandbox, tmp_path: Path) -> None:
    """Half a file under the right name would be taken for the whole."""
    local = tmp_path / "local"
    local.mkdir()
    with pytest.raises(PathNotFoundError):
        sandbox.files.download("/nothing", local / "got")
    with pytest.raises(PathNotFoundError):
        sandbox.files.download_tree("/nothing", local / "tree")
    assert [path for path in local.rglob("*") if path.is_file()] == []


def test_files_trees_go_up_and_come_down(sandbox: Sandbox, tmp_path: Path) -> None:
    """A repository goes in, the agent's work comes out."""
    source = tmp_path / "source"
    (source / "pkg").mkdir(parents=True)
    (source / "pkg/run").write_bytes(b"#!/bin/sh\necho deep\n")
    (source / "pkg/run").chmod(0o755)
    (source / "link").symlink_to("pkg/run")
    assert sandbox.files.upload_tree(source, "/repo") == 3
    assert sandbox.exec(["./repo/link"]).stdout == b"deep\n"

    sandbox.exec("echo more > repo/pkg/more")
    sandbox.files.download_tree("/repo", tmp_path / "got")
    assert (tmp_path / "got/link").readlink() == Path("pkg/run")
    assert (tmp_path / "got/pkg/run").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "got/pkg/more").read_bytes() == b"more\n"


def test_files_hostile_tree_does_not_leave_the_target(sandbox: Sandbox, tmp_path: Path) -> None:
    """The agent plants a link; the host must not make it."""
    sandbox.exec("mkdir evil; ln -s /etc evil/out")
    with pytest.raises(PathRefusedError, match="out"):
        sandbox.files.download_tree("/evil", tmp_path / "got")
    assert list((tmp_path / "got").iterdir()) == []


def test_files_tar_streams_both_ways(sandbox: Sandbox) -> None:
    """Plain archives, for those who keep them."""
    sandbox.files.write("/a/x", b"1")
    archive = b"".join(sandbox.files.tar_down("/a"))
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        assert tar.extractfile("x").read() == b"1"  # type: ignore[union-attr]
    assert sandbox.files.tar_up("/b", io.BytesIO(archive)) >= 1
    assert sandbox.files.read("/b/x") == b"1"


def test_files_upload_tree_of_special_files_is_refused(sandbox: Sandbox, tmp_path: Path) -> None:
    """The fault is local, and is raised as what it is, with the transfer ended."""
    with pytest.raises(FileNotFoundError, match="nothing"):
        sandbox.files.upload_tree(tmp_path / "nothing", "/x")
    with pytest.raises(NotADirectoryError):
        sandbox.files.upload_tree(__file__, "/x")


@pytest.mark.root
def test_files_of_any_size_cost_no_memory(
    native_client: SandboxClient, debian_image: Image
) -> None:
    """A file, or a set of them, that is held whole takes the machine along (2 GiB by hand)."""
    mebibyte = bytes(range(256)) * 4096
    with native_client.create_sandbox(debian_image.name) as sandbox:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = _peak_of_memory()

        assert sandbox.files.write("/big", (mebibyte for _ in range(512))) == 512 << 20
        assert sum(len(piece) for piece in sandbox.files.iterate("/big")) == 512 << 20
        assert sum(len(piece) for piece in sandbox.files.tar_down("/big")) > 512 << 20

        assert _peak_of_memory() - before < 64 << 20


def _peak_of_memory() -> int:
    """Return the most bytes of memory that this process has had since its peak began anew."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel tells no peak")
