"""Whatever a sandbox puts into its tree: the file API never leaves, blocks on or fills the host."""

from __future__ import annotations

import asyncio
import io
import os
import socket
import stat
import subprocess
import tarfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import pytest

from coldframe.host import fileops
from coldframe.protocol.errors import (
    ColdframeError,
    FileError,
    FileTooLargeError,
    InvalidRequestError,
    PathExistsError,
    PathNotFoundError,
    PathRefusedError,
)
from tests.fixtures.runtime import Tree, pieces

RACES = 2000


async def read(tree: Tree, path: str | bytes) -> bytes:
    return b"".join([piece async for piece in tree.files.read(path)])


def archive_of(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for member, content in members:
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.mode = kind, link, 0o755
    return made


# --- ways out -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target",
    [
        "../secret",
        "../../../../../../{outside}/secret",
        "{outside}/secret",
        "/proc/self/root/etc/passwd",
    ],
)
async def test_read_through_link_stays_inside(tree: Tree, target: str) -> None:
    """A link is the oldest way to read the host's files."""
    outside = str(tree.path.parent)
    (tree.path / "link").symlink_to(target.format(outside=outside))
    (tree.path / "dir").symlink_to(outside)

    for path in ("/link", "/dir/secret", "/../secret", "/dir/../secret"):
        with pytest.raises((PathNotFoundError, PathRefusedError)):
            await read(tree, path)


async def test_write_and_remove_through_link_stay_inside(tree: Tree) -> None:
    """The same for changing the host's files."""
    secret = tree.path.parent / "secret"
    (tree.path / "link").symlink_to(secret)
    (tree.path / "dir").symlink_to(tree.path.parent)

    with pytest.raises(PathNotFoundError):
        await tree.files.write("/link", pieces(b"overwritten"), parents=False)
    with pytest.raises(ColdframeError):
        await tree.files.write("/dir/secret", pieces(b"overwritten"))
    with pytest.raises(PathNotFoundError):
        await tree.files.remove("/dir/secret")
    with pytest.raises(PathNotFoundError):
        await tree.files.move("/dir/secret", "/stolen")
    for change in (tree.files.chmod("/link", 0o777), tree.files.chown("/link", 0, 0)):
        with pytest.raises(PathNotFoundError):
            await change
    await tree.files.remove("/dir")
    await tree.files.remove("/link")

    assert secret.read_bytes() == b"host secret"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o644


async def test_remove_recursive_never_follows_a_link(tree: Tree) -> None:
    """`rm -r` on a tree with a link to / has emptied machines before."""
    victim = tree.path.parent / "victim"
    victim.mkdir()
    (victim / "file").write_bytes(b"kept")
    (tree.path / "d/e").mkdir(parents=True)
    (tree.path / "d/e/out").symlink_to(victim)
    (tree.path / "d/up").symlink_to("..")

    await tree.files.remove("/d", recursive=True)

    assert (victim / "file").read_bytes() == b"kept"
    assert list(tree.path.iterdir()) == []


# --- things that block ----------------------------------------------------------------


@pytest.fixture
def odd_things(tree: Tree) -> Iterator[list[str]]:
    """A FIFO, a socket, devices."""
    os.mkfifo(tree.path / "fifo")
    os.mknod(tree.path / "zero", stat.S_IFCHR | 0o666, os.makedev(1, 5))
    os.mknod(tree.path / "disk", stat.S_IFBLK | 0o666, os.makedev(254, 0))
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tree.path / "socket"))
        yield ["/fifo", "/zero", "/disk", "/socket"]


async def test_content_of_odd_things_is_refused_at_once(tree: Tree, odd_things: list[str]) -> None:
    """Opening a FIFO waits for ever, a tape rewinds, /dev/zero has no end."""
    for path in odd_things:
        with pytest.raises(PathRefusedError):
            await asyncio.wait_for(read(tree, path), 5)
        with pytest.raises(PathRefusedError):
            await asyncio.wait_for(tree.files.write(path, pieces(b"x")), 5)


