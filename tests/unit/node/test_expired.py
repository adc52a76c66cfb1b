"""Ids that are refused, across processes and owners."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from coldframe.node.expired import ExpiredIds


def refused(ids: ExpiredIds, *names: str) -> list[str]:
    return [name for name in names if name in ids]


def add(ids: ExpiredIds, owner: str | None, names: Iterable[str]) -> None:
    for name in names:
        ids.add(name, owner)


def test_ids_that_are_refused_are_still_so_after_a_kill(tmp_path: Path) -> None:
    """Else a client that is late enough would run its command a second time."""
    path = tmp_path / "expired"
    first = ExpiredIds(4, path)
    add(first, "amber", "012345")
    first.add("5", "amber")
    assert refused(first, *"012345") == [*"2345"]
    # Nothing is closed: the process is gone.
    again = ExpiredIds(4, path)
    assert refused(again, *"012345") == [*"2345"]

    again.add("6", "amber")
    larger = ExpiredIds(5, path)
    larger.add("7", "amber")
    assert refused(larger, *"012345678") == [*"34567"]
    smaller = ExpiredIds(2, path)
    assert refused(smaller, *"012345678") == [*"67"]


def test_flood_of_one_owner_makes_nobody_elses_id_run_again(tmp_path: Path) -> None:
    """A second execution is what operation ids are there to rule out."""
    path = tmp_path / "expired"
    ids = ExpiredIds(100, path)
    add(ids, "amber", ["amber-0", "amber-1"])
    add(ids, None, ["node-0"])
    for began in (0, 500):
        add(ids, "blue", (f"blue-{number}" for number in range(began, began + 500)))

        assert refused(ids, "amber-0", "amber-1", "node-0") == ["amber-0", "amber-1", "node-0"]
        newest = [f"blue-{number}" for number in range(began + 403, began + 500)]
        assert refused(ids, *(f"blue-{number}" for number in range(1000))) == newest
        ids = ExpiredIds(100, path)  # the next process


def test_more_owners_than_ids_keep_the_newest(tmp_path: Path) -> None:
    """The bound holds however many there are."""
    ids = ExpiredIds(3, tmp_path / "expired")
    for number in range(9):
        ids.add(f"op-{number}", f"owner-{number}")
    assert len(refused(ids, *(f"op-{number}" for number in range(9)))) == 3
    assert "op-8" in ids


def test_disk_that_is_full_at_the_next_start_costs_no_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It needs no room; where another size is wanted, what was there stays for a later process."""
    path = tmp_path / "expired"
    add(ExpiredIds(4, path), None, ["op"])

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        ids = ExpiredIds(4, path)
        assert "op" in ids
        ids.add("other", None)
        with pytest.raises(OSError, match="No space"):
            ExpiredIds(5, path)

    assert refused(ExpiredIds(4, path), "op", "other") == ["op", "other"]


def test_file_that_is_none_refuses_nothing(tmp_path: Path) -> None:
    """A disk that was full while it was made must not keep a node from starting."""
    path = tmp_path / "expired"
    for content in (b"\0" * 7, b"\xff" * 64, b"expired\2" + b"\0" * 30):
        path.write_bytes(content)
        ids = ExpiredIds(4, path)
        ids.add("op", None)
        assert "op" in ExpiredIds(4, path)


def test_file_with_room_left_holds_nothing_but_its_ids(tmp_path: Path) -> None:
    """What was never written must take no id's place."""
    path = tmp_path / "expired"
    add(ExpiredIds(4, path), "amber", ["first"])

    again = ExpiredIds(4, path)
    for number in "1234":
        again.add(number, f"owner-{number}")

    assert refused(again, "first", *"1234") == [*"1234"]
