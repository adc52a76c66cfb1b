"""Small parts: id ranges, spool windows, pipes, storage, doctor, gc."""

from __future__ import annotations

import asyncio
import fcntl
import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldframe.host import census, doctor, gc
from coldframe.host.idranges import FIRST_ID, IdRanges, is_sandbox_base
from coldframe.host.pipes import STATUS_KEPT_BYTES, CommandPipes, StatusStream, StdinFeed
from coldframe.host.spools import first_kept, read_spool, window_ends
from coldframe.host.storage import open_storage
from coldframe.protocol.errors import CapabilityError, InvalidRequestError, StorageFullError
from tests.fixtures.runtime import shown_files

MIB = 1 << 20


# --- id ranges ------------------------------------------------------------------------


def test_id_ranges_of_two_nodes_never_overlap(tmp_path: Path) -> None:
    """Two sandboxes with the same host ids share limits that the kernel keeps per user."""
    one, two = IdRanges(tmp_path), IdRanges(tmp_path)

    taken = [ranges.take() for ranges in (one, two) for _ in range(300)]

    assert len(set(taken)) == 600
    assert all(is_sandbox_base(first) for first in taken)
    assert set(taken[:300]) <= one.all
    one.close()
    assert IdRanges(tmp_path).take() == FIRST_ID
    two.close()


def test_id_range_given_back_rests_before_it_is_used_again(tmp_path: Path) -> None:
    """Whatever still hangs around of its last owner has time to go."""
    ranges = IdRanges(tmp_path)
    first = ranges.take()
    ranges.give_back(first)

    following = [ranges.take() for _ in range(255)]

    assert first not in following
    assert ranges.take() == first
    ranges.close()


# --- spools ---------------------------------------------------------------------------


class Spool:
    """A spool as the spawner writes it, and the whole stream beside it."""

    def __init__(self, path: Path, size: int) -> None:
        self.size, self.stream = size, b""
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT)

    def write(self, data: bytes) -> None:
        head = self.size // 2
        ring = self.size - head
        for byte in data:
            at = len(self.stream)
            place = at if at < head else head + (at - head) % ring
            os.pwrite(self.fd, bytes([byte]), place)
            self.stream += bytes([byte])


@given(total=st.integers(0, 200), size=st.integers(2, 64), window=st.integers(0, 80))
def test_window_of_spool_is_what_the_stream_had(
    tmp_path_factory: pytest.TempPathFactory, total: int, size: int, window: int
) -> None:
    """Head and tail are checked against the stream itself, for any sizes."""
    spool = Spool(tmp_path_factory.mktemp("spool") / "f", size)
    spool.write(os.urandom(total))

    head_end, tail_start = window_ends(total, window, size)
    head = read_spool(spool.fd, size, 0, head_end)
    tail = read_spool(spool.fd, size, tail_start, total)
    os.close(spool.fd)

    assert head == spool.stream[:head_end]
    assert tail == spool.stream[tail_start:]
    assert len(head) + len(tail) <= max(window, 0)
    if total <= min(window, size):
        assert head + tail == spool.stream


