"""Permission bits as chmod(1) reads them."""

from __future__ import annotations

import stat
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldframe.images.affixes import replaced, without_prefix, without_suffix
from coldframe.images.modes import changed, is_mode

_CLAUSE = st.builds(
    lambda who, operator, bits: who + operator + bits,
    st.sampled_from(["u", "g", "o", "a", "ug", "uo", "go", "ugo"]),
    st.sampled_from("+-="),
    st.text(alphabet="rwxXst", max_size=3),
)


@pytest.mark.parametrize(
    ("mode", "text", "made"),
    [
        (0o100644, "755", 0o755),
        (0o100644, "0755", 0o755),
        (0o100644, "4755", 0o4755),
        (0o100644, "7", 0o007),
        (0o100644, "00755", 0o755),
        (0o100644, "+x", 0o755),
        (0o100755, "a-x", 0o644),
        (0o100644, "u=rwX,go=rX", 0o644),
        (0o040700, "u=rwX,go=rX", 0o755),
        (0o100744, "go+rX", 0o755),
        (0o100777, "o=", 0o770),
        (0o106755, "u=rwx", 0o2755),
        (0o046755, "u=rwx", 0o6755),
        (0o100755, "u+s,+t", 0o5755),
        (0o100644, "u+x-w", 0o544),
    ],
)
def test_mode_is_changed_as_said(mode: int, text: str, made: int) -> None:
    """An entry point that is not executable is an image that does not start."""
    assert is_mode(text)
    assert changed(mode, text) == made


@pytest.mark.parametrize("text", ["", "x", "888", "u+y", "99", "12345", "u=rw,", "+x o", "z=r"])
def test_text_that_is_no_mode_is_told(text: str) -> None:
    """It is refused with its line."""
    assert not is_mode(text)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 0o7777), st.lists(_CLAUSE, min_size=1, max_size=3), st.booleans())
def test_mode_is_what_chmod_makes(bits: int, clauses: list[str], directory: bool) -> None:
    """The tool itself judges."""
    with tempfile.TemporaryDirectory() as made:
        path = Path(made) / "it"
        path.mkdir() if directory else path.touch()
        path.chmod(bits)
        before = path.stat().st_mode
        text = ",".join(clauses)
        subprocess.run(["chmod", text, str(path)], check=True)

        assert changed(before, text) == stat.S_IMODE(path.stat().st_mode), (oct(before), text)


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet="ab/", max_size=8), st.text(alphabet="ab*?/", max_size=5))
def test_patterns_cut_what_a_shell_cuts(value: str, pattern: str) -> None:
    """A shell judges: `#`, `##`, `%` and `%%`."""
    script = 'printf "%s|%s|%s|%s" "${1#$2}" "${1##$2}" "${1%$2}" "${1%%$2}"'
    said = subprocess.check_output(["sh", "-c", script, "sh", value, pattern], text=True)

    assert said.split("|") == [
        without_prefix(value, pattern, longest=False),
        without_prefix(value, pattern, longest=True),
        without_suffix(value, pattern, longest=False),
        without_suffix(value, pattern, longest=True),
    ]


def test_pattern_that_matches_nothing_replaces_nothing() -> None:
    """An empty match between two characters is no place for anything."""
    assert replaced("abc", "", "x", everywhere=True) == "abc"
    assert replaced("abc", "*", "x", everywhere=True) == "x"
