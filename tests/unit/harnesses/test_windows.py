"""A window rule never changes under its name: trainers compare runs by it."""

from __future__ import annotations

import pytest

from coldframe.harnesses.windows import HEAD_TAIL_10K, head_tail_10k


@pytest.mark.parametrize("length", [0, 1, 9_999])
def test_head_tail_10k_of_short_text_shows_all_of_it(length: int) -> None:
    """The control: below the limit nothing is touched."""
    window = head_tail_10k("x" * length)

    assert (window.text, window.omitted_characters) == ("x" * length, 0)


@pytest.mark.parametrize("length", [10_000, 10_001, 1_000_000])
def test_head_tail_10k_of_long_text_shows_both_ends_and_says_what_is_missing(
    length: int,
) -> None:
    """Errors stand at the end, context at the beginning; the model must know of the gap."""
    text = "h" * 5_000 + "m" * (length - 10_000) + "t" * 5_000

    window = head_tail_10k(text)

    assert window.text == (
        "h" * 5_000 + f"\n[{length - 10_000} characters omitted]\n" + "t" * 5_000
    )
    assert window.omitted_characters == length - 10_000
    assert window.rule == HEAD_TAIL_10K


def test_head_tail_10k_counts_characters_not_bytes() -> None:
    """Cutting bytes would split a character in two."""
    assert head_tail_10k("\N{SNOWMAN}" * 9_999).omitted_characters == 0
