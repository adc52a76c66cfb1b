"""Pools of uppers: what they leave, what limits hold, and what becomes of them on a full disk."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from coldframe.host.pools import BtrfsStorage
from coldframe.host.roottree import closing as closing_fd
from coldframe.protocol.errors import StorageFullError
from tests.fixtures.disks import MIB, break_pool, fill, pools_of, small_disk
from tests.fixtures.runtime import shown_files
from tests.fixtures.waiting import wait_until

GIB = 1 << 30
pytestmark = pytest.mark.root


async def _never(_directory: int, name: str) -> int:
    raise AssertionError(f"{name} is a subvolume")


def _seen(path: Path) -> bool:
    """Whether a mount of this process' namespace mentions a path."""
    return str(path) in Path("/proc/self/mountinfo").read_text()


async def test_btrfs_pool_leaves_no_file_no_mount_and_no_loop_device(tmp_path: Path) -> None:
    """After kill -9 nobody would clear them away."""
    storage = BtrfsStorage(tmp_path, "abc123", size_bytes=256 * MIB)
    assert not (tmp_path / "abc123.img").exists()
    assert str(tmp_path / "abc123.img") in shown_files()
    assert not _seen(tmp_path)

    for _ in range(2):
        os.close(storage.make("sb-a", None))
        assert storage.names() == ("sb-a",)
        await storage.remove("sb-a", _never)
        await storage.remove("sb-a", _never)
    storage.close()
    storage.close()

    assert str(tmp_path / "abc123.img") not in shown_files()


async def test_btrfs_limit_holds_and_others_are_not_touched_by_it(tmp_path: Path) -> None:
    """One sandbox that fills its share must not be everybody's disk full."""
    storage = BtrfsStorage(tmp_path, "abc123", size_bytes=256 * MIB)
    limited, free = storage.make("sb-a", MIB), storage.make("sb-b", None)

    def fill(directory: int, size: int) -> None:
        fd = os.open("f", os.O_WRONLY | os.O_CREAT, dir_fd=directory)
        try:
            for _ in range(size // 65536):
                os.write(fd, os.urandom(65536))
        finally:
            os.close(fd)

    with pytest.raises(OSError, match="quota"):
        fill(limited, 4 * MIB)
    fill(free, 4 * MIB)
    os.close(limited)
    os.close(free)
    storage.close()


async def test_full_upper_can_be_widened_and_emptied(tmp_path: Path) -> None:
    """Who is told that its disk is full must be able to do something about it."""
    with closing(BtrfsStorage(tmp_path, "abc123", size_bytes=256 * MIB)) as storage:
        upper = storage.make("sb-a", 4 * MIB)
        with closing_fd(upper), closing_fd(_file(upper, "f")) as fd:
            with pytest.raises(OSError, match="quota"):
                while True:
                    os.write(fd, os.urandom(4096))
            storage.widen("sb-a", 8 * MIB)
            assert os.write(fd, os.urandom(MIB)) == MIB
            os.unlink("f", dir_fd=upper)


def _file(upper: int, name: str) -> int:
    return os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=upper)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """One on which a pool could hold more than there is room for."""
    with small_disk(tmp_path / "disk", 2 * GIB) as path:
        yield path


def test_nothing_that_was_taken_is_lost_when_others_fill_the_disk(disk: Path) -> None:
    """btrfs takes writes that the disk has no room for, and would lose them without a word."""
    with closing(BtrfsStorage(disk, "abc123", size_bytes=GIB)) as storage:
        upper = storage.make("sb-a", None)
        taken = fill(disk, free=600 * MIB)
        over = threading.Event()

        def look() -> None:
            while not over.wait(storage.look()):
                pass

        looking = threading.Thread(target=look)
        looking.start()
        piece, written = os.urandom(MIB), 0
        try:
            with closing_fd(upper), closing_fd(_file(upper, "f")) as fd:
                with pytest.raises(OSError, match="quota"):
                    while written < 900 and os.write(fd, piece) == MIB:
                        written += 1
                    os.write(fd, piece)
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                assert written > 100
                lost = [at for at in range(written) if os.pread(fd, MIB, at * MIB) != piece]
                assert lost == []

                assert storage.settle({"sb-a"})
                assert "nearly full" in storage.why_read_only("sb-a")
                assert "may be lost" not in storage.why_read_only("sb-a")
                for refused in (storage.require_space, lambda: storage.make("sb-b", None)):
                    with pytest.raises(StorageFullError, match="nearly full"):
                        refused()
                taken.unlink()
                wait_until(lambda: storage.settle({"sb-a"}))
                assert storage.why_read_only("sb-a") == ""
                os.pwrite(fd, piece[:4096], 0)
        finally:
            over.set()
            looking.join()


