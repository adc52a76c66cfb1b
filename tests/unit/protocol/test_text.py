"""What others wrote, as messages quote it."""

from __future__ import annotations

import pytest

from coldframe.host.roottree import path_bytes
from coldframe.protocol.errors import InvalidRequestError
from coldframe.protocol.text import excerpt


def test_excerpt_quotes_what_is_short_and_cuts_what_is_long() -> None:
    """A message is read by people, and goes into logs and answers."""
    assert excerpt("it's\n") == repr("it's\n")
    assert excerpt(b"caf\xc3\xa9\xff") == repr("café\udcff")
    assert excerpt("x" * 10_000, most=3) == "'xxx'... (10000 characters)"


@pytest.mark.parametrize("path", ["x" * 10_000, "/\0" + "x" * 10_000, "/\ud800" + "x" * 10_000])
def test_path_that_is_refused_is_not_echoed_in_whole(path: str) -> None:
    """Ten kilobytes of path in an error say nothing that two hundred characters do not."""
    with pytest.raises(InvalidRequestError) as error:
        path_bytes(path)
    assert len(str(error.value)) < 500
