"""JSON that could mean two things, or that we could not write again, is refused."""

from __future__ import annotations

import pytest

from coldframe.protocol.strict_json import MAX_DEPTH, NotStrictError, parse

REFUSED = {
    "key twice": ('{"a": 1, "b": 0, "a": 2}', "the key 'a' more than once"),
    "key twice, deep down": ('[{"a": {"b": 1, "b": 1}}]', "the key 'b' more than once"),
    "nan": ('{"a": NaN}', "NaN"),
    "infinity": ("[-Infinity]", "-Infinity"),
    "number beyond any": ("[1e999]", "the number 1e999"),
    "number of many digits": ("9" * 5000, "is not JSON"),
    "no utf-8": (b"\xff", "no Unicode"),
    "too deep": ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "levels deep"),
    "deeper than any stack": ("[" * 100_000, "is not JSON"),
    "deep and whole": ('{"a":' * 50_000 + "1" + "}" * 50_000, "is not JSON"),
    "cut": ('{"a": ', "is not JSON"),
    "nothing": ("", "is not JSON"),
}


@pytest.mark.parametrize(("content", "wrong"), REFUSED.values(), ids=REFUSED)
def test_json_that_is_not_strict_is_refused(content: str | bytes, wrong: str) -> None:
    """The last of two keys would win in silence, and another reader takes the first."""
    with pytest.raises(NotStrictError, match=wrong):
        parse(content)


def test_json_that_is_strict_is_read() -> None:
    """Half a character, which models write, and what is just not too deep are fine."""
    deep = "[" * MAX_DEPTH + "]" * MAX_DEPTH

    assert parse(b'{"a": [1, 1.5, null, "\\ud83d"]}') == {"a": [1, 1.5, None, "\ud83d"]}
    assert parse(deep) is not None
    assert parse("1") == 1
