"""A reward file decides what a policy learns, and an agent may have had its hands on it."""

from __future__ import annotations

import pytest

from coldframe.protocol.errors import RewardInvalidError, Side
from coldframe.rollouts.rewards import MAX_REWARD_BYTES, parse_reward

JSON, TEXT = "/logs/verifier/reward.json", "/logs/verifier/reward.txt"


@pytest.mark.parametrize(
    ("path", "content", "rewards"),
    [
        (TEXT, b"1", {"reward": 1.0}),
        (TEXT, b" 0.25\n", {"reward": 0.25}),
        (TEXT, b"0", {"reward": 0.0}),
        (TEXT, b"-1.5e-3\r\n", {"reward": -0.0015}),
        (JSON, b"1", {"reward": 1.0}),
        (JSON, b'{"reward": 0.5}', {"reward": 0.5}),
        (JSON, b'{"tests": 1, "style": -0.5}', {"tests": 1.0, "style": -0.5}),
    ],
)
def test_reward_of_finite_numbers_is_read(
    path: str, content: bytes, rewards: dict[str, float]
) -> None:
    """The control: what a verifier should write is taken as it stands."""
    assert parse_reward(content, path) == rewards


@pytest.mark.parametrize(
    ("path", "content"),
    [
        (TEXT, b""),
        (TEXT, b" \n"),
        (TEXT, b"abc"),
        (TEXT, b"true"),
        (TEXT, b"nan"),
        (TEXT, b"inf"),
        (TEXT, b"-Infinity"),
        (TEXT, b"1e999"),
        (TEXT, b"1_000"),
        (TEXT, b"0x1"),
        (TEXT, b"1 2"),
        (TEXT, b"1\0"),
        (TEXT, "\N{FULLWIDTH DIGIT ONE}".encode()),
        (TEXT, b"\xff1"),
        (TEXT, b'{"reward": 1}'),
        (JSON, b""),
        (JSON, b"{"),
        (JSON, b"true"),
        (JSON, b"null"),
        (JSON, b'"0.5"'),
        (JSON, b"[1]"),
        (JSON, b"NaN"),
        (JSON, b"-Infinity"),
        (JSON, b"1e999"),
        (JSON, b"1" + b"0" * 400),
        (JSON, b"{}"),
        (JSON, b'{"reward": true}'),
        (JSON, b'{"reward": "1"}'),
        (JSON, b'{"reward": null}'),
        (JSON, b'{"reward": NaN}'),
        (JSON, b'{"reward": {"a": 1}}'),
        (JSON, b'{"reward": [1]}'),
        (JSON, b'{"reward": 0, "reward": 1}'),
        (JSON, b'{"": 1}'),
        (JSON, b'{"reward": 1} {"reward": 0}'),
        (JSON, b"\xef\xbb\xbf1"),
        (JSON, b'{"a": 1, "\\ud800": 1}'),
        (JSON, b"[" * 50_000),
        (JSON, b" " * MAX_REWARD_BYTES + b"1"),
    ],
)
def test_reward_of_anything_else_is_a_verifier_failure(path: str, content: bytes) -> None:
    """Coercing any of these to a number would train on noise, or on a forgery."""
    with pytest.raises(RewardInvalidError) as caught:
        parse_reward(content, path)

    assert caught.value.side is Side.VERIFIER
    assert path in str(caught.value)
