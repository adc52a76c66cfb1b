"""What a .dockerignore leaves out, rule by rule."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldframe.images.ignore import Ignore
from coldframe.images.patterns import name_pattern, path_pattern
from coldframe.protocol.errors import DockerfileError


@pytest.mark.parametrize(
    ("rules", "path", "out"),
    [
        ("*.pyc", "a.pyc", True),
        ("*.pyc", "sub/a.pyc", False),
        ("**/*.pyc", "a.pyc", True),
        ("**/*.pyc", "sub/deep/a.pyc", True),
        ("*/temp*", "sub/temporary", True),
        ("*/temp*", "temporary", False),
        ("temp?", "temps", True),
        ("temp?", "temp", False),
        ("/sub/", "sub/file", True),
        ("sub/../other", "other", True),
        ("node_modules", "node_modules/a/b", True),
        ("node_modules", "sub/node_modules", False),
        ("**/node_modules", "sub/node_modules/x", True),
        ("a/**", "a/b/c", True),
        ("a/**", "a", False),
        ("a/**/z", "a/z", True),
        ("a/**/z", "a/b/c/z", True),
        ("*.md\n!README.md", "README.md", False),
        ("*.md\n!README*.md\nREADME-secret.md", "README-secret.md", True),
        ("*.md\nREADME-secret.md\n!README*.md", "README-secret.md", False),
        ("*\n!src", "src/file", False),
        ("*\n!src\nsrc/secret", "src/secret", True),
        ("# comment\n  \n", "# comment", False),
        (" spaces ", "spaces", True),
        (".", "file", False),
        ("*", "", False),
        ("[a-c]x", "bx", True),
        ("[^a-c]x", "bx", False),
        (r"\*", "*", True),
        (r"\*", "x", False),
        ("new?line", "new\nline", True),
    ],
)
def test_rules_leave_out_what_dockers_do(rules: str, path: str, out: bool) -> None:
    """One file too many in an image may be a key; one too few breaks the build."""
    assert (Ignore(rules).leaves_out(path) is not None) == out


def test_rule_that_leaves_out_is_named_by_line() -> None:
    """`COPY x` that finds nothing is a riddle else."""
    assert Ignore("a\n\nb", "D").leaves_out("b/c") == "D:3"


@pytest.mark.parametrize(
    ("rules", "said"),
    [("x\n!", "D:2: ! takes nothing back"), ("[z-a]", "D:1: '"), ("**/a/**/b/**/c/**/d", "D:1: ")],
)
def test_line_that_is_no_pattern_is_refused_with_its_number(rules: str, said: str) -> None:
    """A rule that cannot be understood must not be dropped."""
    with pytest.raises(DockerfileError) as caught:
        Ignore(rules, "D")
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("pattern", "path"), [("*a" * 60, "a" * 4000 + "b"), ("**/a/**/a/**/b", "a/" * 400 + "c")]
)
def test_pattern_made_to_take_long_does_not(pattern: str, path: str) -> None:
    """Contexts come from strangers."""
    begun = time.process_time()

    assert not path_pattern(pattern).fullmatch(path)
    assert time.process_time() - begun < 3


@given(st.text(max_size=30), st.text(max_size=30))
def test_any_rules_give_an_answer_or_a_named_line(rules: str, path: str) -> None:
    """No other exception, whatever stands there."""
    try:
        Ignore(rules, "D").leaves_out(path)
    except DockerfileError as error:
        assert str(error).startswith("D:")


@given(st.text(alphabet=st.characters(exclude_characters="*?[\\/\n")))
def test_pattern_without_signs_matches_itself_alone(name: str) -> None:
    """The commonest pattern is a plain name."""
    assert name_pattern(name).fullmatch(name)
    assert not name_pattern(name).fullmatch(name + "x")


def test_directory_that_is_out_is_looked_into_only_if_something_may_be_taken_back() -> None:
    """A tree of dependencies costs nothing, and `!` finds what it takes back."""
    assert Ignore("node_modules").hides_all_below("node_modules")
    assert not Ignore("node_modules").hides_all_below("src")
    kept = Ignore("node_modules\n!node_modules/ours")
    assert not kept.hides_all_below("node_modules")
    assert kept.leaves_out("node_modules/ours/a") is None
