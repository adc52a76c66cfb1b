"""The file API over a root descriptor: what it does when nobody is hostile."""

from __future__ import annotations

import asyncio
import io
import os
import resource
import stat
import subprocess
import tarfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coldframe.host import fileops, fsthreads, rootfs
from coldframe.host.idranges import FIRST_ID
from coldframe.protocol.errors import (
    FileError,
    InvalidRequestError,
    PathExistsError,
    PathNotFoundError,
    PathRefusedError,
    SandboxGoneError,
    StorageFullError,
)
from coldframe.protocol.models import FileKind
from tests.fixtures.runtime import Tree, open_descriptors, pieces

MIB = 1 << 20


async def read(tree: Tree, path: str | bytes, **span: int) -> bytes:
    return b"".join([piece async for piece in tree.files.read(path, **span)])


def member_names(archive: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        return opened.getnames()


async def test_write_new_file_belongs_to_owner_and_so_do_parents(tree: Tree) -> None:
    """Files of the host's ids could not be touched by the sandbox's own processes."""
    assert await tree.files.write("/a/b/c", pieces(b"he", b"llo"), owner=(1000, 1001)) == 5

    assert await read(tree, "/a/b/c") == b"hello"
    for path in ("/a/b/c", "/a/b", "/a"):
        found = await tree.files.stat(path)
        assert (found.uid, found.gid) == (1000, 1001)
    assert (tree.path / "a/b/c").stat().st_uid == tree.id_base + 1000


async def test_write_existing_file_keeps_mode_and_owner(tree: Tree) -> None:
    """An editor that takes a script's x bit away breaks the next command."""
    await tree.files.write("/run.sh", pieces(b"old"), mode=0o750, owner=(5, 6))

    await tree.files.write("/run.sh", pieces(b"new"), mode=0o600, owner=(0, 0))

    found = await tree.files.stat("/run.sh")
    assert (found.mode, found.uid, found.gid) == (0o750, 5, 6)
    assert await read(tree, "/run.sh") == b"new"


async def test_write_mode_is_exact_whatever_the_umask(tree: Tree) -> None:
    """The host's umask is none of the sandbox's business."""
    old = os.umask(0o077)
    try:
        await tree.files.write("/open", pieces(b""), mode=0o6777)
        await tree.files.mkdir("/dir/deep", mode=0o2775)
    finally:
        os.umask(old)

    assert (await tree.files.stat("/open")).mode == 0o6777
    assert (await tree.files.stat("/dir/deep")).mode == 0o2775
    assert (await tree.files.stat("/dir")).mode == 0o755


async def test_write_through_link_changes_what_it_leads_to(tree: Tree) -> None:
    """Replacing the link itself would leave the real file stale."""
    await tree.files.write("/etc/real", pieces(b"1"))
    (tree.path / "link").symlink_to("/etc/real")
    (tree.path / "etc/dangling").symlink_to("../etc/./new")

    await tree.files.write("/link", pieces(b"2"))
    await tree.files.write("/etc/dangling", pieces(b"3"))

    assert (await tree.files.stat("/link", follow=False)).kind is FileKind.LINK
    assert await read(tree, "/etc/real") == b"2"
    assert (tree.path / "etc/new").read_bytes() == b"3"


async def test_write_that_fails_midway_leaves_old_content_and_nothing_else(tree: Tree) -> None:
    """A half-written file is worse than none."""
    await tree.files.write("/f", pieces(b"old"))

    async def breaks() -> AsyncIterator[bytes]:
        yield b"new"
        raise ConnectionResetError("the client went away")

    with pytest.raises(ConnectionResetError):
        await tree.files.write("/f", breaks())

    assert await read(tree, "/f") == b"old"
    assert [path.name for path in tree.path.iterdir()] == ["f"]


async def test_write_cancelled_leaves_nothing(tree: Tree) -> None:
    """Cancelled uploads must not fill the sandbox's disk with temporary files."""
    reached = asyncio.Event()

    async def stalls() -> AsyncIterator[bytes]:
        yield b"x"
        reached.set()
        await asyncio.Event().wait()

    writing = asyncio.ensure_future(tree.files.write("/f", stalls()))
    await reached.wait()
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing

    assert list(tree.path.iterdir()) == []


async def test_read_range_gives_exactly_that_range(tree: Tree) -> None:
    """Paging through a large log reads each byte once."""
    content = os.urandom(3 * MIB)
    await tree.files.write("/big", pieces(content))

    assert (
        await read(tree, "/big", offset=MIB - 1, length=MIB + 2) == content[MIB - 1 : 2 * MIB + 1]
    )
    assert await read(tree, "/big", offset=3 * MIB - 1, length=100) == content[-1:]
    assert await read(tree, "/big", offset=9 * MIB) == b""
    with pytest.raises(InvalidRequestError):
        await read(tree, "/big", offset=-1)


async def test_read_beyond_what_the_kernel_counts_is_typed(tree: Tree) -> None:
    """An OverflowError from a thread says nothing about the request."""
    await tree.files.write("/f", pieces(b"content"))

    with pytest.raises(InvalidRequestError, match="offset"):
        await read(tree, "/f", offset=1 << 70)
    assert await read(tree, "/f", offset=(1 << 63) - 1) == b""
    assert await read(tree, "/f", offset=3, length=1 << 70) == b"tent"


@pytest.mark.parametrize("path", [None, 5, ["/f"]])
async def test_path_of_another_type_is_typed(tree: Tree, path: Any) -> None:
    """Who drives the node directly gets the same clear answer."""
    with pytest.raises(InvalidRequestError, match="neither text nor bytes"):
        await read(tree, path)


async def test_list_describes_entries_in_the_sandboxes_ids(tree: Tree) -> None:
    """Names are bytes: not every name is text."""
    await tree.files.write(b"/dir/\xff\n", pieces(b"12"), mode=0o640, owner=(7, 8))
    (tree.path / "dir/link").symlink_to("nowhere")

    entries = await tree.files.list("/dir")

    assert [entry.name for entry in entries] == [b"link", b"\xff\n"]
    assert entries[0].stat.target == b"nowhere"
    found = entries[1].stat
    assert (found.kind, found.size, found.mode, found.uid, found.gid) == (
        FileKind.FILE,
        2,
        0o640,
        7,
        8,
    )


async def test_mkdir_existing_directory_is_fine_unless_forbidden(tree: Tree) -> None:
    """Callers say whether they need the directory or need to be the one who made it."""
    await tree.files.mkdir("/d")
    await tree.files.mkdir("/d")

    with pytest.raises(PathExistsError):
        await tree.files.mkdir("/d", exist_ok=False)
    with pytest.raises(PathNotFoundError):
        await tree.files.mkdir("/x/y", parents=False)
    await tree.files.write("/file", pieces(b""))
    with pytest.raises(PathExistsError):
        await tree.files.mkdir("/file")
    with pytest.raises(PathExistsError):
        await tree.files.mkdir("/file/below")


async def test_move_replaces_files_and_refuses_full_directories(tree: Tree) -> None:
    """As rename does: atomic, and nothing is lost by accident."""
    await tree.files.write("/a", pieces(b"a"))
    await tree.files.write("/b", pieces(b"b"))
    await tree.files.write("/full/x", pieces(b"x"))
    await tree.files.mkdir("/dir")

    await tree.files.move("/a", "/b")

    assert await read(tree, "/b") == b"a"
    with pytest.raises(PathExistsError):
        await tree.files.move("/dir", "/full")
    with pytest.raises(PathNotFoundError):
        await tree.files.move("/a", "/c")
    with pytest.raises(PathRefusedError):
        await tree.files.move("/full", "/full/below")
    with pytest.raises(PathRefusedError):
        await tree.files.move("/", "/b")


async def test_remove_of_full_directory_needs_recursive(tree: Tree) -> None:
    """One typing error must not cost a tree."""
    await tree.files.write("/d/e/f", pieces(b""))

    with pytest.raises(PathExistsError, match=r"'/d': .*recursive=True"):
        await tree.files.remove("/d")
    await tree.files.remove("/d", recursive=True)

    with pytest.raises(PathNotFoundError):
        await tree.files.remove("/d")
    with pytest.raises(PathRefusedError):
        await tree.files.remove("/", recursive=True)


async def test_chown_outside_the_sandboxes_ids_is_refused(tree: Tree) -> None:
    """65536 would be the root of the neighbour."""
    await tree.files.write("/f", pieces(b""))

    for uid, gid in ((65536, 0), (0, -1), (1 << 32, 0)):
        with pytest.raises(InvalidRequestError):
            await tree.files.chown("/f", uid, gid)
        with pytest.raises(InvalidRequestError):
            await tree.files.write("/g", pieces(b""), owner=(uid, gid))
    await tree.files.chown("/f", 65535, 33)
    await tree.files.chmod("/f", 0o4711)

    found = await tree.files.stat("/f")
    assert (found.uid, found.gid, found.mode) == (65535, 33, 0o4711)


async def test_directory_closed_to_all_is_still_reached(tree: Tree) -> None:
    """A mode of 0700 of another user in the sandbox is no wall for its owner outside."""
    await tree.files.mkdir("/home/user", mode=0o700, owner=(1000, 1000))
    (tree.path / "home").chmod(0)

    await tree.files.write("/home/user/f", pieces(b"x"), owner=(1001, 1001), mode=0)

    assert await read(tree, "/home/user/f") == b"x"
    assert (await tree.files.stat("/home/user/f")).uid == 1001


@pytest.mark.parametrize("path", ["relative", "", "/a\0b"])
async def test_path_that_is_no_absolute_path_is_refused(tree: Tree, path: str) -> None:
    """Relative to what?"""
    with pytest.raises(InvalidRequestError):
        await tree.files.stat(path)


async def test_closed_access_raises_gone(tree: Tree) -> None:
    """The descriptor's number may be another sandbox's root by now."""
    tree.files.close()
    tree.files.close()

    with pytest.raises(SandboxGoneError):
        await tree.files.stat("/")
    with pytest.raises(SandboxGoneError):
        await read(tree, "/x")


async def test_two_gigabytes_pass_in_bounded_memory(tree: Tree) -> None:
    """Uploads that are buffered whole kill the node."""
    piece = bytes(MIB)

    async def zeros() -> AsyncIterator[bytes]:
        for _ in range(256):
            yield piece

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert await tree.files.write("/big", zeros()) == 256 * MIB
    os.truncate(tree.path / "big", 2048 * MIB)
    total = 0
    async for part in tree.files.read("/big"):
        total += len(part)
    async for part in tree.files.tar_down("/"):
        total += len(part)

    assert total > 2048 * MIB + 256 * MIB
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 * 1024


# --- archives -------------------------------------------------------------------------


async def test_tar_down_and_up_keeps_links_holes_modes_and_owners(tree: Tree) -> None:
    """A snapshot of a directory that loses a bit is not the directory."""
    await tree.files.write("/s/bin/tool", pieces(b"#!"), mode=0o4755, owner=(3, 4))
    os.link(tree.path / "s/bin/tool", tree.path / "s/hard")
    (tree.path / "s/bin/link").symlink_to("../../outside")
    (tree.path / "s/sparse").touch()
    os.truncate(tree.path / "s/sparse", 64 * MIB)
    with (tree.path / "s/sparse").open("ab") as file:
        file.write(b"data")
    os.truncate(tree.path / "s/sparse", 1 << 40)
    await tree.files.write("/s/" + "long/" * 60 + "n" * 200, pieces(b"deep"))
    await tree.files.write(b"/s/\xff", pieces(b"bytes"))
    os.mkfifo(tree.path / "s/fifo")

    archive = b"".join([part async for part in tree.files.tar_down("/s")])
    count = await tree.files.tar_up("/t", pieces(archive[:1000], b"", archive[1000:]))

    assert count == len(member_names(archive))
    tool = await tree.files.stat("/t/bin/tool")
    assert (tool.mode, tool.uid, tool.gid, tool.nlink) == (0o4755, 3, 4, 2)
    assert (tree.path / "t/hard").stat().st_ino == (tree.path / "t/bin/tool").stat().st_ino
    assert str((tree.path / "t/bin/link").readlink()) == "../../outside"
    sparse = (tree.path / "t/sparse").stat()
    assert (sparse.st_size, sparse.st_blocks * 512 < MIB) == (1 << 40, True)
    assert await read(tree, "/t/sparse", offset=64 * MIB, length=5) == b"data\0"
    assert await read(tree, "/t/" + "long/" * 60 + "n" * 200) == b"deep"
    assert await read(tree, b"/t/\xff") == b"bytes"
    assert not (tree.path / "t/fifo").exists()


async def test_tar_up_with_owner_overrides_the_archive(tree: Tree) -> None:
    """An archive made on somebody's laptop carries ids of theirs."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        member = tarfile.TarInfo("d/f")
        member.uid, member.gid, member.size = 501, 20, 1
        archive.addfile(member, io.BytesIO(b"x"))
        link = tarfile.TarInfo("d/l")
        link.type, link.linkname, link.uid = tarfile.SYMTYPE, "f", 501
        archive.addfile(link)

    await tree.files.tar_up("/x", pieces(buffer.getvalue()), owner=(42, 43))

    for name in ("/x/d", "/x/d/f", "/x/d/l"):
        found = await tree.files.stat(name, follow=False)
        assert (found.uid, found.gid) == (42, 43)


@pytest.mark.parametrize("content", [b"", b"no archive at all" * 100, bytes(100)])
async def test_tar_up_of_what_is_no_archive_is_typed(tree: Tree, content: bytes) -> None:
    """A proxy's error page is not an empty success."""
    with pytest.raises(FileError):
        await tree.files.tar_up("/x", pieces(content))


@pytest.mark.parametrize("kept", [50_000, 100_864])
async def test_tar_up_cut_short_is_an_error(tree: Tree, kept: int) -> None:
    """A lost connection must not look like a small archive, nor right behind a member."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        member = tarfile.TarInfo("f")
        member.size = 100_000
        archive.addfile(member, io.BytesIO(bytes(100_000)))

    with pytest.raises(FileError):
        await tree.files.tar_up("/x", pieces(buffer.getvalue()[:kept]))

    assert [one.name for one in (tree.path / "x").iterdir()] == ["f"][: kept // 100_000]


async def test_tar_up_of_too_large_a_header_is_refused(tree: Tree) -> None:
    """A caller must not choose how much memory the node takes for a name."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo("f")
        member.pax_headers = {"comment": "c" * (2 << 20)}
        archive.addfile(member)

    with pytest.raises(FileError, match="at most 1048576 are read"):
        await tree.files.tar_up("/x", pieces(buffer.getvalue()))


async def test_tar_up_whose_sender_fails_ends_with_its_error(tree: Tree) -> None:
    """The thread that waits for the next piece must not wait for ever."""

    async def breaks() -> AsyncIterator[bytes]:
        yield tarfile.TarInfo("d").tobuf()[:300]
        raise ConnectionResetError("the client went away")

    with pytest.raises(ConnectionResetError):
        await tree.files.tar_up("/x", breaks())


async def test_tar_up_cancelled_while_sender_stalls_ends(tree: Tree) -> None:
    """Deleting a sandbox cancels its transfers."""
    reached = asyncio.Event()

    async def stalls() -> AsyncIterator[bytes]:
        reached.set()
        await asyncio.Event().wait()
        yield b""

    unpacking = asyncio.ensure_future(tree.files.tar_up("/x", stalls()))
    await reached.wait()
    unpacking.cancel()

    with pytest.raises(asyncio.CancelledError):
        await unpacking


async def test_tar_down_abandoned_gives_its_descriptors_back(tree: Tree) -> None:
    """A client that hangs up in the middle must not cost descriptors."""
    for number in range(50):
        await tree.files.write(f"/d/{number}/f", pieces(os.urandom(MIB // 4)))
    before = open_descriptors()

    archive = tree.files.tar_down("/d")
    await anext(archive)
    await archive.aclose()

    assert open_descriptors() == before


async def test_many_transfers_at_once_do_not_wait_for_each_other(tree: Tree) -> None:
    """A slow reader holds no thread while it is slow."""
    await tree.files.write("/f", pieces(bytes(4 * MIB)))
    slow = [tree.files.read("/f") for _ in range(20)]
    for reader in slow:
        await anext(reader)

    assert len(await read(tree, "/f")) == 4 * MIB
    for reader in slow:
        await reader.aclose()


async def test_stat_follows_links_only_when_asked(tree: Tree) -> None:
    """`ls -l` and `cat` want different answers."""
    await tree.files.write("/f", pieces(b"123"))
    (tree.path / "link").symlink_to("f")

    assert (await tree.files.stat("/link")).size == 3
    link = await tree.files.stat("/link", follow=False)
    assert (link.kind, link.target) == (FileKind.LINK, b"f")
    assert stat.S_ISLNK((tree.path / "link").lstat().st_mode)


async def _cancelled_inside(task: asyncio.Task[Any], inside: threading.Event) -> None:
    """Cancel a transfer while one of its jobs runs in a thread."""
    await asyncio.to_thread(inside.wait, 30)
    task.cancel()
    await asyncio.sleep(0)  # what the cancellation does at once, it has done


class _Slow:
    """Stands for a job that takes its time: says that it runs, and goes on when told to."""

    def __init__(self, job: Callable[..., Any]) -> None:
        self._job = job
        self.runs, self.goes_on = threading.Event(), threading.Event()

    def __call__(self, *args: Any) -> Any:
        self.runs.set()
        assert self.goes_on.wait(30)
        return self._job(*args)


async def test_tar_down_cancelled_in_a_step_ends_cancelled(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The generator still runs in a thread: to close it there and then is an error of its own."""
    slow, closed = _Slow(bytes), threading.Event()

    def tar_pieces(*_: object) -> Iterator[bytes]:
        try:
            yield slow(1)
        finally:
            closed.set()

    monkeypatch.setattr(rootfs, "tar_pieces", tar_pieces)
    step = asyncio.ensure_future(anext(tree.files.tar_down("/")))
    await _cancelled_inside(step, slow.runs)
    await _jobs_so_far(tree)
    slow.goes_on.set()

    with pytest.raises(asyncio.CancelledError):
        await step
    assert closed.is_set()


async def test_write_cancelled_in_a_step_closes_nothing_under_it(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of a closed descriptor is soon another file's: the step would write into that."""
    slow = _Slow(os.write)
    descriptors: list[int] = []

    def append(pending: fileops.PendingFile, data: bytes) -> None:
        descriptors.append(pending.fd)
        slow(pending.fd, data)

    monkeypatch.setattr(fileops.PendingFile, "append", append)
    writing = asyncio.ensure_future(tree.files.write("/f", pieces(b"x")))
    await _cancelled_inside(writing, slow.runs)
    await _jobs_so_far(tree)

    assert _names(descriptors[0]).parent == tree.path
    slow.goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert list(tree.path.iterdir()) == []


async def test_read_cancelled_in_a_step_closes_nothing_under_it(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would read another file, of another sandbox perhaps."""
    await tree.files.write("/f", pieces(b"content"))
    slow = _Slow(fileops.read_piece)
    descriptors: list[int] = []

    def read_piece(fd: int, *args: Any) -> Any:
        descriptors.append(fd)
        return slow(fd, *args)

    monkeypatch.setattr(fileops, "read_piece", read_piece)
    step = asyncio.ensure_future(anext(tree.files.read("/f")))
    await _cancelled_inside(step, slow.runs)
    await _jobs_so_far(tree)

    assert _names(descriptors[0]) == tree.path / "f"
    slow.goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await step


async def test_export_cancelled_returns_when_its_thread_has_ended() -> None:
    """Its caller removes the target and the sandbox next: not under the thread's feet."""
    slow = _Slow(int)
    exporting = asyncio.ensure_future(fsthreads.run_to_its_end(slow, "1"))
    await _cancelled_inside(exporting, slow.runs)
    await asyncio.sleep(0)
    assert not exporting.done()

    slow.goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await exporting


def _names(fd: int) -> Path:
    return Path(f"/proc/self/fd/{fd}").readlink()


async def _jobs_so_far(tree: Tree) -> None:
    """Return when what was asked of the other thread so far is done."""
    await tree.files.stat("/")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, to be made read-only."""
    disk = tmp_path / "disk"
    disk.mkdir()
    _mount("-t", "tmpfs", "none", str(disk))
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


async def test_write_where_the_disk_has_filled_up_is_no_failure_of_the_agents(disk: Path) -> None:
    """A pool that finds no room is read-only; booked on the agent it might become a reward."""
    threads = fsthreads.FileThreads(1)
    tree = Tree(disk, threads, FIRST_ID)
    try:
        await tree.files.write(b"/kept", pieces(b"here"))
        _mount("-o", "remount,ro", str(disk))

        for change in (tree.files.write(b"/new", pieces(b"x")), tree.files.remove(b"/kept")):
            with pytest.raises(StorageFullError, match="has been full"):
                await change
        assert await read(tree, "/kept") == b"here"
    finally:
        tree.files.close()
        threads.close()