@given(total=st.integers(0, 300), size=st.integers(2, 64), cursor=st.integers(0, 300))
def test_first_kept_is_the_earliest_that_is_still_true(
    tmp_path_factory: pytest.TempPathFactory, total: int, size: int, cursor: int
) -> None:
    """One byte too early would be another turn of the ring."""
    spool = Spool(tmp_path_factory.mktemp("spool") / "f", size)
    spool.write(os.urandom(total))
    start = first_kept(size, total, min(cursor, total))

    data = read_spool(spool.fd, size, start, total) if start >= size // 2 else b""
    os.close(spool.fd)

    assert data == (spool.stream[start:] if start >= size // 2 else b"")


# --- pipes ----------------------------------------------------------------------------


async def test_feed_writes_as_fast_as_it_is_read() -> None:
    """All of it, in order, and the writer waits meanwhile."""
    reading, writing = os.pipe()
    feed = StdinFeed(writing)
    data = os.urandom(MIB)
    written = asyncio.ensure_future(feed.write(data))
    await asyncio.sleep(0)
    assert not written.done()

    received = b""
    while len(received) < MIB:
        received += await asyncio.to_thread(os.read, reading, MIB)
    await written
    feed.end()

    assert received == data
    assert os.read(reading, 1) == b""
    os.close(reading)
    with pytest.raises(BrokenPipeError):
        await feed.write(b"x")


async def test_feed_cancelled_write_does_not_stop_the_next() -> None:
    """A client that gave up must not block the command's stdin for others."""
    reading, writing = os.pipe()
    feed = StdinFeed(writing)
    first = asyncio.ensure_future(feed.write(b"a" * MIB))
    second = asyncio.ensure_future(feed.write(b"b"))
    await asyncio.sleep(0)
    first.cancel()
    received = b""
    while not received.endswith(b"b"):
        received += await asyncio.to_thread(os.read, reading, MIB)
    await second

    assert set(received[:-1]) == {ord("a")}
    assert len(received) < MIB
    feed.close()
    os.close(reading)


async def test_feed_whose_reader_is_gone_says_so() -> None:
    """To everybody who waits."""
    reading, writing = os.pipe()
    feed = StdinFeed(writing)
    waiting = [asyncio.ensure_future(feed.write(bytes(MIB))) for _ in range(3)]
    await asyncio.sleep(0)
    os.close(reading)

    outcomes = await asyncio.gather(*waiting, return_exceptions=True)

    assert all(isinstance(outcome, BrokenPipeError) for outcome in outcomes)
    assert not feed.open


async def test_status_stream_keeps_its_last_mebibyte_and_never_blocks_the_writer() -> None:
    """A flood on the status pipe must not stop a session."""
    reading, writing = os.pipe()
    stream = StatusStream(reading)
    data = os.urandom(5 * MIB)

    def flood() -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(writing, view) :]
        os.close(writing)

    await asyncio.to_thread(flood)
    cursor, received, eof = 0, b"", False
    while not eof:
        offset, piece, eof = await stream.read(cursor, MIB, wait=True)
        received, cursor = received + piece, offset + len(piece)

    assert cursor == len(data)
    assert len(received) >= STATUS_KEPT_BYTES
    assert data.endswith(received)


async def test_status_that_another_process_has_read_is_there() -> None:
    """What a daemon had read when it was killed must not be missing for the next one."""
    reading, writing = os.pipe()
    first = StatusStream(reading)
    os.write(writing, b"one\n")
    assert await first.read(0, 100, wait=True) == (0, b"one\n", False)
    pipe, kept = map(os.dup, first.filenos())
    first.abandon()
    os.write(writing, b"two\n")
    asyncio.get_running_loop().remove_reader(reading)

    second = StatusStream(pipe, kept)
    second.drain()
    assert await second.read(0, 100, wait=True) == (0, b"one\ntwo\n", False)
    os.close(writing)
    assert await second.read(8, 100, wait=True) == (8, b"", True)
    second.close()


async def test_command_pipes_large_input_that_outlives_us_is_a_file_of_its_own() -> None:
    """Else a command would see the end of its stdin in the middle when we die."""
    data = os.urandom(MIB)
    pipes = CommandPipes.for_request(stdin=data, stdin_open=False, status=False, outlive=True)
    assert pipes.stdin is not None
    assert pipes.feed is None
    read = b""
    while piece := os.read(pipes.stdin, MIB):
        read += piece
    assert read == data
    with pytest.raises(OSError):
        os.write(pipes.stdin, b"x")
    pipes.close_theirs()


async def test_command_pipes_small_input_is_there_at_once_and_ends() -> None:
    """No task, no callback for the usual case."""
    pipes = CommandPipes.for_request(stdin=b"hello", stdin_open=False, status=False)
    assert pipes.stdin is not None

    assert os.read(pipes.stdin, 100) == b"hello"
    assert os.read(pipes.stdin, 100) == b""
    pipes.close_theirs()
    pipes.close()


# --- storage --------------------------------------------------------------------------


async def _never(_directory: int, _name: str) -> int:
    raise AssertionError("no tree has to be walked")