async def test_odd_things_are_described_moved_and_removed(
    tree: Tree, odd_things: list[str]
) -> None:
    """What cannot be read can still be seen and cleared away."""
    kinds = [(await tree.files.stat(path)).kind.value for path in odd_things]
    assert kinds == ["fifo", "device", "device", "socket"]

    archive = b"".join([piece async for piece in tree.files.tar_down("/")])
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        assert opened.getnames() == []

    await tree.files.move("/fifo", "/other")
    for path in ("/other", "/zero", "/disk", "/socket"):
        await tree.files.remove(path)
    assert await tree.files.list("/") == ()


@pytest.fixture
def mounted(tree: Tree) -> Iterator[None]:
    """A /proc and a tmpfs at /dev."""
    for point, kind in (("proc", "proc"), ("dev", "tmpfs")):
        (tree.path / point).mkdir()
        subprocess.run(["mount", "-t", kind, kind, str(tree.path / point)], check=True)
    yield
    for point in ("proc", "dev"):
        subprocess.run(["umount", str(tree.path / point)], check=True)


@pytest.mark.usefixtures("mounted")
async def test_other_mounts_are_refused_with_advice(tree: Tree) -> None:
    """Reading below /proc or /dev can block, or act on the kernel."""
    (tree.path / "link").symlink_to("proc/self/environ")

    for path in ("/proc/self/status", "/proc/1/root/etc/passwd", "/dev/x", "/proc", "/link"):
        with pytest.raises(PathRefusedError, match="use exec"):
            await read(tree, path)
    with pytest.raises(PathRefusedError):
        await tree.files.write("/dev/x", pieces(b""))
    with pytest.raises(PathRefusedError):
        await tree.files.remove("/proc", recursive=True)
    archive = b"".join([piece async for piece in tree.files.tar_down("/")])
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        assert opened.getnames() == ["link"]


# --- races ----------------------------------------------------------------------------


@contextmanager
def swapping(tree: Tree, first: str, second: str, shared: str) -> Iterator[None]:
    """Let `shared` be a link to `first` and to `second` in turn, as fast as possible."""
    stop = threading.Event()

    def swap() -> None:
        targets = (first, second)
        turn = 0
        while not stop.is_set():
            temporary = tree.path / f".swap{turn % 2}"
            temporary.symlink_to(targets[turn % 2])
            temporary.rename(tree.path / shared)
            turn += 1

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


async def test_read_during_rename_race_never_gives_host_bytes(tree: Tree) -> None:
    """A check and an open with a gap between them lose this race sooner or later."""
    inside = tree.path / "inside"
    inside.mkdir()
    (inside / "secret").write_bytes(b"own file")
    outside = str(tree.path.parent)
    seen: set[bytes] = set()

    with swapping(tree, "inside", outside, "shared"):
        for _ in range(RACES):
            try:
                seen.add(await read(tree, "/shared/secret"))
            except (PathNotFoundError, PathRefusedError):
                continue

    assert seen <= {b"own file"}


