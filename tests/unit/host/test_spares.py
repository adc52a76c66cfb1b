"""Uppers that are ready before anybody asks."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from coldframe.host.roottree import closing
from coldframe.host.spares import SpareUppers
from coldframe.host.storage import DirectoryStorage, TmpfsStorage
from coldframe.protocol.errors import CapabilityError, StorageFullError
from tests.fixtures.runtime import open_descriptors

MIB = 1 << 20


async def _remove_nothing(_directory: int, _name: str) -> int:
    return 0


async def _rmdir(directory: int, name: str) -> int:
    for inner in ("upper", "work"):
        os.rmdir(f"{name}/{inner}", dir_fd=directory)
    os.rmdir(name, dir_fd=directory)
    return 3


def _count(path: Path) -> int:
    return len(list(path.iterdir()))


@pytest.fixture
def spares(tmp_path: Path) -> SpareUppers:
    return SpareUppers(DirectoryStorage(tmp_path), spares=4)


async def test_spare_taken_is_known_by_its_sandbox_until_removed(
    spares: SpareUppers, tmp_path: Path
) -> None:
    """Its name on disk is another one; whoever asks for the sandbox's must get it."""
    spares.refill()
    taken = spares.take("sb-a", None)
    assert taken is not None
    with closing(taken), closing(spares.open("sb-a")) as again:
        assert os.path.samestat(os.fstat(taken), os.fstat(again))
    assert spares.names() == ("sb-a",)

    await spares.remove("sb-a", _rmdir)
    await spares.remove("sb-a", _rmdir_if_there)
    assert spares.names() == ()
    assert _count(tmp_path) == 3
    spares.close()


async def _rmdir_if_there(_directory: int, name: str) -> int:
    assert name == "sb-a", "the spare was let go of"
    return 0


def test_spares_are_refilled_once_half_are_gone_and_never_beyond_their_number(
    spares: SpareUppers, tmp_path: Path
) -> None:
    """Each refill takes from the processor of a create; too many are disk that nobody uses."""
    assert spares.low
    spares.refill()
    spares.refill()
    assert _count(tmp_path) == 4
    assert not spares.low

    for name in ("sb-a", "sb-b"):
        taken = spares.take(name, None)
        assert taken is not None
        os.close(taken)
    assert spares.low
    spares.refill()
    assert _count(tmp_path) == 6
    assert spares.names() == ("sb-a", "sb-b")
    spares.close()


def test_spare_is_as_the_spawner_would_have_made_it(spares: SpareUppers, tmp_path: Path) -> None:
    """The mode of `upper` is that of the sandbox's root, whatever our umask is."""
    before = os.umask(0o077)
    try:
        spares.refill()
    finally:
        os.umask(before)
    for path in tmp_path.iterdir():
        modes = {inner.name: stat.S_IMODE(inner.stat().st_mode) for inner in path.iterdir()}
        assert modes == {"upper": 0o755, "work": 0o755}
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    spares.close()


def test_no_spare_is_given_out_empty_or_for_a_limit_of_its_own(spares: SpareUppers) -> None:
    """A spare has no limit: one that is asked for must not be lost on the way."""
    assert spares.take("sb-a", None) is None
    spares.refill()
    assert spares.take("sb-a", MIB) is None
    with pytest.raises(CapabilityError, match="disk_bytes"):
        spares.make("sb-a", MIB)
    spares.close()


def test_full_disk_takes_and_makes_no_spares(
    spares: SpareUppers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sandbox on a full disk would fail in the middle; `make` says so before."""
    spares.refill()

    def full(_self: DirectoryStorage) -> None:
        raise StorageFullError("full")

    monkeypatch.setattr(DirectoryStorage, "require_disk", full)
    assert spares.take("sb-a", None) is None
    with pytest.raises(StorageFullError):
        spares.make("sb-a", None)
    assert spares.names() == ()
    spares.close()


def test_spare_that_could_not_be_made_is_not_counted(
    spares: SpareUppers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the stock would shrink with every failure, for good."""

    def broken(_self: DirectoryStorage, _name: str, _disk: int | None) -> int:
        raise OSError(5, "broken")

    with monkeypatch.context() as patched:
        patched.setattr(DirectoryStorage, "make", broken)
        spares.refill()
        assert spares.take("sb-a", None) is None
    spares.refill()
    assert _count(tmp_path) == 4
    spares.close()


def test_stray_beside_the_spares_is_told(spares: SpareUppers, tmp_path: Path) -> None:
    """Only names that were made here are spares: what else is there is a leak."""
    spares.refill()
    (tmp_path / "spare-stray").mkdir()
    assert spares.names() == ("spare-stray",)
    spares.close()


@pytest.mark.root
async def test_clear_removes_spares_too_and_gives_every_descriptor_back() -> None:
    """A node that closes leaves nothing."""
    before = open_descriptors()
    spares = SpareUppers(TmpfsStorage(), spares=2)
    spares.refill()
    taken = spares.take("sb-a", None)
    assert taken is not None
    os.close(taken)

    await spares.clear(_remove_nothing)
    assert spares.names() == ()
    spares.close()
    assert open_descriptors() == before