def test_nothing_that_was_taken_is_lost_while_nobody_looks(disk: Path) -> None:
    """A sandbox goes on writing after the process that looked has been killed."""
    fill(disk, free=600 * MIB)
    with closing(BtrfsStorage(disk, "abc123", size_bytes=GIB)) as storage:
        upper = storage.make("sb-a", None)
        piece = os.urandom(MIB)
        with closing_fd(upper), closing_fd(_file(upper, "f")) as fd:
            written = _write_until_refused(fd, piece)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            assert [at for at in range(written) if os.pread(fd, MIB, at * MIB) != piece] == []
        assert 200 < written < 400
        storage.look()
        storage.settle({"sb-a"})
        said = storage.why_read_only("sb-a")
        assert "may be lost" not in said
        assert "can only be read" not in said


def _write_until_refused(fd: int, piece: bytes) -> int:
    written = 0
    with pytest.raises(OSError, match="quota"):
        while written < 900 and os.write(fd, piece) == len(piece):
            written += 1
        os.write(fd, piece)
    return written


def test_who_goes_on_with_a_pool_lets_nothing_be_written_before_a_look(disk: Path) -> None:
    """What the process before had stopped stays stopped."""
    storage = BtrfsStorage(disk, "abc123", size_bytes=GIB)
    with closing_fd(storage.make("sb-a", None)) as upper, closing_fd(_file(upper, "f")) as fd:
        fill(disk, free=100 * MIB)
        storage.look()
        mounts = [os.dup(mount) for mount in storage.kept()]
        storage.close()
        with closing(BtrfsStorage(disk, "abc123", mounts=mounts)) as after:
            assert after.settle({"sb-a"})
            assert "nearly full" in after.why_read_only("sb-a")
            assert _write_until_refused(fd, b"x") == 0


def test_writes_that_were_lost_all_the_same_are_said(disk: Path) -> None:
    """Others may take all room within a moment: then who has written must know."""
    with closing(BtrfsStorage(disk, "abc123", size_bytes=GIB)) as storage:
        upper = storage.make("sb-a", None)
        with closing_fd(upper), closing_fd(_file(upper, "f")) as fd:
            for _ in range(64):
                os.write(fd, os.urandom(MIB))
            fill(disk)
            storage.look()
            storage.settle({"sb-a"})
        said = storage.why_read_only("sb-a")
        assert "may be lost" in said or "can only be read" in said


async def test_broken_pool_is_replaced_and_goes_with_its_last_upper(disk: Path) -> None:
    """One full disk must not be the end of every later create."""
    with closing(BtrfsStorage(disk, "abc123", size_bytes=512 * MIB)) as storage:
        upper = storage.make("sb-a", None)
        os.close(storage.make("sb-b", None))
        with closing_fd(upper):
            with closing_fd(_file(upper, "kept")) as fd:
                os.write(fd, b"data")
                os.fsync(fd)
            break_pool(disk, upper)
        with pytest.raises(StorageFullError, match="make room"):
            storage.make("sb-c", None)
        assert "can only be read" in storage.why_read_only("sb-a")

        storage.look()
        assert storage.settle({"sb-a", "sb-b"})
        assert len(storage.kept()) == 2
        with closing_fd(storage.make("sb-c", MIB)) as fresh, closing_fd(_file(fresh, "f")) as fd:
            os.write(fd, b"more")
        assert (storage.names(), storage.why_read_only("sb-c")) == (("sb-c",), "")
        with (
            closing_fd(storage.open("sb-a")) as upper,
            closing_fd(os.open("kept", os.O_RDONLY, dir_fd=upper)) as fd,
        ):
            assert os.read(fd, 9) == b"data"

        for name in ("sb-a", "sb-b"):
            assert len(storage.kept()) == 2
            await storage.remove(name, _never)
            storage.settle({"sb-b"} if name == "sb-a" else set())
        assert len(storage.kept()) == 1
        wait_until(lambda: pools_of("abc123") == 1)
    wait_until(lambda: pools_of("abc123") == 0)
