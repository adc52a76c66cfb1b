"""Answers that an engine should never give, in every place of them."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldframe.inference.dialects import CHAT, MESSAGES, RESPONSES, Dialect
from coldframe.inference.engine import EngineFailedError, _parse
from coldframe.inference.evidence import examine
from coldframe.trajectories.calls import Level

FUNCTION = {"name": "bash", "arguments": '{"command": "ls"}'}
GOOD: dict[str, Any] = {
    "id": "chatcmpl-1",
    "created": 1,
    "model": "m",
    "choices": [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "hello",
                "reasoning_content": "hm",
                "tool_calls": [{"id": "c", "type": "function", "function": FUNCTION}],
            },
            "finish_reason": "tool_calls",
            "stop_reason": None,
            "token_ids": [1, 2],
            "logprobs": {"content": [{"token": "a", "logprob": -0.5}, {"logprob": 0}]},
        }
    ],
    "usage": {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 1},
    },
    "prompt_token_ids": [1, 2, 3],
}
ASKED: dict[str, dict[str, Any]] = {
    "chat": {
        "messages": [{"role": "user", "content": "x"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "return_token_ids": True,
    },
    "responses": {"input": "x"},
    "messages": {"messages": [{"role": "user", "content": "x"}], "stop_sequences": ["x"]},
}
JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4),
    st.sampled_from([[], {}, [None], {"content": None}, "\ud800", 10**400, -(2**70), [[1]]]),
)  # fmt: skip


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    steps = value.items() if isinstance(value, dict) else ()
    steps = enumerate(value) if isinstance(value, list) else steps
    for key, one in steps:
        yield from _places(one, (*path, key))


PLACES = [*_places(GOOD)]


def _spoilt(path: tuple[Any, ...], junk: Any, *, gone: bool) -> dict[str, Any]:
    answer = copy.deepcopy(GOOD)
    place: Any = answer
    for one in path[:-1]:
        place = place[one]
    if gone:
        del place[path[-1]]
    else:
        place[path[-1]] = junk
    return answer


def test_good_answer_proves_everything() -> None:
    """The control of what follows."""
    evidence = examine(GOOD, Level.TOKENS)

    assert (evidence.level, evidence.flaws) == (Level.TOKENS, ())
    assert evidence.logprobs == [-0.5, 0.0]


@given(path=st.sampled_from(PLACES), junk=JUNK, gone=st.booleans())
def test_junk_anywhere_is_no_answer_or_is_carried_and_never_wrong_tokens(
    path: tuple[Any, ...], junk: Any, gone: bool
) -> None:
    """Nothing in an answer may bring the proxy down, or get junk into a column."""
    try:
        answer = _parse(json.dumps(_spoilt(path, junk, gone=gone)).encode())
    except EngineFailedError:
        return
    for level in Level:
        evidence = examine(answer, level)
        assert (evidence.level is level) == (not evidence.flaws)
        if evidence.prompt is not None:
            assert evidence.completion is not None
            assert evidence.logprobs is not None
            assert all(type(one) is int for one in (*evidence.prompt, *evidence.completion))
            assert all(math.isfinite(one) and one <= 0 for one in evidence.logprobs)
            assert len(evidence.completion) == len(evidence.logprobs)
    for dialect in (CHAT, RESPONSES, MESSAGES):
        _carry(dialect, answer)


def _carry(dialect: Dialect, answer: dict[str, Any]) -> None:
    asked = dialect.ask(ASKED[dialect.name], {})
    shown = dialect.answer(answer, asked)
    json.dumps(shown).encode()
    b"".join(dialect.events(shown, asked))


@pytest.mark.parametrize(
    "arguments", ['{"a":  1}', "{", "", "[]", "null", '"x"', '{"_arguments": "x"}', '{"a": 1e400}']
)
def test_arguments_come_back_as_the_model_wrote_them(arguments: str) -> None:
    """By an API that can show nothing but an object."""
    answer = copy.deepcopy(GOOD)
    answer["choices"][0]["message"]["tool_calls"][0]["function"] = {
        "name": "bash",
        "arguments": arguments,
    }
    asked = MESSAGES.ask(ASKED["messages"], {})
    content = json.loads(json.dumps(MESSAGES.answer(answer, asked)["content"]))
    json.dumps(content, allow_nan=False)
    again = {"messages": [{"role": "assistant", "content": content}]}
    (message,) = MESSAGES.ask(again, {"c": arguments}).body["messages"]

    assert message["tool_calls"][0]["function"]["arguments"] == arguments
    assert (message["content"], message["reasoning_content"]) == ("hello", "hm")