async def test_write_and_remove_during_rename_race_never_touch_the_host(tree: Tree) -> None:
    """The same for what changes files."""
    (tree.path / "inside").mkdir()
    outside = tree.path.parent

    with swapping(tree, "inside", str(outside), "shared"):
        for turn in range(RACES // 4):
            try:
                await tree.files.write("/shared/secret", pieces(b"evil"), parents=False)
                await tree.files.remove("/shared/secret")
                await tree.files.mkdir(f"/shared/made{turn}", parents=False)
            except (PathNotFoundError, PathRefusedError, PathExistsError):
                continue

    assert (outside / "secret").read_bytes() == b"host secret"
    assert not list(outside.glob("made*"))


async def test_fifo_swapped_in_for_a_file_never_blocks(tree: Tree) -> None:
    """The kind is looked at before the content is opened, on the same descriptor."""
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            (tree.path / "file").write_bytes(b"content")
            (tree.path / "file").rename(tree.path / "thing")
            os.mkfifo(tree.path / "pipe")
            (tree.path / "pipe").rename(tree.path / "thing")

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        for _ in range(RACES):
            try:
                assert await asyncio.wait_for(read(tree, "/thing"), 5) in {b"content", b""}
            except (PathRefusedError, PathNotFoundError):
                continue
    finally:
        stop.set()
        thread.join()


async def test_remove_of_tree_that_moves_about_never_leaves_it(tree: Tree) -> None:
    """Climbing out of a directory by `..` after it was moved ends somewhere else."""
    stop = threading.Event()
    kept = tree.path / "kept"
    kept.mkdir()
    (kept / "precious").write_bytes(b"kept")

    def move_about() -> None:
        while not stop.is_set():
            for source, target in (("doomed/a", "kept/a"), ("kept/a", "doomed/a")):
                try:
                    (tree.path / source).rename(tree.path / target)
                except OSError:
                    continue

    thread = threading.Thread(target=move_about)
    thread.start()
    try:
        for _ in range(60):
            deep = tree.path / "doomed/a" / "/".join("d" * 80)
            try:
                deep.mkdir(parents=True, exist_ok=True)
                (deep / "f").write_bytes(b"")
            except OSError:  # moved while it was made
                continue
            try:
                await tree.files.remove("/doomed", recursive=True)
            except FileError:
                continue
    finally:
        stop.set()
        thread.join()

    assert (kept / "precious").read_bytes() == b"kept"
    assert (tree.path.parent / "secret").exists()


async def test_remove_of_directory_that_is_filled_again_takes_another_pass(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever writes in a loop meets the moment between the last unlink and the rmdir."""
    (tree.path / "full/below").mkdir(parents=True)
    remove, refills = os.rmdir, dict.fromkeys((b"full", b"below"), 3)

    def refilled(name: bytes, *, dir_fd: int) -> None:
        if refills[name]:
            refills[name] -= 1
            new = (tree.path / "full" if name == b"full" else tree.path / "full/below") / "again"
            new.write_bytes(b"")
        remove(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "rmdir", refilled)
    await tree.files.remove("/full", recursive=True)

    assert list(tree.path.iterdir()) == []
    assert not any(refills.values())


# --- sizes ----------------------------------------------------------------------------


def make_deep(tree: Tree, depth: int) -> None:
    fd = os.open(tree.path, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d" * 200, dir_fd=fd)
        below = os.open("d" * 200, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(os.open("file", os.O_CREAT, dir_fd=fd))
    os.close(fd)


async def test_remove_of_any_depth_uses_few_descriptors(tree: Tree) -> None:
    """1,500 levels are beyond PATH_MAX, recursion and sensible descriptor limits."""
    make_deep(tree, 1500)

    await tree.files.remove("/" + "d" * 200, recursive=True)

    assert list(tree.path.iterdir()) == []


async def test_tar_of_absurd_depth_fails_typed(tree: Tree) -> None:
    """Bounded, and said."""
    make_deep(tree, 700)
    try:
        with pytest.raises(FileError, match="deeper"):
            async for _ in tree.files.tar_down("/"):
                pass
    finally:
        await tree.files.remove("/" + "d" * 200, recursive=True)


async def test_list_of_absurdly_full_directory_fails_typed(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory of the sandbox must not fill the node's memory."""
    monkeypatch.setattr(fileops, "LIST_LIMIT", 1000)
    fd = os.open(tree.path, os.O_RDONLY)
    for number in range(1001):
        os.mknod(f"f{number}", dir_fd=fd)
    os.close(fd)

    with pytest.raises(FileTooLargeError):
        await tree.files.list("/")
    with pytest.raises(PathExistsError):
        await read(tree, "/")


async def test_endless_link_chain_is_refused(tree: Tree) -> None:
    """a -> b -> a."""
    (tree.path / "a").symlink_to("b")
    (tree.path / "b").symlink_to("a")

    for operation in (
        read(tree, "/a"),
        tree.files.write("/a", pieces(b"")),
        tree.files.mkdir("/a/c"),
    ):
        with pytest.raises(PathRefusedError):
            await operation


# --- archives -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        member("/absolute"),
        member("../up"),
        member("a/../../up"),
        member("out/file"),
        member("hard", tarfile.LNKTYPE, "../../secret"),
        member("hard", tarfile.LNKTYPE, "/etc/passwd"),
        member("hard", tarfile.LNKTYPE, "out/secret"),
        member("fifo", tarfile.FIFOTYPE),
        member("device", tarfile.CHRTYPE),
        member("disk", tarfile.BLKTYPE),
    ],
    ids=lambda bad: f"{bad.name}-{bad.type.decode()}-{bad.linkname}",
)
async def test_tar_up_member_that_leaves_is_refused_and_ends_it(
    tree: Tree, bad: tarfile.TarInfo
) -> None:
    """Zip slip, by every way that tar has."""
    (tree.path / "target").mkdir()
    (tree.path / "target/out").symlink_to("..")
    before = sorted(path.name for path in tree.path.iterdir())
    archive = archive_of((member("good"), b"1"), (bad, b""), (member("later"), b"2"))

    with pytest.raises(PathRefusedError):
        await tree.files.tar_up("/target", pieces(archive))

    assert (tree.path / "target/good").read_bytes() == b"1"
    assert not (tree.path / "target/later").exists()
    assert sorted(path.name for path in tree.path.iterdir()) == before
    assert (tree.path.parent / "secret").read_bytes() == b"host secret"


