"""What the command line makes of sizes, environments and hostile text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldframe.cli import render
from coldframe.cli.attempt_view import command_line
from coldframe.protocol.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1048576", 1 << 20),
        ("512M", 512 << 20),
        ("512m", 512 << 20),
        ("4GiB", 4 << 30),
        ("4 GiB", 4 << 30),
        ("1.5G", 3 << 29),
        ("1KB", 1000),
        ("2TB", 2 * 10**12),
        ("0", 0),
    ],
)
def test_parse_size_with_a_unit_gives_bytes(text: str, size: int) -> None:
    """A limit that is off by 2^10 kills a command or lets it take the machine."""
    assert render.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "M", "-1", "12X", "1e3", "4 GiB extra", "0x10", "inf"])
def test_parse_size_of_nonsense_is_refused_by_name(text: str) -> None:
    """A limit that is misread is a limit that is silently not there."""
    with pytest.raises(InvalidRequestError, match="is not a size"):
        render.parse_size(text)


def test_parse_env_keeps_everything_behind_the_first_equals_sign() -> None:
    """Values hold equals signs, blanks and nothing at all."""
    parsed = render.parse_env(["A=1", "B=x=y z", "C="])

    assert parsed == {"A": "1", "B": "x=y z", "C": ""}


@pytest.mark.parametrize("word", ["A", "=1", ""])
def test_parse_env_without_name_or_value_is_refused(word: str) -> None:
    """Taking the value from our own environment would leak it into the sandbox."""
    with pytest.raises(InvalidRequestError, match="NAME=VALUE"):
        render.parse_env([word])


@given(st.text())
def test_sentence_of_any_text_is_one_line_without_control_characters(text: str) -> None:
    """Error texts hold names from inside a sandbox; they must not drive the terminal."""
    said = render.sentence(text)

    assert said
    assert said.isprintable() or not any(ord(c) < 0x20 or 0x7F <= ord(c) < 0xA0 for c in said)
    assert len(said.splitlines()) == 1


def test_table_with_hostile_cells_stays_in_its_columns() -> None:
    """A sandbox names its processes; an escape sequence in one must not reach the terminal."""
    shown = render.table(("NAME", "PID"), [("\x1b[31mred", "1"), ("plain", "22")])

    lines = shown.splitlines()
    assert lines[0] == "NAME      PID"
    assert "\x1b" not in shown
    assert [line.rindex(pid) for line, pid in zip(lines[1:], ("1", "22"), strict=True)] == [10, 10]


def test_block_keeps_lines_and_no_control_character() -> None:
    """What a failed step printed is unreadable on one line, and hostile all the same."""
    assert (
        render.block("it failed:\none\x1b[2J\n\ttwo") == "it failed:\n  one\ufffd[2J\n          two"
    )


def test_safe_text_can_be_printed_whatever_a_model_wrote() -> None:
    """Half a character in one answer must not cost the view of a whole attempt."""
    assert render.safe("a\ud83db\x1b").encode() == "a\ufffdb\ufffd".encode()


def test_recorded_command_is_shown_as_typed_also_if_it_is_no_text() -> None:
    """A harness may pass any bytes."""
    recorded = {"argv": ["echo", "a b", {"base64": "/w=="}], "command": None}
    assert command_line(recorded).startswith("echo 'a b' ")
    assert "/w==" in command_line(recorded)
    assert command_line({"argv": None, "command": "ls | wc"}) == "ls | wc"
