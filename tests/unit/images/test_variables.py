"""Variables and quotes as Docker has them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldframe.images.variables import WordError, expand, split_words

ENV = {"A": "one", "EMPTY": "", "A_1": "two", "PATHS": "a:b.c:d.e", "STAR": "*/?"}


@pytest.mark.parametrize(
    ("word", "result"),
    [
        ("plain", "plain"),
        ("$A", "one"),
        ("${A}x", "onex"),
        ("$A_1-$A", "two-one"),
        ("$NONE", ""),
        ("\\$A", "$A"),
        ("'$A'", "$A"),
        ('"$A b"', "one b"),
        ('"\\$A \\" \\n"', '$A " \\n'),
        ("a\\ b", "a b"),
        ("$", "$"),
        ("$/x", "$/x"),
        ("${NONE:-$A}", "one"),
        ("${NONE:-a}b}", "ab}"),
        ("${EMPTY:-x}|${EMPTY-x}", "x|"),
        ("${A:+yes}|${EMPTY:+yes}|${EMPTY+yes}|${NONE+yes}", "yes||yes|"),
        ("${NONE:-${A:+deep}}", "deep"),
        ("$1x", "x"),
        ("${PATHS#*:}|${PATHS##*:}", "b.c:d.e|d.e"),
        ("${PATHS%:*}|${PATHS%%:*}", "a:b.c|a"),
        ("${PATHS%.?}|${PATHS#x}|${PATHS#}", "a:b.c:d|a:b.c:d.e|a:b.c:d.e"),
        ("${PATHS/./-}|${PATHS//./$A}", "a:b-c:d.e|a:bonec:donee"),
        ("${PATHS//*/x}|${PATHS//:/}|${NONE/a/b}", "x|ab.cd.e|"),
        ("${STAR#\\*}|${STAR%%\\?}|${STAR/\\//_}", "/?|*/|*_?"),
    ],
)
def test_expand_follows_the_rules(word: str, result: str) -> None:
    """A path that expands otherwise than with Docker lands somewhere else."""
    assert expand(word, ENV) == result


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("'a", "quote"),
        ('"a', "quote"),
        ("${A", "brace"),
        ("${A:-x", "brace"),
        ("${}", "without a name"),
        ("${A^x}", "not supported"),
        ("${A:1}", "not supported"),
        ("${A%x", "brace"),
        ("${A/x}", "brace"),
        ("${A:-" * 60 + "}" * 60, "nested deeper than 50"),
        ("${NONE:?say so}", "NONE: say so"),
        ("${EMPTY:?}", "EMPTY: is not set"),
    ],
)
def test_expand_of_malformed_word_is_refused(word: str, said: str) -> None:
    """A guess would be wrong in silence."""
    with pytest.raises(WordError, match=said):
        expand(word, ENV)


@given(st.text())
def test_expand_of_any_text_ends_in_a_word_or_a_word_error(text: str) -> None:
    """Dockerfiles come from strangers: no other exception, no endless loop."""
    try:
        expand(text, ENV)
        list(split_words(text))
    except WordError:
        pass


@given(st.text(alphabet=st.characters(exclude_characters="'")))
def test_expand_of_single_quotes_gives_the_text_itself(text: str) -> None:
    """The one way to write anything at all."""
    assert expand(f"'{text}'", ENV) == text


def test_split_words_keeps_quoted_blanks() -> None:
    """`ENV A="b c" D=e\\ f` sets two variables."""
    assert list(split_words("A=\"b c\"  D=e\\ f\tG='h i'")) == ['A="b c"', "D=e\\ f", "G='h i'"]
    with pytest.raises(WordError):
        list(split_words("A='b c"))