def _names(path: Path) -> list[str]:
    return [entry.name for entry in path.iterdir()]


def test_storage_on_a_full_disk_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    """A pool of a full disk would fail in the middle of an episode."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "x", str(disk)], check=True)
    try:
        storage = open_storage("directory", node_id="abc123", state=disk, pools=disk)
        with pytest.raises(StorageFullError, match="are free"):
            storage.make("sb-a", None)
        assert storage.names() == ()
        storage.close()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_storage_of_unknown_kind_is_refused_by_name(tmp_path: Path) -> None:
    """A typing error in a setting."""
    with pytest.raises(InvalidRequestError, match="btfrs"):
        open_storage("btfrs", node_id="abc123", state=tmp_path, pools=tmp_path)


@pytest.mark.root
def test_storage_auto_says_why_it_took_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow machine without a hint is a support case."""
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    storage = open_storage("auto", node_id="abc123", state=tmp_path, pools=tmp_path / "p")

    assert (storage.name, storage.enforces_disk) == ("directory", False)
    assert "btrfs-progs" in storage.fallback_from
    with pytest.raises(CapabilityError) as refused:
        storage.make("sandbox", 1 << 20)
    assert storage.fallback_from in str(refused.value)  # what keeps btrfs from working here
    assert "COLDFRAME_STORAGE=tmpfs" in str(refused.value)
    storage.close()


# --- doctor, gc -----------------------------------------------------------------------


def test_doctor_names_every_check_once_and_a_remedy_for_each_failure(tmp_path: Path) -> None:
    """A red line without advice helps nobody."""
    checks = doctor.examine(tmp_path / "home")

    assert len({check.name for check in checks}) == len(checks) > 15
    assert all(check.detail for check in checks)
    assert all(check.remedy for check in checks if not check.ok)


@pytest.mark.root
def test_doctor_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be run beside a live node, as often as one likes."""
    monkeypatch.setattr(doctor, "new_node_id", lambda: "doc000")

    assert [check for check in doctor.examine(tmp_path) if check.required and not check.ok] == []

    assert not [path for path in shown_files() if "doc000" in path]
    assert [path.name for path in tmp_path.rglob("*")] == ["pools"]
    assert census.node_cgroups("doc000") == []


@pytest.mark.root
def test_gc_spares_the_living_the_new_and_what_is_not_a_node(tmp_path: Path) -> None:
    """Reaping a live node would end somebody's episodes."""
    nodes = tmp_path / "nodes"
    live, dead, new, other = (nodes / name for name in ("live00", "dead00", "new000", "README"))
    lock = gc.hold_node(live)
    assert lock is not None
    assert gc.hold_node(live) is None
    (live / "uppers/sb-live00-x").mkdir(parents=True)
    (dead / "uppers/sb-dead00-y/upper/deep").mkdir(parents=True)
    new.mkdir()
    other.mkdir()

    reaped = gc.reap_dead_nodes(tmp_path)

    assert reaped == (f"upper {dead / 'uppers/sb-dead00-y'}", f"directory {dead}")
    assert sorted(path.name for path in nodes.iterdir()) == ["README", "live00", "new000"]
    assert gc.reap_dead_nodes(tmp_path) == ()
    os.close(lock)
    assert len(gc.reap_dead_nodes(tmp_path)) == 2


@pytest.mark.root
def test_gc_unmounts_what_lies_below_a_dead_nodes_directory(tmp_path: Path) -> None:
    """A mount there would keep the directory, or be emptied instead of it."""
    point = tmp_path / "nodes/dead00/uppers/m"
    point.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "x", str(point)], check=True)

    reaped = gc.reap_dead_nodes(tmp_path)

    assert any(line.startswith(f"mount {point}") for line in reaped)
    assert list((tmp_path / "nodes").iterdir()) == []


def test_hold_node_lock_is_exclusive_between_processes(tmp_path: Path) -> None:
    """It says who lives."""
    fd = gc.hold_node(tmp_path / "n")
    assert fd is not None
    other = os.open(tmp_path / "n/lock", os.O_RDWR)
    with pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)
    os.close(fd)
