"""What is left out must be left out, and nothing else may be."""

from __future__ import annotations

from pathlib import Path

import pytest

from coldframe.rollouts.artifacts import Artifact, clash, with_convention


@pytest.mark.parametrize(
    ("pattern", "excluded", "kept"),
    [
        ("*.pyc", ["a.pyc", "deep/er/a.pyc"], ["a.py", "pyc"]),
        ("build", ["build", "build/x", "src/build/y"], ["rebuild", "builds/x"]),
        ("src/build", ["src/build/y", "old/src/build"], ["build", "src/old/build"]),
        ("./top", ["top", "top/x"], ["sub/top"]),
        ("build/", ["build/x"], ["rebuild"]),
        ("a*z", ["a/b/z", "az"], ["a/b/y"]),
        ("?.log", ["a.log"], ["ab.log"]),
    ],
)
def test_excluded_names_are_those_that_tar_would_leave_out(
    pattern: str, excluded: list[str], kept: list[str]
) -> None:
    """Patterns written for tar must not mean something else here."""
    artifact = Artifact("/srv", exclude=(pattern,))

    def left_out(name: str) -> bool:  # by itself, or with a directory above it
        return any(artifact.excludes(str(one)) for one in (Path(name), *Path(name).parents[:-1]))

    assert [name for name in excluded if not left_out(name)] == []
    assert [name for name in kept if left_out(name)] == []


def test_convention_directory_is_taken_unless_it_is_declared() -> None:
    """Its excludes would be lost if it were taken twice."""
    declared = Artifact("/logs/artifacts/", exclude=("*.tmp",))

    assert with_convention([Artifact("/srv")]) == (Artifact("/logs/artifacts"), Artifact("/srv"))
    assert with_convention([declared]) == (declared,)


@pytest.mark.parametrize(
    ("first", "second", "clashes"),
    [
        (Artifact("/a"), Artifact("/b"), False),
        (Artifact("/a"), Artifact("/a/b"), False),
        (Artifact("/a", exclude=("b",)), Artifact("/a/b"), True),
        (Artifact("/a"), Artifact("/b", "a"), True),
        (Artifact("/a", "x"), Artifact("/b", "x/y"), True),
        (Artifact("/a", "x"), Artifact("/a", "y"), False),
        (Artifact("/a", exclude=("b",)), Artifact("/a", exclude=("b",)), False),
        (Artifact("/a", exclude=("b",)), Artifact("/a"), True),
    ],
)
def test_artifacts_clash_where_one_would_lie_in_the_others_place(
    first: Artifact, second: Artifact, clashes: bool
) -> None:
    """The later one would silently not be there."""
    assert (clash([first, second]) is not None) is clashes
