"""The wire between node and spawner, as values and bytes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldframe.host import wire

HEADER = Path(__file__).parents[3] / "native/protocol.h"
PREFIXES: dict[str, tuple[str, type]] = {
    "type": ("TYPE_", wire.Type),
    "tag": ("TAG_", wire.Tag),
    "create_flag": ("CREATE_FLAG_", wire.CreateFlag),
    "exec_flag": ("EXEC_FLAG_", wire.ExecFlag),
    "progress_flag": ("PROGRESS_FLAG_", wire.ProgressFlag),
    "scope": ("SCOPE_", wire.Scope),
    "reason": ("REASON_", wire.Reason),
    "gone_cause": ("GONE_CAUSE_", wire.GoneCause),
    "kept_state": ("KEPT_STATE_", wire.KeptState),
}


@pytest.mark.parametrize("name", PREFIXES)
def test_numbers_equal_those_of_the_native_program(name: str) -> None:
    """Two files state the protocol; a number changed in one alone would cross answers."""
    prefix, python = PREFIXES[name]
    body = re.search(rf"^enum {name} {{(.*?)^}};", HEADER.read_text(), re.M | re.S)
    assert body is not None
    native = {
        found[1].removeprefix(prefix): int(found[2])
        for found in re.finditer(r"(\w+) = (\d+),", body[1])
    }

    numbers = {name: getattr(python, name) for name in dir(python) if name.isupper()}
    assert native == numbers


def test_constants_equal_those_of_the_native_program() -> None:
    """A frame that one side sends must be one that the other takes."""
    text = HEADER.read_text()

    assert f"#define PROTOCOL_VERSION {wire.VERSION}\n" in text
    assert "#define MAX_FRAME (4u << 20)\n" in text
    assert wire.MAX_FRAME == 4 << 20
    assert f"#define MAX_DESCRIPTORS {wire.MAX_DESCRIPTORS}u\n" in text


FRAMES = st.lists(
    st.tuples(
        st.integers(0, 65535),
        st.integers(0, 2**64 - 1),
        st.lists(st.tuples(st.integers(0, 65535), st.binary(max_size=50)), max_size=5),
        st.integers(0, wire.MAX_DESCRIPTORS),
    ),
    max_size=6,
)


@given(FRAMES, st.integers(1, 40))
def test_frames_cut_anywhere_arrive_whole(
    frames: list[tuple[int, int, list[tuple[int, bytes]], int]], step: int
) -> None:
    """A stream socket has no record boundaries."""
    stream = b"".join(wire.encode(kind, rid, fields, fds) for kind, rid, fields, fds in frames)
    splitter = wire.Splitter()
    got = []
    for at in range(0, len(stream), step):
        for kind, fds, rid, body in splitter.feed(stream[at : at + step]):
            fields = [(tag, bytes(value)) for tag, value in wire.decode_fields(body)]
            got.append((kind, rid, fields, fds))

    assert got == frames


@given(st.binary(max_size=200))
def test_garbage_raises_protocol_error_only(data: bytes) -> None:
    """A broken peer is an error of its kind, never one of ours."""
    try:
        for *_, body in wire.Splitter().feed(data):
            wire.decode_fields(body)
    except wire.ProtocolError:
        pass


def test_frame_that_is_too_long_is_refused_by_the_sender() -> None:
    """The worker would close the connection, and with it every sandbox."""
    with pytest.raises(ValueError, match="at most"):
        wire.encode(1, 1, [(1, bytes(wire.MAX_FRAME))])
    with pytest.raises(ValueError, match="at most"):
        wire.encode(1, 1, [], wire.MAX_DESCRIPTORS + 1)


@given(st.integers(4, 64), st.integers(0, 500))
def test_spool_pieces_find_every_byte_that_was_kept(half: int, total: int) -> None:
    """Head and ring, against a model that writes byte by byte."""
    size = 2 * half
    file: dict[int, int] = {}
    for offset in range(total):
        place = offset if offset < half else half + (offset - half) % (size - half)
        file[place] = offset
    oldest = wire.spool_oldest(size, total)

    for start, end in ((0, min(half, total)), (oldest, total)):
        read = [
            file[place]
            for offset, length in wire.spool_pieces(size, start, end)
            for place in range(offset, offset + length)
        ]
        assert read == list(range(start, max(start, end)))
