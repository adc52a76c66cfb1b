"""The window that a session's result carries must agree with what an exec's would say."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from coldframe.node.windows import Window
from coldframe.protocol.models import OutputChunk


@given(st.lists(st.binary(max_size=9), max_size=9), st.integers(min_value=0, max_value=20))
def test_window_any_chunks_keep_head_tail_length_and_digest(
    pieces: list[bytes], limit: int
) -> None:
    """How the stream was cut into chunks must not show."""
    window, whole = Window(limit), b"".join(pieces)
    offset = 0
    for piece in pieces:
        window.add(OutputChunk(stream="stdout", offset=offset, data=piece))
        offset += len(piece)
    output = window.output()

    assert output.total_bytes == len(whole)
    assert output.sha256 == hashlib.sha256(whole).hexdigest()
    assert whole.startswith(output.head)
    assert whole.endswith(output.tail)
    assert len(output.head) + len(output.tail) == min(len(whole), limit)
    if len(whole) <= limit:
        assert output.head == whole
    else:
        assert len(output.head) == (limit + 1) // 2


def test_window_dropped_bytes_make_the_digest_unknown() -> None:
    """A digest of a part, given as that of the whole, would be a lie."""
    window = Window(8)
    window.add(OutputChunk(stream="stdout", offset=0, data=b"abcd"))
    window.add(OutputChunk(stream="stdout", offset=104, data=b"xyz", dropped_bytes=100))
    output = window.output()

    assert (output.total_bytes, output.sha256) == (107, "")
    assert (output.head, output.tail) == (b"abcd", b"xyz")
