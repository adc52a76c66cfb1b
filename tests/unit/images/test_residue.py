"""What the builder put into a step's layer is taken out again, and nothing of the step's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from coldframe.images.residue import drop
from coldframe.images.view import MergedView


@pytest.fixture
def trees(tmp_path: Path) -> tuple[Path, Path]:
    """The layer of a step, with a file of the builder's, and what lies below it."""
    layer, below = tmp_path / "layer", tmp_path / "below"
    for tree in (layer, below):
        (tree / "etc").mkdir(parents=True, mode=0o755)
    (layer / "etc" / "builders").write_text("x")
    return layer, below


def _dropped(layer: Path, below: Path) -> list[str]:
    drop(layer, (b"etc", b"builders"), MergedView([below]))
    return sorted(str(path.relative_to(layer)) for path in layer.rglob("*"))


def test_directories_that_say_nothing_go_with_it(trees: tuple[Path, Path]) -> None:
    """Whether a build machine has such a file must not show in a layer's digest."""
    assert _dropped(*trees) == []


def test_directory_that_the_step_changed_stays(trees: tuple[Path, Path]) -> None:
    """`RUN chmod 700 /etc` is the step's own doing."""
    layer, below = trees
    (layer / "etc").chmod(0o700)
    assert _dropped(layer, below) == ["etc"]


def test_directory_that_holds_more_stays(trees: tuple[Path, Path]) -> None:
    """Only what the builder made is taken out."""
    layer, below = trees
    (layer / "etc" / "own").write_text("y")
    assert _dropped(layer, below) == ["etc", "etc/own"]


def test_path_that_the_step_made_lead_elsewhere_is_let_be(trees: tuple[Path, Path]) -> None:
    """A link of the step's must not have the builder remove what it leads to."""
    layer, below = trees
    target = layer.with_name("target")
    (layer / "etc").rename(target)
    (layer / "etc").symlink_to(target)
    assert _dropped(layer, below) == ["etc"]
    assert (target / "builders").exists()
