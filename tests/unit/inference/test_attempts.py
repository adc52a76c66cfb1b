"""Where prompts belong, with nothing but ids."""

from __future__ import annotations

import resource
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldframe.inference.attempts import MAX_OPEN_SEGMENTS, Attempt, Place, new_attempt
from coldframe.protocol.errors import InferenceError
from coldframe.trajectories.calls import Budget, CallLine, Level, read_calls


def begin(path: Path) -> Attempt:
    return new_attempt(path, "a", "key", model="m", capture=Level.TOKENS, budget=Budget())


def turn(attempt: Attempt, prompt: list[int], said: list[int], *, delivered: bool = True) -> Place:
    """Let an answer arrive, and be received or not."""
    place = attempt.place(prompt)
    call = CallLine(
        call_id=f"c{attempt.calls}",
        segment=place.segment.index,
        extends=place.extends,
        broke=place.broke,
        level=Level.TOKENS,
        prompt_token_ids=tuple(prompt[place.extends :]),
        completion_token_ids=tuple(said),
        logprobs=tuple(-0.5 for _ in said),
        message={"role": "assistant", "content": ""},
        dialect="chat",
        sampling_asked={},
        sampling_sent={},
        started_at=0.0,
        latency_s=0.0,
    )
    attempt.calls += 1
    attempt.record(call, place)
    attempt.handed_over(call, place, delivered=delivered)
    return place


IDS = st.lists(st.integers(0, 2), min_size=1, max_size=6)


@given(calls=st.lists(st.tuples(IDS, IDS, st.booleans(), st.booleans()), max_size=12))
def test_prompts_are_read_back_whole_whatever_was_said_and_received(
    tmp_path_factory: pytest.TempPathFactory,
    calls: list[tuple[list[int], list[int], bool, bool]],
) -> None:
    """With three ids, prompts go on by chance from everywhere: none may be read back as another."""
    path = tmp_path_factory.mktemp("calls") / "a.jsonl"
    attempt = begin(path)
    sent: list[tuple[list[int], list[int]]] = []
    history: list[int] = []
    for more, said, goes_on, delivered in calls:
        prompt = [*history, *more] if goes_on else more
        turn(attempt, prompt, said, delivered=delivered)
        sent.append((prompt, said))
        history = [*prompt, *said] if delivered else history
    attempt.end()

    captured = read_calls(path)
    assert captured.unsettled == []
    assert len(captured.turns) + len(captured.abandoned) == len(sent)
    for one in captured.turns:
        prompt, said = sent[int(one.call.call_id[1:])]
        assert list(one.prompt_token_ids) == prompt
        assert list(one.call.completion_token_ids or ()) == said
    for turns in captured.segments().values():
        for before, after in pairwise(turns):
            whole = before.prompt_token_ids + (before.call.completion_token_ids or ())
            assert after.prompt_token_ids[: len(whole)] == whole


def test_attempt_that_breaks_with_every_call_stays_small(tmp_path: Path) -> None:
    """A template that rewrites history begins a segment a turn, each with its whole prompt."""
    attempt = begin(tmp_path / "a.jsonl")
    for number in range(3 * MAX_OPEN_SEGMENTS):
        assert turn(attempt, [number, 7], [8]).segment.index == number

    assert len(attempt.open) == MAX_OPEN_SEGMENTS
    kept = turn(attempt, [3 * MAX_OPEN_SEGMENTS - 1, 7, 8, 9], [1])
    closed = turn(attempt, [0, 7, 8, 9], [1])
    assert (kept.extends, closed.extends) == (3, 0)


def test_break_says_how_far_the_ids_were_the_same(tmp_path: Path) -> None:
    """That tells a template that drops a think block from a summary."""
    attempt = begin(tmp_path / "a.jsonl")
    turn(attempt, [1, 2, 3], [4, 5])
    turn(attempt, [9, 9], [9])
    place = turn(attempt, [1, 2, 3, 4, 6, 7], [8])

    assert place.broke is not None
    assert place.broke.model_dump() == {"nearest": 0, "shared": 4, "had": 5}


@pytest.mark.parametrize(
    "content",
    [b"", b"{}\n", b"no json\n", b'{"type": "end", "at": 1}\n', b'{"type": "nothing"}\n', b"[]\n"],
)
def test_file_that_is_no_journal_is_refused(tmp_path: Path, content: bytes) -> None:
    """Rather than read as an attempt without calls."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)

    with pytest.raises(InferenceError, match=r"a\.jsonl"):
        read_calls(path)


def test_run_without_capture_is_told_as_that(tmp_path: Path) -> None:
    """Not as a file that is missing: nothing was lost."""
    with pytest.raises(InferenceError, match="only if it is made with --capture"):
        read_calls(tmp_path / "calls.jsonl")


def test_journal_with_a_call_taken_out_is_refused(tmp_path: Path) -> None:
    """What follows it would be read with a prompt that nobody was given."""
    path = tmp_path / "a.jsonl"
    attempt = begin(path)
    turn(attempt, [1], [2])
    turn(attempt, [1, 2, 3], [4])
    attempt.end()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(line for line in lines if b'"call_id":"c0"' not in line))

    with pytest.raises(InferenceError, match="extends 2 ids, its segment has 0"):
        read_calls(path)


def test_line_that_does_not_fit_on_the_disk_leaves_the_journal_whole(tmp_path: Path) -> None:
    """Half of it stood there, and the next one went on in it: no line could be read any more."""
    attempt = begin(tmp_path / "a.jsonl")
    turn(attempt, [1], [2])
    size = (tmp_path / "a.jsonl").stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            turn(attempt, [1, 2, 3], [4])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "a.jsonl").stat().st_size == size
    turn(attempt, [1, 2, 3], [5])
    attempt.end()

    assert [one.call.completion_token_ids for one in read_calls(tmp_path / "a.jsonl").turns] == [
        (2,),
        (5,),
    ]
