"""Ids that are refused, across processes."""

from __future__ import annotations

from pathlib import Path

from coldframe.node.expired import ExpiredIds


def test_ids_that_are_refused_are_still_so_after_a_kill(tmp_path: Path) -> None:
    """Else a client that is late enough would run its command a second time."""
    path = tmp_path / "expired"
    first = ExpiredIds(4, path)
    for number in range(6):
        first.add(f"op-{number}")
    first.add("op-5")
    assert [f"op-{number}" in first for number in range(6)] == [False] * 2 + [True] * 4
    # Nothing is closed: the process is gone.
    again = ExpiredIds(4, path)
    assert [f"op-{number}" in again for number in range(6)] == [False] * 2 + [True] * 4

    again.add("op-6")
    larger = ExpiredIds(5, path)
    larger.add("op-7")
    assert [number for number in range(9) if f"op-{number}" in larger] == [3, 4, 5, 6, 7]
    smaller = ExpiredIds(2, path)
    assert [number for number in range(9) if f"op-{number}" in smaller] == [6, 7]


def test_file_that_is_none_refuses_nothing(tmp_path: Path) -> None:
    """A disk that was full while it was made must not keep a node from starting."""
    path = tmp_path / "expired"
    path.write_bytes(b"\0" * 7)
    assert "op" not in ExpiredIds(4, path)
    path.write_bytes(b"\xff" * 64)
    ids = ExpiredIds(4, path)
    ids.add("op")
    assert "op" in ExpiredIds(4, path)
