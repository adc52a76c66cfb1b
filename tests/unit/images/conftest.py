"""Stores of a test's own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from coldframe.images.store import ImageStore


@pytest.fixture(autouse=True)
def _root_only() -> None:
    if os.geteuid() != 0:
        pytest.skip("layers hold owners, so that only root can write them")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ImageStore]:
    """An empty store."""
    with ImageStore(tmp_path / "images") as store:
        yield store


@pytest.fixture
def add(store: ImageStore) -> Callable[..., str]:
    """Add a layer of files given by name and content; return its digest."""

    def add(**files: str) -> str:
        with store.workspace() as work:
            tree = work / "tree"
            tree.mkdir()
            for name, content in files.items():
                (tree / name).write_text(content)
            return store.add_layer(tree)

    return add
