"""Which parameters of a call say how it was sampled."""

from __future__ import annotations

from typing import Any

import pytest

from coldframe.learning.captured import shaping

FREE = {"temperature": 1.0, "top_p": 1.0}
CALLED = {"type": "function", "function": {"name": "bash"}}


@pytest.mark.parametrize(
    "more",
    [
        {"min_tokens": 8},
        {"bad_words": ["x"]},
        {"allowed_token_ids": [1]},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a+"}},
        {"guided_json": {}},
        {"regex": "a+"},
        {"use_beam_search": True},
        {"tool_choice": "required"},
        {"tool_choice": CALLED},
    ],
)
def test_what_forbids_tokens_is_a_way_of_sampling(more: dict[str, Any]) -> None:
    """Its log-probabilities are of another distribution, and passed for those of the free one."""
    assert shaping({**FREE, **more}) == {**FREE, **more}


@pytest.mark.parametrize(
    "more",
    [
        {"seed": 1, "stop": ["x"], "max_tokens": 9, "user": "a", "parallel_tool_calls": True},
        {"tool_choice": "auto"},
        {"tool_choice": "none"},
        {"min_p": None},
    ],
)
def test_what_leaves_every_token_its_chance_is_none(more: dict[str, Any]) -> None:
    """Else calls that were sampled alike could not stand in one trial."""
    assert shaping({**FREE, **more}) == FREE