async def test_tar_up_link_planted_by_the_archive_is_not_followed(tree: Tree) -> None:
    """First a link to /, then a file through it."""
    for target in ("/", "..", str(tree.path.parent)):
        archive = archive_of(
            (member("door", tarfile.SYMTYPE, target), b""), (member("door/evil"), b"x")
        )
        with pytest.raises(PathRefusedError):
            await tree.files.tar_up("/t", pieces(archive))

    assert not (tree.path / "evil").exists()
    assert not (tree.path.parent / "evil").exists()


async def test_tar_up_ids_of_the_neighbour_are_refused(tree: Tree) -> None:
    """65536 in an archive would be the root of the next sandbox."""
    owned = member("f")
    owned.uid = 65536

    with pytest.raises(InvalidRequestError):
        await tree.files.tar_up("/t", pieces(archive_of((owned, b"x"))))


async def test_tar_up_header_bomb_is_refused_in_bounded_memory(tree: Tree) -> None:
    """A pax header of 8 GiB would be read into memory whole."""
    header = tarfile.TarInfo("././@PaxHeader")
    header.type, header.size = tarfile.XHDTYPE, 8 << 30

    async def endless() -> AsyncIterator[bytes]:
        yield header.tobuf(tarfile.GNU_FORMAT)
        while True:
            yield bytes(1 << 20)

    with pytest.raises(FileError):
        await asyncio.wait_for(tree.files.tar_up("/t", endless()), 30)


async def test_tar_up_sparse_member_of_absurd_size_fails_or_costs_nothing(tree: Tree) -> None:
    """A file of 8 EiB that is all hole."""
    sparse = member("hole")
    sparse.pax_headers = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": "hole",
        "GNU.sparse.realsize": str(1 << 62),
    }
    table = b"1\n%d\n0\n" % (1 << 62)

    with pytest.raises(FileError):
        await tree.files.tar_up("/t", pieces(archive_of((sparse, table.ljust(512, b"\0")))))

    assert list((tree.path / "t").iterdir()) == []


async def test_planted_temporary_names_are_never_used(tree: Tree) -> None:
    """A name that can be guessed could be a link that is already there."""
    secret = tree.path.parent / "secret"
    for number in range(256):
        (tree.path / f".coldframe-{number:016x}").symlink_to(secret)

    await tree.files.write("/f", pieces(b"content"))

    assert secret.read_bytes() == b"host secret"
    assert await read(tree, "/f") == b"content"
