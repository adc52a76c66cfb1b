"""Locks on files that belong to what they guard: they go with it."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from coldframe.images.locks import try_lock
from tests.fixtures.runtime import open_descriptors


@pytest.mark.parametrize("another", [False, True])
def test_file_that_went_while_it_was_locked_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, another: bool
) -> None:
    """Whoever removed a layer and whoever makes it anew would each hold a lock of their own."""
    path = tmp_path / "lock"
    path.touch()
    flock = fcntl.flock

    def removed_first(fd: int, operation: int) -> None:
        path.unlink()
        if another:
            path.touch()
        flock(fd, operation)

    before = open_descriptors()
    with monkeypatch.context() as patched, pytest.raises(FileNotFoundError):
        patched.setattr(fcntl, "flock", removed_first)
        try_lock(path, exclusive=True)
    assert open_descriptors() == before
